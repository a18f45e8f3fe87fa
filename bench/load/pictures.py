"""Plots of the load's figures: percentiles by policy, and growth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.parts import Json

IMG = Path(__file__).parents[2] / "docs" / "img"


def draw(made: Json) -> None:
    """Every picture with its parts measured."""
    for name in ("azure", "mooncake"):
        if part := made.get(f"policies on {name}"):
            _policies(name, part["policies"])
    if all(f"growth of {what}" in made for what in ("requests", "context", "streams")):
        _growth(made)


def _policies(trace: str, policies: Json) -> None:
    figure, axes = _axes(1, 4, (14, 3.6))
    names = list(policies)
    for axis, (key, title) in zip(
        axes, (("ttft_s", "first token, s"), ("gap_s", "between tokens, s"), ("e2e_s", "whole answer, s")), strict=False
    ):
        for percent, mark in (("p50", "o"), ("p95", "s"), ("p99", "D")):
            axis.plot([policies[name][key][percent] for name in names], names, mark, label=percent)
        axis.set_xscale("log")
        axis.set_title(title)
        axis.grid(alpha=0.3)
        axis.invert_yaxis()
    axes[0].legend()
    axes[3].barh(names, [policies[name]["goodput_per_s"] for name in names])
    axes[3].set_title("goodput, requests/s")
    axes[3].invert_yaxis()
    for axis in axes[1:]:
        axis.set_yticklabels([])
    _save(figure, f"load-policies-{trace}")


def _growth(made: Json) -> None:
    figure, axes = _axes(1, 3, (14, 3.8))
    rows = made["growth of requests"]["rows"]
    counts = [row["requests"] for row in rows]
    axes[0].plot(counts, [row["seconds"] for row in rows], "o-", label="until the last is done")
    axes[0].plot(counts, [row["ttft_max_s"] for row in rows], "s-", label="until the last begins")
    axes[0].plot(counts, [row["ttft_p50_s"] for row in rows], "D-", label="until half have begun")
    axes[0].set(xlabel="requests at once", ylabel="s", xscale="log", yscale="log")
    rows = made["growth of context"]["rows"]
    lengths = [row["tokens"] for row in rows]
    axes[1].plot(lengths, [row["ttft_s"] * 1e3 for row in rows], "o-", label="to read it, ms")
    axes[1].plot(lengths, [row["itl_ms"] for row in rows], "s-", label="each token after it, ms")
    axes[1].set(xlabel="tokens of context", ylabel="ms", xscale="log", yscale="log")
    rows = made["growth of streams"]["rows"]
    for length in sorted({row["context"] for row in rows}):
        these = [row for row in rows if row["context"] == length]
        axes[2].plot(
            [row["streams"] for row in these], [row["tokens_per_s"] for row in these], "o-", label=f"context {length}"
        )
    axes[2].set(xlabel="streams", ylabel="tokens/s, all together", xscale="log")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend()
    _save(figure, "load-growth")


def _axes(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:  # Any: matplotlib is not typed here
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt.subplots(rows, columns, figsize=size, layout="constrained")


def _save(figure: Any, name: str) -> None:  # Any: see above
    from matplotlib import pyplot as plt

    figure.savefig(IMG / f"{name}.png", dpi=110)
    plt.close(figure)
