"""RAG-Token and RAG-Sequence beside concatenation: the answers' quality, and what they cost.

The same questions, sources and options for all: XQuAD's questions over its paragraphs, greedy, without the gate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.answering.served_model import ServedModel
from app.runs.rag import RetrievedContext
from bench.retrieval.quality import USER, JudgedQuestion
from engine import GREEDY, Engine, Span
from reasoning.rag import rag_sequence, rag_token
from reasoning.strategies import run_strategy
from reasoning.strategy import Context, ContextDocument, Strategy
from reasoning.thinking import Piece, think_and_answer
from retrieval import Library, Query, sources

Json = dict[str, Any]  # Any: plain JSON
Tell = Callable[[int, int], None]
MAX_LENGTH = 60  # tokens of an answer
SOURCES = 4
RESAMPLES = 2_000
WAYS: dict[str, tuple[Strategy[Any], Json] | None] = {
    "concatenation": None,
    "rag_token": (rag_token, {}),
    "rag_sequence, thorough": (rag_sequence, {}),
    "rag_sequence, fast": (rag_sequence, {"thorough": False}),
}


@dataclass(frozen=True, slots=True)
class _Measured:
    contained: bool  # the gold answer stands in the text
    seconds: float
    read: int  # prompt tokens computed, scores of candidates included
    written: int


async def compare(engine: Engine, library: Library, whole: int, asked: Sequence[JudgedQuestion], tell: Tell) -> Json:
    """Asks every question in every way, in turn. Intervals are 95%, by bootstrap over questions; differences are
    paired with concatenation."""
    served = ServedModel(engine, engine.model_name)
    found: dict[str, list[_Measured]] = {name: [] for name in WAYS}
    for number, one in enumerate(asked):
        for name, way in WAYS.items():
            found[name].append(await _ask(served, library, one, whole, way, tenant=f"{name} {number}"))
        tell(number + 1, len(asked))
    base = [each.contained for each in found["concatenation"]]
    return {
        name: {
            "answer_contained": _interval([each.contained for each in measured]),
            "more_than_concatenation": _interval(
                [int(each.contained) - int(other) for each, other in zip(measured, base, strict=True)]
            ),
            "tokens_read": float(np.mean([each.read for each in measured])),
            "tokens_written": float(np.mean([each.written for each in measured])),
            "seconds": float(np.median([each.seconds for each in measured])),
        }
        for name, measured in found.items()
    }


async def _ask(
    served: ServedModel, library: Library, one: JudgedQuestion, whole: int, way: tuple[Strategy[Any], Json] | None,
    *, tenant: str,
) -> _Measured:  # fmt: skip
    """`tenant` keeps the K/V of other ways apart."""
    engine = served.engine
    hits = library.search(Query(USER, one.text, SOURCES, frozenset({whole}))).hits
    chosen = sources(
        library.store, USER, hits, engine.max_model_len // 3, lambda text: len(engine.tokenizer.encode(text)),
        parents=False,
    )  # fmt: skip
    retrieved = RetrievedContext(tuple(chosen), "answer", 1.0)
    turns = [{"role": "user", "content": one.text}]
    prompt = await served.chat_tokens(retrieved.messages(turns), {})
    documents = tuple(
        [
            ContextDocument(tuple(await served.chat_tokens(alone.messages(turns), {})), source.score, source.label)
            for source, alone in retrieved.alone()
        ]
    )
    span = Span(GREEDY, max_tokens=MAX_LENGTH)
    before, began = await engine.stats(), time.perf_counter()
    text = ""
    async with await engine.open(prompt, tenant=tenant) as seq:
        if way is None:
            running: Any = think_and_answer(seq, span, served.markers, opened=False)  # Any: of pieces, or events too
        else:
            chosen_way, options = way
            context = Context(engine.tokenizer, span, served.markers, documents=documents)
            running = run_strategy(chosen_way, seq, context, chosen_way.options(**options))
        async with aclosing(running) as items:
            async for item in items:
                if isinstance(item, Piece) and item.part == "answer":
                    text += item.text
    seconds, after = time.perf_counter() - began, await engine.stats()
    return _Measured(
        one.answer.lower() in text.lower(), seconds, after.prompt_tokens - before.prompt_tokens,
        after.generated_tokens - before.generated_tokens,
    )  # fmt: skip


def _interval(values: Sequence[int] | Sequence[bool]) -> Json:
    numbers = np.array(values, dtype=float)
    picked = np.random.default_rng(0).integers(0, len(numbers), (RESAMPLES, len(numbers)))
    low, high = np.percentile(numbers[picked].mean(1), [2.5, 97.5])
    return {"mean": float(numbers.mean()), "low": float(low), "high": float(high)}
