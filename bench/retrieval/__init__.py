"""Retrieval measured: quality stage by stage, evidence, answers end to end, ingesting, and search as it grows.

`RetrievalScale` says how much of each. Sets are those of `PONDER_SHARED`, described there.
"""

from __future__ import annotations

import asyncio
import datetime
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from app.runs.document_answers import TRIED, name
from app.runs.rag import GENERATIVE
from bench import hardware
from bench.retrieval import answers as retrieval_answers
from bench.retrieval import everyday, growth, mixtures, quality, speed
from engine import Engine, EngineConfig
from retrieval import Library
from retrieval.embedding import SentenceEmbedder
from retrieval.evidence import ANSWER, PARTIAL
from retrieval.index.views import vectors_of

Json = dict[str, Any]  # Any: plain JSON
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RetrievalScale:
    """The amount that is measured of each."""

    sizes: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    answers: int = 150
    ordered: int = 120
    pages: int = 500
    sets: tuple[str, ...] = ("cranfield",)


QUICK = RetrievalScale(sizes=(2_000,), answers=6, ordered=6, pages=50, sets=())


PARTS = ("judged", "chunking", "evidence", "sentences", "ingest", "search", "answers", "mixtures")


def measure(
    shared: Path,
    model: Path,
    scale: RetrievalScale,
    tell: Tell,
    work: Path | None = None,
    parts: Collection[str] = PARTS,
) -> Json:
    """The parts that are asked for, as JSON. Indexes are made under `work` and found there again the next time."""
    data = shared / "data" / "retrieval"
    embedder = SentenceEmbedder()
    made: Json = {
        "date": datetime.date.today().isoformat(),
        "command": "ponder bench retrieval",
        "slug": f"retrieval-{hardware.slug()}",
        "hardware": hardware.describe(),
        "embedder": embedder.name,
    }
    with tempfile.TemporaryDirectory() as temporary:
        work = work or Path(temporary)
        texts, asked = quality.xquad(data / "xquad_en_dev.json")
        corpora = [path.read_text("utf-8") for path in sorted((data / "chunking").glob("*.md"))]
        if "ingest" in parts:  # first, while nothing else has warmed or filled the machine
            tell("parsing and ingesting")
            made["pdf"] = speed.pdf_pages(Path(temporary), scale.pages)
            made["ingest"] = speed.ingest(corpora, embedder, Path(temporary) / "ingest")
        with Library.open(work / "xquad", embedder) as library:
            mine = library.collection(quality.USER)
            if not mine.documents:
                library.add(quality.USER, mine.id, texts)
            rows = speed.rows(library)
            real = vectors_of(library.store.chunks, embedder, rows)
            if "ingest" in parts:
                made["embedding"] = speed.embedding([row.text for row in rows[:200]], embedder)
                made["whole"] = speed.whole(library, [one.text for one in asked[:200]])
        if "search" in parts:
            made["search"] = growth.searching(scale.sizes, real, corpora, embedder, work / "grown", tell)
        if "judged" in parts:
            made["judged"] = {
                f"{name}{', long questions' * long}": quality.stages(
                    data / name, embedder, work, tell, by_document=long
                )
                for name in scale.sets
                for long in (False, True)
            }
        if "chunking" in parts:
            tell("chunking")
            made["chunking"] = quality.chunk_recall(data / "chunking", embedder, work)
        if "evidence" in parts:
            tell("evidence")
            made["thresholds"] = quality.thresholds(embedder, work)
            some = asked if scale.sets else Random("evidence").sample(asked, 20)
            made["evidence"] = quality.evidence(data / "xquad_en_dev.json", embedder, work, (ANSWER, PARTIAL), some)
        if "sentences" in parts:
            tell("sentences")
            made["sentences"] = quality.sentences(data / "xquad_en_dev.json", embedder, work)
            made["everyday"] = everyday.measure(embedder, work)
            made["pages"] = quality.evaluation_pages(embedder, work)
        if "answers" in parts:
            tell("answers")
            made |= asyncio.run(_with_model(model, texts, asked, embedder, work, scale, tell))
        if "mixtures" in parts:
            tell("mixtures")
            made["mixtures"] = asyncio.run(_mixtures(model, texts, asked, embedder, work, scale, tell))
    return made


async def _mixtures(
    model: Path, texts: Any, asked: Any, embedder: SentenceEmbedder, work: Path, scale: RetrievalScale, tell: Tell
) -> Json:
    chosen = Random("answers").sample(asked, scale.answers)
    async with await Engine.start(EngineConfig(model=str(model))) as engine:
        with Library.open(work / "answers", embedder) as library:
            whole = library.collection(quality.USER, "whole").id
            if not library.store.documents(quality.USER, whole):
                library.add(quality.USER, whole, texts)
            return await mixtures.compare(
                engine, library, whole, chosen, lambda done, total: tell(f"mixtures: {done} of {total}")
            )


async def _with_model(
    model: Path, texts: Any, asked: Any, embedder: SentenceEmbedder, work: Path, scale: RetrievalScale, tell: Tell
) -> Json:
    chosen = Random("answers").sample(asked, scale.answers)
    async with await Engine.start(EngineConfig(model=str(model))) as engine:
        with Library.open(work / "answers", embedder) as library:
            ways = {
                name(way): await retrieval_answers.answers(
                    engine, library, texts, chosen, lambda done, total: tell(f"answers: {done} of {total}"), way
                )
                for way in TRIED
            }
            made: Json = {"model": engine.model_name, "answers": ways[name(GENERATIVE)], "ways": ways}
            whole = library.collection(quality.USER, "whole").id
            made["fixed_order"] = await retrieval_answers.fixed_order(engine, library, asked[: scale.ordered], whole)
    return made
