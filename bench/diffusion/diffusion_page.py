"""Writes what was measured of masked-diffusion decoding: the tables of docs/diffusion.md, and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench import report

PAGE = report.ROOT / "docs" / "diffusion.md"
PICTURE = report.ROOT / "docs" / "img" / "diffusion.svg"
NAMES = {"sums": "independent sums", "chain": "a chain of sums", "gap": "gaps in lists of words"}
Row = dict[str, Any]  # Any: plain JSON


def way_of(row: Row) -> str:
    """Names the way in which a row's answers were decoded."""
    if row["model"] == "twin":
        return "the twin, left to right"
    block = f"blocks of {row['block_size']}"
    if row["threshold"] is not None:
        return f"{block}, all of {row['threshold']:g} or more"
    return f"{block}, {row['tokens_per_step']} a pass"


def tables(results: report.Results) -> str:
    """Returns Markdown of all rows, a table for each task; several seeds stand side by side."""
    hw, rows = results["hardware"], results["rows"]
    seeds = sorted({row["seed"] for row in rows})
    lines = [
        f"Measured on {results['date']} with `{results['command']}`: {hw['cpu']}, {hw['cores']} cores, "
        f"{hw['cpu_capability']}, torch {hw['torch']}; one thread, one question at a time, load "
        f"{results['load_before']} before it.",
    ]
    for task, name in NAMES.items():
        lines += ["", f"**{name[0].upper()}{name[1:]}**, {rows[0]['n']} held-out questions a seed:", ""]
        head = "".join(f" right, seed {seed} |" for seed in seeds)
        lines += [f"| |{head} tokens a pass | passes an answer |", "|---|" + "---|" * (len(seeds) + 2)]
        of_task = [row for row in rows if row["task"] == task]
        for way in dict.fromkeys(way_of(row) for row in of_task):
            same = [row for row in of_task if way_of(row) == way]
            right = "".join(f" {row['right'] / row['n']:.1%} ({row['low']:.1%} – {row['high']:.1%}) |" for row in same)
            low, high = (sum(row["tokens_per_pass_interval"][at] for row in same) / len(same) for at in (0, 1))
            pace, passes = (sum(row[key] for row in same) / len(same) for key in ("tokens_per_pass", "passes"))
            lines.append(f"| {way} |{right} {pace:.2f} ({low:.2f} – {high:.2f}) | {passes:.1f} |")
    return "\n".join(lines) + "\n"


def write_page(results: report.Results) -> None:
    """Replaces the measured part of docs/diffusion.md, and its picture."""
    report.between(PAGE, tables(results))
    draw(results["rows"])


def draw(rows: Sequence[Row]) -> None:
    """Draws right answers over tokens a pass, a panel for each task; the first seed."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "diffusion"  # the same picture has the same bytes
    from matplotlib import pyplot

    seed = min(row["seed"] for row in rows)
    figure, axes = pyplot.subplots(1, len(NAMES), figsize=(11, 3.6), sharey=True)
    for axis, (task, name) in zip(axes, NAMES.items(), strict=True):
        mine = [row for row in rows if row["task"] == task and row["seed"] == seed]
        curves = {
            "the twin": [row for row in mine if row["model"] == "twin"],
            "a number a pass": [row for row in mine if row.get("tokens_per_step") and row["block_size"] == 16],
            "all above a threshold": [row for row in mine if row.get("threshold") and row["block_size"] == 16],
            "blocks of 4 and 8": [row for row in mine if row.get("block_size") in (4, 8)],
        }
        for (label, found), style in zip(curves.items(), ("*", "o-", "s--", "^"), strict=True):
            found.sort(key=lambda row: row["tokens_per_pass"])
            x, y = [row["tokens_per_pass"] for row in found], [row["right"] / row["n"] for row in found]
            axis.plot(x, y, style, label=label, markersize=11 if style == "*" else 4)
            low, high = [row["low"] for row in found], [row["high"] for row in found]
            axis.vlines(x, low, high, alpha=0.4)
        axis.set(xlabel="tokens a pass", title=name, xscale="log", xticks=[1, 2, 4, 8, 16], ylim=(-0.03, 1.03))
        axis.set_xticklabels(["1", "2", "4", "8", "16"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("right answers, 95% intervals")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
