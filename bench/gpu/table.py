"""Writes the measurements as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]  # Any: plain JSON

# part -> its title, the comparison beside the figure, and whether a share is a ratio of times
PARTS: dict[str, tuple[str, str, str]] = {
    "ceilings": ("What the device can do", "", ""),
    "decode": ("Decode steps, the model alone", "floor", "of the floor"),
    "attention": ("Attention of decodes", "floor, or peer", "of the floor, or times as fast as the peer"),
    "prefill": ("A long prompt in one step", "largest product", "of it"),
    "sampling": ("Masks and draws", "", "of the step"),
    "forks": ("Branches on one prefix", "each by itself", "times as fast"),
    "matrices": ("Matrices of one row", "floor, or torch in bfloat16", "of the floor, or times as fast"),
    "quantized": ("Whole steps on fewer bits", "bfloat16", "times as fast"),
    "overhead": ("Beside the model, at many rows", "", "of the step"),
    "deterministic": ("Deterministic", "without it", "times as fast"),
    "startup": ("Start", "goal", "of it"),
    "whole": ("Whole steps of the engine", "its graph on the device", "of the step"),
    "peers": ("transformers, beside whole steps of the engine and its prefill", "ours", "times as fast ours is"),
}


def table(results: Json) -> str:
    """All parts that there are."""
    hardware = results["hardware"]
    lines = [
        f"Measured on {results['date']} with `{results['command']}`: {hardware['gpu'] or hardware['cpu']}, torch "
        f"{hardware['torch']}, Python {hardware['python']}. Medians, with the least and largest of the repeats.",
    ]
    for name, (title, beside, share) in PARTS.items():
        if name in results:
            lines += ["", f"### {title}", "", *_part(results[name], beside, share)]
    goals = [
        figure for name in PARTS for figure in results.get(name, {}).get("figures", ()) if figure["met"] is not None
    ]
    if goals:
        lines += ["", f"{sum(figure['met'] for figure in goals)} of {len(goals)} goals are met."]
    return "\n".join(lines) + "\n"


def _part(part: Json, beside: str, share: str) -> list[str]:
    lines = []
    if part.get("figures"):
        lines = [f"| what | measured | {beside} | share ({share or '–'}) | goal | met |", "|---|---|---|---|---|---|"]
        lines += [_line(figure) for figure in part["figures"]]
    if "error" in part:
        lines += ["", f"Not measured: {part['error']}"]
    return lines


def _line(figure: Json) -> str:
    if "error" in figure["more"]:
        return f"| {figure['what']} | does not run: {_cell(figure['more']['error'])} | | | | |"
    unit = figure["unit"]
    measured = f"{_number(figure['value'])} {unit} ({_number(figure['least'])}–{_number(figure['largest'])})"
    floor = "" if figure["floor"] is None else f"{_number(figure['floor'])} {unit}"
    goal = figure["goal"]
    shown = "" if goal is None else f"{'≤' if figure['most'] else '≥'} {_share(goal, goal)}"
    met = {None: "", True: "yes", False: "**no**"}[figure["met"]]
    return f"| {figure['what']} | {measured} | {floor} | {_share(figure['share'], goal)} | {shown} | {met} |"


def _share(share: float | None, goal: float | None) -> str:
    """A part of a limit in percent; a ratio as such."""
    if share is None:
        return ""
    return f"{share:.2f}×" if max(share, goal or 0) > 1.2 else f"{100 * share:.1f}%"


def _number(value: float) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:120]
