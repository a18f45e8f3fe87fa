"""Answers from documents, end to end: search, gate, the model, and every sentence checked; and the gain of a fixed
order.

Questions are XQuAD's, with its paragraphs as the documents; each is asked twice, with its paragraph there and without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from app.answering.served_model import ServedModel
from app.runs.events import CitationRef
from app.runs.prompt_builder import quoting
from app.runs.rag import GENERATIVE, REFUSAL, AnswerWay, CheckedAnswer, RetrievedContext, retrieve_context
from bench.retrieval.quality import USER, JudgedQuestion
from engine import GREEDY, Engine, Span
from reasoning.thinking import think_and_answer
from retrieval import Library, Query, Text, sources

Json = dict[str, Any]  # Any: plain JSON
Tell = Callable[[int, int], None]
MAX_LENGTH = 120  # tokens of an answer


@dataclass(frozen=True, slots=True)
class Answered:
    """`cited` are the spans that the answer's sentences rest on: (document's source, start, end)."""

    text: str
    cited: tuple[tuple[str, int, int], ...]
    verdict: str
    unsupported: int
    sentences: int

    @property
    def refused(self) -> bool:
        return "don't know" in self.text


async def answers(
    engine: Engine,
    library: Library,
    texts: Sequence[Text],
    asked: Sequence[JudgedQuestion],
    tell: Tell,
    way: AnswerWay = GENERATIVE,
) -> Json:
    """Every question with its paragraph in one collection and without it in a copy, answered in `way`."""
    served = ServedModel(engine, engine.model_name)
    whole = library.collection(USER, "whole").id
    if not library.store.documents(USER, whole):
        library.add(USER, whole, texts)
    by_source = {text.source: text.text for text in texts}
    present, removed = list[Answered](), list[Answered]()
    began = time.perf_counter()
    for number, one in enumerate(asked):
        present.append(await _answer(served, library, one, frozenset({whole}), way))
        removed.append(await _without(served, library, one, whole, way))
        tell(number + 1, len(asked))
    gold = [_gold(one, by_source) for one in asked]
    spoke = [(a, one, span) for a, one, span in zip(present, asked, gold, strict=True) if not a.refused]
    precision = [_precision(a, span) for a, _, span in spoke if a.cited]
    return {
        "questions": len(asked),
        "seconds_per_question": (time.perf_counter() - began) / (2 * len(asked)),
        "answer_contained": _mean(
            [one.answer.lower() in a.text.lower() for a, one in zip(present, asked, strict=True)]
        ),
        "refused_though_present": _mean([a.refused for a in present]),
        "refused_by_the_gate": _mean([a.verdict == "none" for a in present]),
        "citation_precision": _mean(precision),
        "citation_recall": _mean([_recall(a, span) for a, span in zip(present, gold, strict=True)]),
        "sentences_unsupported": _mean([a.unsupported / max(1, a.sentences) for a in present if not a.refused]),
        "refused_when_removed": _mean([a.refused for a in removed]),
        "gate_refused_when_removed": _mean([a.verdict == "none" for a in removed]),
    }


async def _without(served: ServedModel, library: Library, one: JudgedQuestion, whole: int, way: AnswerWay) -> Answered:
    """The same with the paragraph out of sight: its document is in no search of this question."""
    document = next(d for d in library.store.documents(USER, whole) if d.source == one.source)
    text = library.store.text(USER, document.id)
    library.delete(USER, document.id)
    try:
        return await _answer(served, library, one, frozenset({whole}), way)
    finally:
        library.add(USER, whole, [Text(one.source, text, document.title)])


async def _answer(
    served: ServedModel, library: Library, one: JudgedQuestion, collections: frozenset[int], way: AnswerWay
) -> Answered:
    found = await retrieve_context(library, served, USER, one.text, [], collections, way=way)
    if found.verdict == "none":
        return Answered(REFUSAL, (), "none", 0, 1)
    checked = CheckedAnswer(found)
    shown = list[tuple[str, CitationRef]]()
    prompt = await served.chat_tokens(found.messages([{"role": "user", "content": one.text}]), {})
    async with await served.engine.open(prompt, tenant=USER) as sequence:
        span = Span(sampling=GREEDY, max_tokens=MAX_LENGTH)
        if found.quotable:
            span = quoting(span, served, found.quotable)
        async with aclosing(think_and_answer(sequence, span, served.markers, opened=False)) as pieces:
            async for piece in pieces:
                if piece.part == "answer":
                    shown += checked.feed(piece.text)
    shown += checked.finish()
    titles = {d.id: d.source for d in library.store.documents(USER)}
    cited = [(titles[c.document], c.start, c.end) for _, ref in shown for c in ref.citations]
    unsupported = sum(ref.support == "unsupported" for _, ref in shown)
    return Answered("".join(text for text, _ in shown), tuple(cited), found.verdict, unsupported, len(shown))


def _gold(one: JudgedQuestion, by_source: dict[str, str]) -> tuple[str, int, int]:
    start = by_source[one.source].find(one.answer)
    return one.source, start, start + len(one.answer)


def _precision(answered: Answered, gold: tuple[str, int, int]) -> float:
    """The share of the cited spans that overlap the answer's."""
    return float(np.mean([_overlap(span, gold) > 0 for span in answered.cited]))


def _recall(answered: Answered, gold: tuple[str, int, int]) -> float:
    """The share of the answer's characters that a cited span contains."""
    return max((_overlap(span, gold) for span in answered.cited), default=0) / max(1, gold[2] - gold[1])


def _overlap(a: tuple[str, int, int], b: tuple[str, int, int]) -> int:
    return max(0, min(a[2], b[2]) - max(a[1], b[1])) if a[0] == b[0] else 0


def _mean(values: Sequence[float] | Sequence[bool]) -> float:
    return float(np.mean(values)) if values else float("nan")


async def fixed_order(engine: Engine, library: Library, asked: Sequence[JudgedQuestion], whole: int) -> Json:
    """The share of prompt tokens with cached K/V: sources in document order against the order of their scores.

    Questions are asked paragraph by paragraph, as a person does who reads; only the prompts are computed.
    """
    served = ServedModel(engine, engine.model_name)
    made: Json = {}
    for name in ("by score", "by document"):
        total = cached = 0
        for one in asked:
            found = library.search(Query(USER, one.text, 6, frozenset({whole})))
            chosen = sources(
                library.store, USER, found.hits, served.engine.max_model_len // 3,
                lambda text: len(engine.tokenizer.encode(text)), parents=False,
            )  # fmt: skip
            if name == "by score":
                ordered = sorted(chosen, key=lambda source: -source.score)
                chosen = [replace(source, label=f"S{n}") for n, source in enumerate(ordered, 1)]
            turns = [{"role": "user", "content": one.text}]
            prompt = await served.chat_tokens(RetrievedContext(tuple(chosen), "answer", 1.0).messages(turns), {})
            async with await engine.open(prompt, tenant=name) as sequence:
                async for out in sequence.generate(Span(sampling=GREEDY, max_tokens=1)):
                    cached += out.cached_tokens or 0
            total += len(prompt)
        made[name] = cached / total
    return made
