"""Measures reasoning strategies and retrieval on the user's own data (`ponder eval`).

Reasoning is measured as accuracy against tokens spent, for several ways of answering. Where a file is given, each way's
result is kept there, so a measurement that was stopped goes on from it. Retrieval's measures are a table and, if asked
for, one line of JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import groupby, product
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from app.cli.accuracy_curves import Curve, Point, can_draw, draw
from app.cli.task_file import TaskFile, read_tasks
from app.config import BadSetting, Settings
from app.config.efforts import BUDGETS
from engine import GREEDY, Engine, Span
from reasoning.evaluate import BadWay, MeasuredWay, Way, measure
from reasoning.strategies import Strategies
from reasoning.thinking import Markers
from retrieval.embedding import SentenceEmbedder
from retrieval.judged_search import BadSet, run

MAXIMA = (64, 128, 256, 512, 1024)  # tokens of thinking at most
WAITS = (0, 1, 2, 4)
SAMPLES = (1, 2, 4, 8)
TOKENS = "tokens that the model wrote for an answer"
NO_THINKING = Way("no thinking", "no thinking", thinking=False)


def evaluate_reasoning(
    file: Path,
    strategies: Sequence[str],
    efforts: Sequence[str],
    n: int | None,
    max_tokens: int,
    kept: Path | None,
    plot: Path | None,
    settings: Settings,
) -> None:
    """Measure, show a table, and write the requested files.

    Raises:
        BadSetting: a task, a way or a file is not right; the message names the accepted values.
        EngineError: the model cannot be loaded.
    """
    tasks = read_tasks(file, n)
    known = Strategies()
    known.load_entry_points()
    ways = [way for text in strategies for way in ways_of(text)] + [way_of_effort(text, settings) for text in efforts]
    if plot is not None and not can_draw():
        raise BadSetting("--plot needs matplotlib, which is not installed: `pip install matplotlib`, or leave it out.")
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise BadSetting(f"--plot is {plot}; accepted: a file that ends in .png, .svg or .pdf.")
    for path in (plot, kept):
        if path is not None and not path.absolute().parent.is_dir():
            raise BadSetting(f"There is no folder {path.parent} for {path.name}.")
    try:
        for way in ways:
            way.checked(known)
        rows = asyncio.run(_measured(tasks, ways, known, max_tokens, kept, settings))
    except BadWay as error:
        raise BadSetting(str(error)) from None
    Console(highlight=False).print(_table(rows, file, settings))
    if plot is not None:
        draw(plot, curves_of(rows), f"{file.name}, {rows[0].n} tasks, {Path(settings.model).name}", TOKENS)


def ways_of(text: str) -> list[Way]:
    """`NAME` or `NAME:{options}`. An option that is a list is swept: a way for each of its values, in one curve.

    Raises:
        BadSetting: the options are no JSON object, or a list is empty.
    """
    name, colon, given = text.partition(":")
    try:
        options = json.loads(given) if colon else {}
    except ValueError as error:
        raise BadSetting(f"--strategy {text}: the options are no JSON ({error}); accepted: {_EXAMPLE}.") from None
    if not isinstance(options, dict) or not name:
        raise BadSetting(f"--strategy {text}; accepted: NAME, or NAME and its options as a JSON object: {_EXAMPLE}.")
    swept = {key: values for key, values in options.items() if isinstance(values, list)}
    if not all(swept.values()):
        raise BadSetting(f"--strategy {text}: a list is empty; accepted: values to try, one after the other.")
    fixed = {key: value for key, value in options.items() if key not in swept}
    curve = _named(name, fixed)
    return [
        Way(_named(name, {**fixed, **tried}), curve, name, {**fixed, **tried})
        for tried in (dict(zip(swept, values, strict=True)) for values in product(*swept.values()))
    ]


_EXAMPLE = """'best_of_n:{"n": [1, 2, 4]}'"""


def way_of_effort(text: str, settings: Settings) -> Way:
    """An effort of requests, as the configuration has it, or the most tokens of thinking.

    Raises:
        BadSetting: it is neither.
    """
    if text == "none":
        return NO_THINKING
    budgets = {**BUDGETS, **settings.efforts}
    for name, budget in budgets.items():
        if text == name:
            return Way(f"effort {text}", "effort", "budget", budget.model_dump(exclude_defaults=True))
    if not text.isascii() or not text.isdigit() or int(text) < 2:
        named = ", ".join(("none", *budgets))
        raise BadSetting(f"--effort is {text!r}; accepted: {named}, or the most tokens of thinking, 2 or more.")
    return _at_most(int(text))


def _at_most(tokens: int) -> Way:
    return Way(f"thinking ≤ {tokens}", "thinking at most", "budget", {"max_tokens": tokens})


def grid(thinks: bool) -> list[Way]:
    """Returns the default ways to measure: without and with thinking, budgets, Waits, and several samples."""
    sampled = [f'{name}:{{"n": {list(SAMPLES)}}}' for name in ("best_of_n", "self_consistency")]
    ways = [way for text in sampled for way in ways_of(text)]
    if not thinks:
        return [Way("plain", "plain"), *ways]
    budgets = [_at_most(tokens) for tokens in MAXIMA]
    return [NO_THINKING, *budgets, *ways_of(f'budget:{{"waits": {list(WAITS)}}}'), *ways]


def _named(name: str, options: Mapping[str, Any]) -> str:  # Any: plain JSON
    listed = ", ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()
    )
    return f"{name} {listed}".strip()


async def _measured(
    tasks: TaskFile, ways: Sequence[Way], known: Strategies, max_tokens: int, kept: Path | None, settings: Settings
) -> list[MeasuredWay]:
    """The rows of all ways, those of the file taken as they are."""
    setting = {
        "model": settings.model,
        "tasks": hashlib.sha256(tasks.text.encode()).hexdigest()[:16],
        "n": len(tasks.tasks),
        "max_tokens": max_tokens,
    }
    if settings.fallback_model is not None:
        names = ("quantization", "fallback_model", "fallback_quantization", "fallback_confidence")
        setting |= {name: getattr(settings, name) for name in names}
    there = _read(kept, setting)
    async with await Engine.start(settings.engine_config(), fallback=settings.engine_fallback()) as engine:
        thinks = Markers.of(engine.tokenizer) is not None
        asked = list({way.name: way for way in ways or grid(thinks)}.values())
        rows: list[MeasuredWay] = []
        with _Progress(len(asked), len(tasks.tasks)) as progress:
            for way in asked:
                if way.name not in there:
                    made = await measure(
                        engine, tasks.tasks, way, strategies=known, span=Span(GREEDY, max_tokens),
                        done=progress.of(way.name),
                    )  # fmt: skip
                    there[way.name] = made
                    _write(kept, setting, there)
                rows.append(there[way.name])
                progress.finish(rows[-1])
    return rows


def _read(kept: Path | None, setting: Mapping[str, Any]) -> dict[str, MeasuredWay]:
    """Raises BadSetting where the file is of something else, which is not overwritten."""
    if kept is None or not kept.exists():
        return {}
    try:
        made = json.loads(kept.read_text(encoding="utf-8"))
        was = {key: made[key] for key in setting}
        rows = {row["name"]: MeasuredWay(**row) for row in made["rows"]}
    except (OSError, ValueError, TypeError, KeyError):
        raise BadSetting(f"{kept} is no result of `ponder eval reasoning`; accepted: another file.") from None
    if was != setting:
        differs = ", ".join(f"{key} {was[key]} (now {setting[key]})" for key in setting if was[key] != setting[key])
        raise BadSetting(f"{kept} was measured with {differs}; accepted: the same again, or another file.")
    return rows


def _write(kept: Path | None, setting: Mapping[str, Any], rows: Mapping[str, MeasuredWay]) -> None:
    if kept is None:
        return
    new = kept.with_name(f"{kept.name}.new")
    try:
        new.write_text(json.dumps({**setting, "rows": [asdict(row) for row in rows.values()]}, indent=1) + "\n")
        new.replace(kept)
    except OSError as error:
        raise BadSetting(f"{kept} cannot be written: {error}.") from None


class _Progress:
    """On standard error: a bar with the time that is left in a terminal, else a line for each way that is done."""

    def __init__(self, ways: int, tasks: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), console=self._console, transient=True, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=ways * tasks)
        self._ways, self._tasks, self._over = ways, tasks, 0

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def of(self, name: str) -> Any:  # Any: a function of how many tasks are done
        def report(done: int) -> None:
            self._bar.update(self._task, description=name, completed=self._over * self._tasks + done)

        return report

    def finish(self, row: MeasuredWay) -> None:
        self._over += 1
        self._bar.update(self._task, completed=self._over * self._tasks)
        if not self._console.is_terminal:
            self._console.print(f"{self._over}/{self._ways} {row.name}: {row.share:.1%}", markup=False)


def _table(rows: Sequence[MeasuredWay], file: Path, settings: Settings) -> Table:
    """Answers that were cut or failed have a column where there are any; fallback weights have theirs."""
    table = Table(title=f"{file.name}, {rows[0].n} tasks, {settings.model}", title_justify="left", box=SIMPLE)
    weights = _weights(settings)
    table.add_column("strategy")
    more = [name for name in ("cut", "failed") if any(getattr(row, name) for row in rows)]
    reads = ("deferred", "by fallback", "GB read") if len(weights) > 1 else ()
    for name in ("right", "95% interval", "tokens", "thinking", *more, *reads, "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for _, of in groupby(rows, key=lambda row: row.curve):
        for row in of:
            table.add_row(
                row.name, f"{row.share:.1%}", f"{row.low:.1%} – {row.high:.1%}", f"{row.tokens:.0f}",
                f"{row.thinking:.0f}", *(str(getattr(row, name)) for name in more), *_reads(row, weights),
                f"{row.seconds:.1f}",
            )  # fmt: skip
        table.add_section()
    return table


def _weights(settings: Settings) -> list[int]:
    """Returns the bytes of the model's weights, and of its fallback weights where it has some."""
    from engine.model.memory import needs_of

    fallback = settings.engine_fallback()
    return [] if fallback is None else [needs_of(each).weights for each in (settings.engine_config(), fallback.config)]


def _reads(row: MeasuredWay, weights: Sequence[int]) -> list[str]:
    """Returns the cells of fallback weights. A token that is decoded alone reads all weights once. A deferral reads
    both once more: for the token that is dropped, and for the prefill."""
    if not weights:
        return []
    first, fallback = weights
    deferred = row.deferred / row.n
    read = (row.tokens - row.fallback + deferred) * first + (row.fallback + deferred) * fallback
    return [f"{deferred:.0%}", f"{row.fallback:.0f}", f"{read / 1e9:.2f}"]


def curves_of(rows: Sequence[MeasuredWay]) -> list[Curve]:
    """A curve for each of theirs."""
    names = dict.fromkeys(row.curve for row in rows)
    return [
        Curve(name, [Point(row.tokens, row.share, row.low, row.high) for row in rows if row.curve == name])
        for name in names
    ]


def evaluate_retrieval(folder: Path, split: str | None, rerank: bool, as_json: bool, settings: Settings) -> None:
    """Measure the search on a judged set.

    Raises:
        BadSetting: it is no judged set.
    """
    console = Console(stderr=True)
    bar = Progress(TextColumn("Indexing"), BarColumn(), TaskProgressColumn(), console=console, transient=True)
    task = bar.add_task("", total=None)
    try:
        with bar if console.is_terminal else nullcontext():
            quality = run(
                folder, split=split, rerank=rerank, embedder=SentenceEmbedder(settings.embedder),
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )  # fmt: skip
    except BadSet as error:
        raise BadSetting(str(error)) from None
    measures = {"ndcg@10": quality.ndcg_10, "mrr@10": quality.mrr_10}
    measures |= {f"recall@{k}": share for k, share in sorted(quality.recall.items())}
    times = {"p50_ms": quality.p50_ms, "p99_ms": quality.p99_ms}
    table = Table(title=f"{folder.resolve().name}, {quality.queries} queries", title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in measures.items():
        table.add_row(name, f"{value:.4f}")
    for name, value in times.items():
        table.add_row(name, f"{value:.1f}")
    Console(highlight=False).print(table)
    if as_json:
        print(json.dumps({**measures, **times, "queries": quality.queries}))
