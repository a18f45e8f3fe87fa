"""Writes the figures of constraints: beside their goals, as JSON, as a section of docs/performance.md, plotted."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.report import PAGE, RESULTS, ROOT, Results, between

BEGIN, END = "<!-- constraints: begin -->", "<!-- constraints: end -->"
PICTURE = ROOT / "docs" / "img" / "constraints.png"


def spread(values: Sequence[float]) -> dict[str, Any]:  # Any: plain JSON
    """Of a sample: its size, the usual percentiles, its largest, and all percentiles from 0 to 100 to plot."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("nothing was measured")
    at = [ordered[round(i / 100 * (len(ordered) - 1))] for i in range(101)]
    return {"n": len(ordered), "p50": at[50], "p95": at[95], "p99": at[99], "max": ordered[-1], "percentiles": at}


def interval(values: Sequence[float]) -> dict[str, float]:
    """The median with its 95% interval by bootstrap, and the extremes."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return {
        "n": len(values),
        "median": statistics.median(values),
        "low": medians[50],
        "high": medians[1949],
        "min": min(values),
        "max": max(values),
    }


def save(results: Results) -> Path:
    """Write the JSON, named by date and hardware."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{results['date']}-constraints-{results['slug']}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return path


def write_page(results: Results) -> None:
    """Replace the measured part of the page's section on constraints, and its picture."""
    picture = f"![Time to compile and time for a mask](img/{PICTURE.name})"
    between(PAGE, f"{tables(results)}\n{picture}\n", BEGIN, END)
    draw(results, PICTURE)


def tables(results: Results) -> str:
    """Markdown of everything that was measured."""
    hw = results["hardware"]
    lines = [
        f"Measured on {results['date']} with `{results['command']}`: {hw['gpu'] or hw['cpu']}, {hw['cores']} cores, "
        f"{hw['cpu_capability']}, torch {hw['torch']}, Python {hw['python']}; a vocabulary of {results['vocab_size']}.",
        "",
        "| what | measured | goal |",
        "|---|---|---|",
        *(f"| {what} | {measured} | {goal} |" for what, measured, goal in _figures(results)),
        "",
        *_side_by_side(results["side_by_side"]),
        *_bombs(results["bombs"]),
        *_peers(results["peers"]),
        *_suite(results["suite"]),
    ]
    return "\n".join(lines) + "\n"


def _figures(results: Results) -> Iterator[tuple[str, str, str]]:
    compiling, filling, forbidding = results["compiling"], results["filling"], results["forbidding"]
    cold, tools = compiling["cold_s"], compiling["tools_cold_s"]
    yield (
        f"compiling one of {cold['n']} schemas never seen ({compiling['refused']} more refused), p50 / p95 / largest",
        _times(cold, "p50", "p95", "max"),
        "p95 ≤ 50 ms",
    )
    yield (
        f"compiling {compiling['tools']} tools as one Hermes plan, {tools['n']} sets, p50 / largest",
        f"{_times(tools, 'p50', 'max')}, after {_time(compiling['tools_plan_s']['p50'])} for the plan",
        "≤ 100 ms",
    )
    yield (
        "finding a schema / a set of tools compiled before, p99",
        f"{_time(compiling['hit_s']['p99'])} / {_time(compiling['tools_hit_s']['p99'])}",
        "≤ 100 µs",
    )
    for name, what in (("replayed", "known answers"), ("walked", "random walks")):
        yield (
            f"filling one row along {what}, p50 / p99 / largest",
            _times(filling[f"{name}_s"], "p50", "p99", "max"),
            "p99 ≤ 0.5 ms",
        )
    yield (
        f"filling {filling['rows']} rows on the engine's threads, p50 / p99",
        _times(filling["batch_s"], "p50", "p99"),
        "–",
    )
    yield (
        f"forbidding in {forbidding['rows']} rows of fp32 logits, p50, beside a copy of them, p50 "
        f"({forbidding['copy_gb_per_s']:.1f} GB/s, {forbidding['threads']} threads)",
        f"{_time(forbidding['batch_s']['p50'])}, {_time(forbidding['copy_s']['p50'])}: "
        f"{_ratio(forbidding['over_copy'])}",
        "–",
    )
    yield "forbidding in one row, caches cold, p50 / p99", _times(forbidding["one_s"], "p50", "p99"), "–"


def _side_by_side(runs: Sequence[Results]) -> Iterator[str]:
    first, turns = runs[0], runs[0]["free_alone_over_itself"]["n"]
    yield (
        f"Side by side: {first['rows']} rows of a random model ({first['model']}), {first['constrained_rows']} of them "
        f"constrained, against as many free ones just before and after; medians of {turns} turns with 95% intervals."
    )
    yield ""
    yield "| | free, alone | constrained TPOT over it | free TPOT beside over it | free, alone, over itself |"
    yield "|---|---|---|---|---|"
    for run in runs:
        yield (
            f"| {'forced tokens taken at once' if run['forced'] else 'every token drawn (logprobs on all rows)'} "
            f"| {_time(run['free_alone_tpot_s'])} a token | {_ratio(run['constrained_over_free_alone'])} "
            f"| {_ratio(run['free_beside_over_free_alone'])} | {_ratio(run['free_alone_over_itself'])} |"
        )
    yield "| goal | | ≤ 1.03× | ≤ 1.00×, within noise | |"
    yield ""


def _bombs(run: Results) -> Iterator[str]:
    yield (
        f"A compile bomb after the other beside {run['streams']} streams: p99 of the gap between tokens "
        f"{_time(run['with_bombs_itl_s']['p99'])}, without {_time(run['quiet_itl_s']['p99'])}: "
        f"{_ratio(run['p99_over_quiet'])}, where the quiet one over itself is {_ratio(run['quiet_p99_over_itself'])} "
        f"(p50: {_ratio(run['p50_over_quiet'])}). Goal: p99 moves by less than 5%."
    )
    yield ""
    yield "| bomb | median time | outcome |"
    yield "|---|---|---|"
    for name, bomb in run["bombs"].items():
        yield f"| {name} | {_time(bomb['median_s'])} | {bomb['outcome'].replace('|', chr(92) + '|')[:120]} |"
    yield ""


def _peers(rows: Sequence[Results]) -> Iterator[str]:
    yield "The same schemas and known answers in turn, each library in a process of its own with its own defaults:"
    yield ""
    yield "| | compiled / refused / too slow | compiling p50 / p95 | mask p50 / p99 | both, for a whole text, p50 |"
    yield "|---|---|---|---|---|"
    for row in rows:
        if row["version"] is None:
            yield f"| {row['name']} | not installed | | | |"
        elif not row["compiled"]:
            yield f"| {_named(row)} | 0 / {row['refused']} / {row['timed_out']} | | | |"
        else:
            yield (
                f"| {_named(row)} | {row['compiled']} / {row['refused']} / {row['timed_out']} "
                f"| {_times(row['compile_s'], 'p50', 'p95')} | {_times(row['mask_s'], 'p50', 'p99')} "
                f"| {_time(row['whole_s']['p50'])} |"
            )
    yield ""


def _suite(rows: Sequence[Results]) -> Iterator[str]:
    yield (
        "JSON Schema's official suite (draft 2020-12), instances written compactly, byte by byte, so that tokens play "
        "no part. Keys come as the suite has them: whoever keeps to the schema's order does not take some of those. Of "
        "the schemas that each takes:"
    )
    yield ""
    yield "| | schemas taken / refused / too slow | invalid instances taken | valid instances not taken |"
    yield "|---|---|---|---|"
    for row in rows:
        if row["version"] is None:
            yield f"| {row['name']} | not installed | | |"
        else:
            yield (
                f"| {_named(row)} | {row['admitted']} / {row['refused']} / {row['timed_out']} "
                f"| {row['false_accepts']} of {row['invalid']} | {row['false_refusals']} of {row['valid']} |"
            )


def _named(row: Results) -> str:
    package = "" if row["package"] == row["name"] else f"{row['package']} "
    return f"{row['name']} ({package}{row['version']})"


def draw(results: Results, path: Path) -> None:
    """The shares of schemas compiled, and of masks filled, within a time; a line for each library."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10.4, 3.6))
    for axis, key, what, goal in (
        (axes[0], "compile_s", "compiling a schema, ms", 50.0),
        (axes[1], "mask_s", "a mask, ms", 0.5),
    ):
        for row in results["peers"]:
            if row.get("compiled"):
                axis.plot([value * 1e3 for value in row[key]["percentiles"]], range(101), label=row["name"])
        axis.axvline(goal, color="gray", linestyle=":", label="goal")
        axis.set(xscale="log", xlabel=what, ylabel="% within")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _times(spread: Results, *which: str) -> str:
    return " / ".join(_time(spread[each]) for each in which)


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _ratio(each: Results) -> str:
    return f"**{each['median']:.3f}×** ({each['low']:.3f}–{each['high']:.3f})"
