"""`python -m bench` or `ponder bench`: measure the engine against `transformers` and against the memory's limit.

`ponder bench constraints` measures constraints on the logits, `ponder bench retrieval` documents and search,
`ponder bench agent` the loop that calls tools. `ponder bench serve` loads a server, ours or another's, over HTTP.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress

from bench import hardware, overheads, report
from bench.serve.command import serve
from bench.throughput import prefix, random_checkpoint, throughput

app = typer.Typer(add_completion=False)
app.command()(serve)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    model: Annotated[
        Path, typer.Option(help="A checkpoint to measure, beside a random one of 135M parameters.")
    ] = Path("models/pebble"),
    repeats: Annotated[int, typer.Option(min=1, help="Turns; the medians are reported.")] = 2,
    quick: Annotated[bool, typer.Option(help="The given model alone, one turn, few requests.")] = False,
    write: Annotated[bool, typer.Option(help="Keep the JSON and bring docs/performance.md up to date.")] = True,
) -> None:
    """Measure; print tables; keep them. Takes about ten minutes on two cores, one with --quick."""
    if context.invoked_subcommand is not None:
        return
    console = Console()
    bandwidth = hardware.read_bandwidth()
    repeats = 1 if quick else repeats
    concurrency = [1, 4] if quick else [1, 4, 16, 64]
    with tempfile.TemporaryDirectory() as scratch, Progress(console=console) as progress:
        models = [model] if quick else [model, random_checkpoint(Path(scratch) / "random-135m", model)]
        runs, prefixes = [], []
        for m in models:
            longest = 512 if m is model else 128  # the large one would take half an hour
            task = throughput(
                m,
                concurrency,
                longest=longest,
                dtype="float32",
                repeats=repeats,
                bandwidth=bandwidth,
                progress=progress,
            )
            runs.append(asyncio.run(task))
            turns = 15 * repeats if m is model else 2 * repeats
            prefixes.append(asyncio.run(prefix(m, dtype="float32", repeats=turns, progress=progress)))
    results: report.Results = {
        "date": datetime.date.today().isoformat(),
        "command": "make bench",
        "slug": hardware.slug(),
        "hardware": hardware.describe(),
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "throughput": runs,
        "prefix": prefixes,
        "fork": asyncio.run(overheads.fork(model)),
        "idle": overheads.idle(model),
    }
    console.print(Markdown(report.tables(results)))
    if write and not quick:
        console.print(f"Kept in {report.save(results).relative_to(report.ROOT)}; docs/performance.md is up to date.")
        report.write_page(results)


@app.command()
def constraints(
    quick: Annotated[bool, typer.Option(help="A little of everything, to see whether it runs.")] = False,
    write: Annotated[bool, typer.Option(help="Keep the JSON and bring docs/performance.md up to date.")] = True,
) -> None:
    """Measure constraints on the logits; print tables and JSON. Takes half an hour on two cores, some minutes with
    --quick, which keeps nothing."""
    from bench.constraints import QUICK, Scale, constraint_pages, on_hardware, qwen_sized
    from bench.constraints import constraints as measure
    from bench.constraints.material import missing

    console = Console(stderr=True)
    if reason := missing():
        console.print(f"Constraints are not measured: {reason}.")
        raise typer.Exit(1)
    with tempfile.TemporaryDirectory() as scratch, console.status("making a random model") as status:
        tokenizer, size, model = qwen_sized(Path(scratch))
        measured = asyncio.run(measure(tokenizer, size, model, QUICK if quick else Scale(), status.update))
    results = on_hardware(measured, "make bench BENCH_ARGS=constraints")
    console.print(Markdown(constraint_pages.tables(results)))
    print(json.dumps(results))
    if write and not quick:
        path = constraint_pages.save(results).relative_to(report.ROOT)
        constraint_pages.write_page(results)
        console.print(f"Kept in {path}; docs/performance.md is up to date.")


@app.command()
def retrieval(
    model: Annotated[Path, typer.Option(help="The model that answers.")] = Path("models/pebble"),
    work: Annotated[Path | None, typer.Option(help="A folder for indexes, found again the next time.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this part, repeatable: judged, chunking, evidence, sentences, ingest, search, answers."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option(help="A little of everything, to see whether it runs.")] = False,
    write: Annotated[bool, typer.Option(help="Keep the JSON and bring docs/retrieval.md up to date.")] = True,
) -> None:
    """Measure retrieval; print tables and JSON. Takes an hour on two cores, some minutes with --quick, which keeps
    nothing."""
    from bench.retrieval import PARTS, QUICK, RetrievalScale, measure, retrieval_pages
    from tests.known_answers import SHARED

    console = Console(stderr=True)
    if not (SHARED / "data" / "retrieval").is_dir():
        console.print("Retrieval is not measured: PONDER_SHARED has no data/retrieval.")
        raise typer.Exit(1)
    if unknown := set(only or ()) - set(PARTS):
        raise typer.BadParameter(f"{unknown.pop()!r} is no part; accepted: {', '.join(PARTS)}.", param_hint="--only")
    earlier = report.newest(f"retrieval-{hardware.slug()}") if only else {}
    if only and not earlier:
        raise typer.BadParameter("there is no earlier result of this hardware to add to.", param_hint="--only")
    with console.status("retrieval") as status:
        made = measure(SHARED, model, QUICK if quick else RetrievalScale(), status.update, work, only or PARTS)
    made = {**earlier, **made}
    console.print(Markdown(retrieval_pages.tables(made)))
    print(json.dumps(made))
    if write and not quick:
        path = retrieval_pages.write(made).relative_to(report.ROOT)
        console.print(f"Kept in {path}; docs/retrieval.md is up to date.")


@app.command()
def agent(
    model: Annotated[Path, typer.Option(help="A checkpoint that can be held to calls.")] = Path("models/pebble"),
    repeats: Annotated[int, typer.Option(min=1, help="Conversations of six calls, and tens of stops.")] = 10,
    write: Annotated[bool, typer.Option(help="Keep the JSON and bring docs/tools.md up to date.")] = True,
) -> None:
    """Measure what the agent's loop adds to the engine, and Stop; print a table and JSON. Takes two minutes."""
    from bench.agent_turns import measure, table

    console = Console(stderr=True)
    with console.status("the agent's loop"):
        made = asyncio.run(measure(model, repeats))
    console.print(Markdown(table(made)))
    print(json.dumps(made))
    if write:
        path = report.save(made).relative_to(report.ROOT)
        report.between(report.ROOT / "docs/tools.md", table(made))
        console.print(f"Kept in {path}; docs/tools.md is up to date.")


if __name__ == "__main__":
    app()
