"""A load as tables and a picture: the distributions side by side, and arrivals and completions over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.serve.load_client import Load

_TIMES = {"ttft_s": "first token", "itl_s": "between tokens", "gap_s": "between pieces", "e2e_s": "whole answer"}


def table(summaries: Sequence[dict[str, Any]], kind: str | None = None) -> Table:  # Any: JSON
    """All servers beside each other; of one class of requests, or of all."""
    parts = [each if kind is None else each["kinds"].get(kind, {}) for each in summaries]
    made = Table(title=kind or "all requests", title_justify="left")
    made.add_column("")
    for each in summaries:
        made.add_column(each["target"], justify="right")
    rows: list[tuple[str, str, str]] = [("requests", "requests", "d"), ("answered", "answered", "d")]
    for key, name, form in rows:
        made.add_row(name, *(format(part.get(key, 0), form) for part in parts))
    for key, name in _TIMES.items():
        for percent in ("p50", "p95", "p99"):
            cells = [part.get(key, {}).get(percent) for part in parts]
            made.add_row(f"{name}, {percent}", *("" if cell is None else _time(cell) for cell in cells))
    made.add_row("tokens/s", *(f"{part.get('tokens_per_s', 0):,.1f}" for part in parts))
    made.add_row("from cache", *(f"{part.get('cached', 0):.1%}" for part in parts))
    made.add_row("kept the objective", *(f"{part.get('good', 0):.1%}" for part in parts))
    made.add_row("goodput, requests/s", *(f"{part.get('goodput_per_s', 0):.2f}" for part in parts))
    return made


def picture(loads: Sequence[Load], path: Path) -> None:
    """Distributions of the times above, and below requests under way and first tokens over the time of the load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for load in loads:
        answered = [outcome for outcome in load.outcomes if outcome.answered]
        gaps = [gap for outcome in answered for gap in outcome.gaps]
        for axis, values in ((axes[0, 0], [o.ttft for o in answered]), (axes[0, 1], gaps)):
            if values:
                axis.plot(np.sort(values), np.linspace(0, 1, len(values)), label=load.target.name)
        times = np.linspace(0, load.seconds, 200)
        sent = np.array([outcome.sent for outcome in load.outcomes])
        ended = np.array([outcome.ended for outcome in load.outcomes])
        axes[1, 0].plot(times, [int(((sent <= t) & (t < ended)).sum()) for t in times], label=load.target.name)
        axes[1, 1].plot([o.due for o in answered], [o.ttft for o in answered], ".", ms=3, label=load.target.name)
    names = (("first token, s", "share"), ("between pieces, s", "share"), ("time, s", "under way"),
             ("asked at, s", "first token, s"))  # fmt: skip
    for axis, (x, y) in zip(axes.flat, names, strict=True):
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.grid(alpha=0.3)
    for axis in axes[0]:
        axis.set_xscale("log")
    axes[0, 0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _time(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"
