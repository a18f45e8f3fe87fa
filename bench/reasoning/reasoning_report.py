"""Writes the measurements of reasoning as a table and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.cli.accuracy_curves import Curve, Point, draw
from bench.reasoning import cascading, routing, sampling
from bench.reasoning.asked import BenchRow

PICTURES = Path(__file__).parents[2] / "docs" / "img"
Parts = Mapping[str, Any]  # Any: plain JSON
TOKENS = "tokens that the model wrote for an answer"


def rows_of(parts: Parts, name: str) -> list[BenchRow]:
    """Of a part that was measured; else none."""
    return [BenchRow(**each) for each in parts.get(name, ())]


def derived(parts: Parts) -> list[BenchRow]:
    """Returns the shares of sampling and minima at the tokens of each Wait, and of best of n at those of trees, by
    measured curves."""
    rows: list[BenchRow] = []
    for kind in ("game24", "arithmetic"):
        thought, samples = rows_of(parts, f"{kind} waits"), rows_of(parts, f"{kind} samples")
        waits = [each for each in thought if "/waits=" in each.name]
        curves = {way: [e for e in samples if f"/{way}/" in e.name] for way in (sampling.CONFIDENT, sampling.VOTED)}
        curves["a minimum"] = [*waits[:1], *(each for each in thought if "/minimum=" in each.name)]
        for way, curve in curves.items():
            rows += sampling.beside(waits, curve, f"{kind}/{way}")
    grown = [e for e in rows_of(parts, "trees") if "/tree: " in e.name and "(choosing)" not in e.name]
    checked = [e for e in rows_of(parts, "game24 samples") if f"/{sampling.CHECKED}/" in e.name]
    return rows + sampling.beside(grown, checked, f"game24/{sampling.CHECKED}")


def table(parts: Parts) -> str:
    """Markdown of all measured rows, and of those derived from them."""
    names = [name for name, made in parts.items() if isinstance(made, list)]
    rows = [each for name in names if name not in ("cascade", "routing") for each in rows_of(parts, name)]
    lines = ["| way | questions | right | 95% interval | tokens | of thinking | |", "|---|---|---|---|---|---|---|"]
    for each in [*rows, *derived(parts)]:
        more = ", ".join(f"{key} {value:.4g}" for key, value in (each.more or {}).items())
        lines.append(
            f"| {each.name} | {each.n} | {each.share:.1%} | {each.low:.1%} – {each.high:.1%} | {each.tokens:.0f} "
            f"| {each.thinking:.0f} | {more} |"
        )
    if "cascade" in parts:
        lines += ["", *(f"Cascade by {each}." for each in cascading.summary(rows_of(parts, "cascade")))]
    if "routing" in parts:
        lines += ["", *(f"Routing, {each}." for each in routing.summary(rows_of(parts, "routing")))]
    if over := parts.get("tree over http"):
        trees = over["summary"]
        lines += [
            "",
            f"Tree of 5 beams on forks, {trees['same_trees']} of {trees['puzzles']} trees the same in every way:",
        ]
        lines += [f"{value:.2f} times as fast as {way}." for way, value in trees["times_as_fast_as"].items()]
        lines += [f"{way}: {v:.3f} of the least tokens computed." for way, v in trees["computed_over_least"].items()]
    return "\n".join(lines)


def pictures(parts: Parts, folder: Path = PICTURES) -> list[Path]:
    """Plots the parts that there are; returns the files written."""
    drawn: dict[str, tuple[list[Curve], str, str, bool]] = {}
    extra = derived(parts)
    for kind in ("game24", "arithmetic"):
        waits, samples = rows_of(parts, f"{kind} waits"), rows_of(parts, f"{kind} samples")
        if waits:
            found = [
                _curve("Waits: 0, 1, 2, 4", [e for e in waits if "/waits=" in e.name], _after_equals),
                _curve("thinking of a minimum length", [e for e in waits if "/minimum=" in e.name], _after_equals),
                *(
                    _curve(f"{way}, at the tokens of the Waits", [e for e in extra if f"{kind}/{way}" in e.name])
                    for way in (sampling.VOTED, sampling.CONFIDENT)
                ),
            ]
            drawn[f"waits-{kind}"] = found, f"{_title(kind)}: thinking on, or sampling more", TOKENS, True
        if samples:
            ways = (sampling.CHECKED, sampling.VOTED, sampling.CONFIDENT)
            found = [_curve(way, [e for e in samples if f"/{way}/" in e.name], _shown) for way in ways]
            drawn[f"samples-{kind}"] = found, f"{_title(kind)}: several answers", TOKENS, True
    if grown := rows_of(parts, "trees"):
        of_test = [e for e in grown if "(choosing)" not in e.name]
        found = [
            *(_curve(e.name.partition("/")[2], [e], x="states") for e in of_test if "/tree: " in e.name),
            _curve("random legal search", [e for e in of_test if "/random" in e.name], x="states"),
        ]
        drawn["trees"] = found, f"{_title('game24')}: trees with b = 5", "states visited of a puzzle", False
    if cascade := rows_of(parts, "cascade"):
        found = [_curve(gate, [e for e in cascade if f"/{gate}/" in e.name], x="cost") for gate in cascading.GATES]
        found.append(_curve("the large model alone", [e for e in cascade if "/large alone" in e.name], x="cost"))
        title = "Cascade: pebble-draft, then pebble, on puzzles and sums"
        drawn["cascade"] = found, title, "cost, of the large model's alone", False
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (curves, title, x, log) in drawn.items():
        written.append(folder / f"reasoning-{name}.png")
        draw(written[-1], [each for each in curves if each.points], title, x, log=log)
    return written


def _curve(
    name: str, rows: Sequence[BenchRow], label: Any = lambda row: "", x: str = ""
) -> Curve:  # Any: of a row, text
    points = [Point((e.more or {})[x] if x else e.tokens, e.share, e.low, e.high, label(e)) for e in rows]
    return Curve(name, points)


def _after_equals(row: BenchRow) -> str:
    return row.name.rpartition("=")[2]


def _shown(row: BenchRow) -> str:
    n = row.name.rpartition("=")[2]
    return n if int(n) in sampling.SHOWN else ""


def _title(kind: str) -> str:
    return {"game24": "Game of 24", "arithmetic": "Arithmetic"}[kind]
