"""Answers from a user's documents: retrieval for a question, the retrieved context in the prompt, and the checked
answer.

Sources come first in the prompt and in a fixed order, so that the K/V of an earlier question on them is used again. If
the passages do not seem to answer, the model is not asked. Every sentence is checked against its source before it is
shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.runs.events import CitationRef, CitationSources, SourceShown
from retrieval import Query, layout, sources
from retrieval.citations import CheckedText, CitationChecker, as_text
from retrieval.evidence import Evidence, Verdict, clauses, investigate, weigh
from retrieval.prompt_context import PromptSource
from retrieval.records import Among
from retrieval.sentence_ranking import ANSWERS, RankedSentence, with_context

if TYPE_CHECKING:
    from app.answering.served_model import ServedModel
    from retrieval import Hit, Library

INSTRUCTION = (
    "Answer from the sources. Quote the sentence that answers and name its source. "
    "If the sources do not say, say that you do not know."
)
REFUSAL = "I don't know. The sources do not say."
MAX_SOURCES = 6
SHARE = 1 / 3  # of the model's context that sources may take
PARENTS_FROM = 1500  # tokens of sources from which on their surroundings are given too
MAX_TOKENS = 4000


@dataclass(frozen=True, slots=True)
class RetrievedContext:
    """Sources found for a question, and whether they seem to answer."""

    sources: tuple[PromptSource, ...]
    verdict: Verdict
    score: float
    questions: tuple[str, ...] = field(default=())
    quoted: tuple[RankedSentence, ...] = ()  # the answer, where it is extractive

    def messages(self, turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """A chat with its sources before the first question, in one message with the instructions it begins with."""
        given = [turn["content"] for turn in turns[:1] if turn["role"] == "system"]
        text = "\n\n".join([*given, INSTRUCTION, layout(self.sources)])
        return [{"role": "system", "content": text}, *turns[len(given) :]]

    def event(self) -> CitationSources:
        return CitationSources(
            verdict=self.verdict,
            score=round(self.score, 3),
            questions=list(self.questions),
            sources=[
                SourceShown(
                    label=source.label, document=source.document, title=source.title, page=source.page(source.start),
                    start=source.start, end=source.end, text=source.text, score=round(source.score, 3),
                )
                for source in self.sources
            ],
        )  # fmt: skip


async def retrieve_context(
    library: Library, served: ServedModel, user: str, question: str, collections: Among, *, extractive: bool = False
) -> RetrievedContext:
    """Search the user's documents for passages that answer a question; if `extractive`, for the sentences that do.

    Raises:
        BadQuery: the question is too long to be searched for.
        NotFound: there is no such collection.
    """
    return await asyncio.to_thread(_retrieved, library, served, user, question, collections, extractive)


def _retrieved(
    library: Library, served: ServedModel, user: str, question: str, collections: Among, extractive: bool
) -> RetrievedContext:
    last = Evidence(0.0, "none")
    rarity = library.rarity(user, collections)

    def covered(asked: str, hits: Sequence[Hit]) -> float:
        nonlocal last
        last = weigh(asked, hits, library.embedder, rarity)
        return last.score

    found = investigate(
        lambda text: library.search(Query(user, text, MAX_SOURCES, collections)), covered, question, limit=MAX_SOURCES
    )
    budget = min(MAX_TOKENS, int(SHARE * served.engine.max_model_len))
    shown = sources(
        library.store, user, found.hits, budget, lambda text: len(served.engine.tokenizer.encode(text)),
        parents=budget >= PARENTS_FROM and not extractive,
    )  # fmt: skip
    verdict: Verdict = last.verdict if shown else "none"
    if verdict == "none" or not extractive:
        return RetrievedContext(tuple(shown), verdict, last.score, found.questions)
    quoted = list[RankedSentence]()
    for part in clauses(question) or [question]:
        for best in library.ranker.rank(part, shown, rarity, 1):
            if best.probability >= ANSWERS and not any(other.contains(best) for other in quoted):
                quoted.append(with_context(part, best))
    return RetrievedContext(tuple(shown), verdict if quoted else "none", last.score, found.questions, tuple(quoted))


def quote(found: RetrievedContext) -> Iterable[tuple[str, CitationRef]]:
    """Returns the sentences of an extractive answer, word for word, each with its citation."""
    written = 0
    for number, one in enumerate(found.quoted, 1):
        source, words = one.source, " ".join(one.text.split())
        text = f"{words} [{source.label}]"
        at = source.start + one.start
        cited = SourceShown(
            label=source.label, document=source.document, title=source.title, page=source.page(at), start=at,
            end=source.start + one.end, text=one.text, score=round(one.probability, 3),
        )  # fmt: skip
        yield (
            f"{text}\n" if number < len(found.quoted) else text,
            CitationRef(
                sentence=number, start=written, end=written + len(text), support="supported", citations=[cited]
            ),
        )
        written += len(text) + 1


class CheckedAnswer:
    """An answer as it grows, let through sentence by sentence."""

    def __init__(self, found: RetrievedContext) -> None:
        self._checker = CitationChecker(found.sources)
        self._written = 0  # characters let through
        self._number = 0

    def feed(self, text: str) -> Iterable[tuple[str, CitationRef]]:
        """More of the answer; returns the checked parts, each with its citations."""
        yield from map(self._shown, self._checker.feed(text))

    def skip(self, characters: int) -> None:
        """Count characters that were shown without a check."""
        self._written += characters

    def finish(self) -> Iterable[tuple[str, CitationRef]]:
        yield from map(self._shown, self._checker.finish())

    def _shown(self, checked: CheckedText) -> tuple[str, CitationRef]:
        text = as_text(checked)
        start, self._written = self._written, self._written + len(text)
        self._number += 1
        return text, CitationRef(
            sentence=self._number, start=start, end=start + len(text.rstrip()), support=checked.support,
            citations=[
                SourceShown(
                    label=one.label, document=one.document, title=one.title, page=one.page, start=one.start,
                    end=one.end, text=one.snippet, score=one.score,
                )
                for one in checked.citations
            ],
        )  # fmt: skip
