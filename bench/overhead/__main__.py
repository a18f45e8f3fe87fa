"""`python -m bench.overhead`: the cost of serving beside the model. About two minutes on two cores.

Prints tables and keeps the JSON. The core stepped directly, handles against the core, and streams over
HTTP; goals stand beside what was measured.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench import hardware
from bench.overhead.handles import handles
from bench.overhead.overhead_streams import streams
from bench.overhead.steps import SAMPLED, decode, prefill

console = Console(width=140)


PARTS = ("core", "handles", "streams")


def main(
    model: Annotated[Path, typer.Option(help="A real model, for handles against the core.")] = Path("models/pebble"),
    only: Annotated[str, typer.Option(help=f"Parts, of {', '.join(PARTS)}; the rest stays as it was today.")] = "",
    write: Annotated[bool, typer.Option(help="Keep the JSON in bench/results/.")] = True,
    quick: Annotated[bool, typer.Option(help="Fewer steps and turns.")] = False,
) -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `ponder serve` has it
    parts = tuple(only.split(",")) if only else PARTS
    if bad := [part for part in parts if part not in PARTS]:
        raise typer.BadParameter(f"{bad[0]!r} is no part; accepted: {', '.join(PARTS)}.")
    date = datetime.date.today().isoformat()
    path = Path("bench/results") / f"{date}-overhead-{hardware.slug()}.json"
    made: dict[str, Any] = json.loads(path.read_text()) if only and path.exists() else {}
    made |= {"date": date, "hardware": hardware.describe()}
    steps, turns, tokens = (100, 1, 300) if quick else (500, 3, 800)
    if "core" in parts:
        made["decode"] = [decode(rows, steps) for rows in (1, 16, 64, 256)]
        made["decode_sampled"] = [decode(64, steps // 4, SAMPLED)]
        made["prefill"] = prefill(1 << 17)
    if "handles" in parts:
        made["handles"] = [
            handles(model, rows, 200 if rows < 64 else 80, turns, loop="plain", runs_in=where)
            for rows in (1, 16, 64)
            for where in ("thread", "process")
        ]
    if "streams" in parts:
        made["streams"] = [streams(where, tokens=tokens) for where in ("thread", "process")]
    _show(made)
    if write:
        path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        console.print(f"Kept in {path}.")


def _show(made: dict[str, Any]) -> None:
    names = "tokens/s of a core (goal: 20,000)", "step p50", "its CPU", "step p99 (goal: 2 ms)", "its CPU"
    table = Table("the core, null model", *names)
    for each in made.get("decode", []) + made.get("decode_sampled", []):
        name = f"{each['rows']} rows{', top-p' if each in made.get('decode_sampled', []) else ''}"
        clock, cpu = each["step_s"], each["step_cpu_s"]
        shown = (_ms(clock["p50"]), _ms(cpu["p50"]), _ms(clock["p99"]), _ms(cpu["p99"]))
        table.add_row(name, f"{each['tokens_per_cpu_s']:,.0f}", *shown)
    if "prefill" in made:
        table.add_row("prefill", f"{made['prefill']['tokens_per_cpu_s']:,.0f}")
    console.print(table)
    table = Table("handles, real model", "engine in", "the core alone, tokens/s", "handles", "ratio (goal: 0.95)")
    for each in made.get("handles", []):
        ratio = each["ratio"]
        table.add_row(
            f"{each['rows']} rows", each["engine"], f"{each['raw_tokens_per_s']:,.0f}",
            f"{each['handle_tokens_per_s']:,.0f}", f"{ratio['median']:.3f} ({ratio['min']:.3f}–{ratio['max']:.3f})",
        )  # fmt: skip
    console.print(table)
    table = Table(
        "64 streams at 200/s", "tokens/s", "gap p50", "gap p99 (goal: 25 ms)", "longest", "CPU: server", "engine"
    )
    for each in made.get("streams", []):
        gap, cpu = each["gap_s"], each["cpu"]
        table.add_row(
            f"engine in a {each['engine']}", f"{each['tokens_per_s']:,.0f}", _ms(gap["p50"]), _ms(gap["p99"]),
            _ms(gap["p100"]), f"{cpu['server']:.2f}", f"{cpu.get('engine', 0):.2f}",
        )  # fmt: skip
    console.print(table)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


if __name__ == "__main__":
    typer.run(main)
