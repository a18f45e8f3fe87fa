"""`ponder eval`: measures on the user's own data, as a table and, where that is asked for, one line of JSON."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from app.config import BadSetting, Settings
from retrieval.embedding import SentenceEmbedder
from retrieval.evaluate import BadSet, run


def evaluate(folder: Path, split: str | None, rerank: bool, as_json: bool, settings: Settings) -> None:
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
