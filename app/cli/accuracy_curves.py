"""A picture of accuracy over tokens: a curve for each strategy, with the interval around it.

matplotlib comes with the development tools alone: without it there is no picture. Knows nothing of the measurements.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COLOURS = ("#2f5d50", "#b4552d", "#3d5a98", "#8a6d1f", "#7a3f73", "#4f4f4f", "#5c8a3a", "#a33b4a")


@dataclass(frozen=True, slots=True)
class Point:
    """`x` is its cost, the others are shares, 0 to 1. `label` may be empty."""

    x: float
    share: float
    low: float
    high: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one kind, plotted in the order of their cost. `joined` by a line, or each for itself."""

    name: str
    points: Sequence[Point]
    joined: bool = True


def can_draw() -> bool:
    """Returns whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, curves: Sequence[Curve], title: str, x_label: str, *, log: bool = True) -> None:
    """Write a picture of the kind that the path's suffix names, such as .png or .svg. Bands are 95% intervals.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError, ValueError: the file cannot be written, or there is no such kind of picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.6))
    for at, curve in enumerate(curves):
        colour = COLOURS[at % len(COLOURS)]
        points = sorted(curve.points, key=lambda point: point.x)
        x, y = [point.x for point in points], [point.share for point in points]
        low, high = [point.low for point in points], [point.high for point in points]
        if curve.joined and len(points) > 1:
            axes.plot(x, y, "o-", color=colour, label=curve.name, markersize=4)
            axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
        else:
            reach = [[max(0, p.share - p.low) for p in points], [max(0, p.high - p.share) for p in points]]
            axes.errorbar(x, y, yerr=reach, fmt="o", color=colour, label=curve.name, markersize=5, capsize=3)
        for point in points:
            if point.label:
                axes.annotate(
                    point.label, (point.x, point.share), textcoords="offset points", xytext=(4, 5), fontsize=7,
                    color=colour,
                )  # fmt: skip
    if log and all(point.x > 0 for curve in curves for point in curve.points):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
    axes.set(xlabel=x_label, ylabel="right answers, 95% intervals", title=title, ylim=(-0.02, 1.02))
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axes.grid(alpha=0.2)
    axes.legend(fontsize=8, loc="best")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
