"""Answers from a user's documents: retrieval for a question, the retrieved context in the prompt, and the answer,
checked or quoted.

Sources come first in the prompt and in a fixed order, so that the K/V of an earlier question on them is used again. If
the passages do not seem to answer, the model is not asked. A sentence that the model writes is checked against its
source before it is shown; a quoting answer is constrained to quotations; an extractive answer asks no model and shows
the sentences that answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from app.runs.cross_chunk import needs_several
from app.runs.events import AnswerChecking, CitationRef, CitationSources, SourceShown
from engine.structured_output.spec import Constraint, OneOf, Regex, Repeat, Substring, sequence
from engine.structured_output.spec import Literal as LiteralText
from engine.structured_output.spec import Optional as OptionalText
from retrieval import Query, layout, sources
from retrieval.citations import CheckedText, Citation, CitationChecker, as_text
from retrieval.evidence import Verdict, investigate, verdict_of, weigh
from retrieval.prompt_context import OVERHEAD, PromptSource, labelled, lines, own_labels, whole
from retrieval.query_rewriting import ResolvedQuestion, resolve
from retrieval.records import Among
from retrieval.sentence_ranking import ANSWERS, RankedSentence, windows, with_context

if TYPE_CHECKING:
    from app.answering.served_model import ServedModel
    from engine import Tokenizer
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
PARAGRAPH = "\n\n"  # between the sentences of an extractive answer
MIN_ANSWER_LIMIT = 256  # tokens
MIN_QUOTATION, MAX_QUOTATION = 12, 600  # characters
LEAD = r"[^\[\]\n]{0,60}: "  # free text before a quotation
HELD_TOKENS, HELD_S = 40, 1.0  # of a sentence that is held back: from either on a reader is told
TELL_EVERY_S = 1.0
NEAREST = 2  # sentences that a refusal shows


WayKind = Literal["extractive", "quoting", "generative"]


@dataclass(frozen=True, slots=True)
class AnswerWay:
    """The way to answer from documents. `window_tokens`: a prompt has only the best statements of the sources, in so
    many tokens; None: the passages as they are."""

    kind: WayKind = "generative"
    window_tokens: int | None = None


GENERATIVE = AnswerWay()


@dataclass(frozen=True, slots=True)
class RetrievedContext:
    """Sources found for a question, and whether they seem to answer. `quotes`: the model may only quote them."""

    sources: tuple[PromptSource, ...]
    verdict: Verdict
    score: float
    questions: tuple[str, ...] = field(default=())
    quoted: tuple[RankedSentence, ...] = ()  # the answer, where it is extractive
    unanswered: tuple[str, ...] = ()  # parts of the question that no sentence answers, beside others that one does
    ranked: tuple[RankedSentence, ...] = ()  # every sentence of the sources, for each part of the question
    quotes: bool = False
    chunks: tuple[str, ...] = ()  # lines of the prompt whose K/V may be used again, after other sources than before

    @property
    def quotable(self) -> list[tuple[str, str]]:
        """Returns the labels and texts that a quoting answer is constrained to; none for any other."""
        return [(source.label, source.text) for source in self.sources] if self.quotes else []

    def messages(self, turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """A chat with its sources before the first question, in one message with the instructions it begins with."""
        given = [turn["content"] for turn in turns[:1] if turn["role"] == "system"]
        text = "\n\n".join([*given, INSTRUCTION, layout(self.sources)])
        return [{"role": "system", "content": text}, *turns[len(given) :]]

    def alone(self) -> list[tuple[PromptSource, RetrievedContext]]:
        """Returns each source, and the context in which it is the only one."""
        return [(source, replace(self, sources=(source,), chunks=())) for source in self.sources]

    def answer_limit(self, tokenizer: Tokenizer) -> int:
        """Returns the most tokens of an answer: it quotes its sources, so it need not be longer than they are."""
        return max(MIN_ANSWER_LIMIT, sum(len(tokenizer.encode(source.text)) for source in self.sources))

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
            nearest=[_cited(one) for one in self._nearest()] if self.verdict == "none" else [],
        )  # fmt: skip

    def _nearest(self) -> list[RankedSentence]:
        """Returns the sentences that come nearest to an answer, one of a source."""
        by_source = dict[str, RankedSentence]()
        for one in sorted(self.ranked, key=lambda one: -one.score):
            by_source.setdefault(one.source.label, one)
        return list(by_source.values())[:NEAREST]

    def answers(self, cited: Sequence[Citation]) -> float | None:
        """Returns the probability that what is cited answers the question."""
        if not cited or not self.sources:
            return None
        found = (
            one.probability
            for one in self.ranked
            for each in cited
            if one.source.document == each.document
            and one.source.start + one.start < each.end and each.start < one.source.start + one.end
        )  # fmt: skip
        return round(max(found, default=0.0), 3)


async def retrieve_context(
    library: Library, served: ServedModel, user: str, question: str, earlier: Sequence[tuple[str, str]],
    collections: Among, *, files: frozenset[int] = frozenset(), about_files: bool = False, way: AnswerWay = GENERATIVE,
) -> RetrievedContext:  # fmt: skip
    """Search the user's documents for passages that answer a question, or for the sentences that do. `earlier`: the
    chat's questions before it, with their answers. `files`: attached collections, searched beside the others; a model
    that writes gets the whole of them where they fit. `about_files`: the question comes with some, so that it is about
    them though it has none of their words ("sum this up").

    Raises:
        BadQuery: the question is too long to be searched for.
        NotFound: there is no such collection.
    """
    asked = resolve(question, earlier)
    return await asyncio.to_thread(_retrieved, library, served, user, asked, collections, files, about_files, way)


def _retrieved(
    library: Library, served: ServedModel, user: str, question: ResolvedQuestion, collections: Among,
    files: frozenset[int], about_files: bool, way: AnswerWay,
) -> RetrievedContext:  # fmt: skip
    extractive = way.kind == "extractive"
    rarity = library.rarity(user, collections, files)
    weights = question.rarity(rarity)
    budget = min(MAX_TOKENS, int(SHARE * served.engine.max_model_len))

    def count(text: str) -> int:
        return len(served.engine.tokenizer.encode(text))

    complete: list[PromptSource] = []
    if files and way == GENERATIVE:
        documents = [one for number in sorted(files) if (one := library.store.newest(number)) is not None]
        complete = whole(library.store, user, documents, budget, count)
    left = budget - sum(count(source.text) + OVERHEAD for source in complete)

    def prompt_sources(hits: Sequence[Hit]) -> list[PromptSource]:
        others = [hit for hit in hits if all(hit.passage.document != source.document for source in complete)]
        picked = sources(
            library.store, user, others, left, count, parents=left >= PARENTS_FROM and not extractive,
        )  # fmt: skip
        return labelled([*complete, *picked]) if complete else picked

    def covered(asked: str, hits: Sequence[Hit]) -> float:
        if extractive:
            ranked = library.ranker.rank(asked, prompt_sources(hits), weights, 1)
            return ranked[0].probability if ranked else 0.0
        return weigh(asked, hits, library.embedder, weights).score

    found = investigate(
        lambda text: library.search(Query(user, text, MAX_SOURCES, collections, files=files)), covered,
        question.text, limit=MAX_SOURCES,
    )  # fmt: skip
    shown = prompt_sources(found.hits)
    reuses = served.engine.config.chunk_reuse is not None and way == GENERATIVE
    shown = own_labels(shown) if reuses else shown
    parts = question.parts()
    ranked = [library.ranker.rank(part.text, shown, part.rarity(rarity), None) for part in parts]
    every = tuple(one for some in ranked for one in some)
    if extractive:
        quoted = list[RankedSentence]()
        unanswered = list[str]()
        for part, some in zip(parts, ranked, strict=True):
            if not some or some[0].probability < ANSWERS:
                unanswered.append(part.asked)
            elif not any(other.contains(some[0]) for other in quoted):
                quoted.append(with_context(part.text, some[0]))
        return RetrievedContext(
            tuple(shown), "answer" if quoted else "none", found.coverage, found.questions, tuple(quoted),
            tuple(unanswered) if quoted else (), every,
        )  # fmt: skip
    verdict = verdict_of(found.coverage)
    if verdict == "none" and any(verdict_of(covered(part.text, found.hits)) != "none" for part in parts):
        verdict = "partial"
    if verdict == "none" and complete and about_files:  # the model sees whether the whole text answers
        verdict = "partial"
    if way.window_tokens is not None:
        best = sorted(every, key=lambda one: -one.score)
        shown = windows(question.text, best, min(budget, way.window_tokens), count)
    chunks = lines(shown) if reuses and needs_several(question.text, [each.text for each in shown]) is None else ()
    return RetrievedContext(
        tuple(shown), verdict if shown else "none", found.coverage, found.questions, ranked=every,
        quotes=way.kind == "quoting", chunks=tuple(chunks),
    )  # fmt: skip


def quotations(quotable: Sequence[tuple[str, str]]) -> Constraint:
    """Returns the constraint of a quoting answer: lines that each quote the text of a label, with at most 60 characters
    of free text before; or that the sources do not say.

    Raises:
        ValueError: there is no text to quote.
    """
    texts = [(label, " ".join(text.split())) for label, text in quotable]
    lines = [
        sequence(f"[{label}] ", Substring(text, min(MIN_QUOTATION, len(text)), MAX_QUOTATION))
        for label, text in texts
        if text
    ]
    if not lines:
        raise ValueError("there is no text to quote")
    line = sequence(OptionalText(Regex(LEAD)), OneOf(tuple(lines)))
    return OneOf((LiteralText(REFUSAL), Repeat(line, "\n")))


def quote(found: RetrievedContext) -> Iterable[tuple[str, CitationRef]]:
    """Returns the sentences of an extractive answer, word for word, each with its citation; then the parts of the
    question that none answers."""
    lines = [_quotation(one) for one in found.quoted]
    lines += [(f"The sources do not say: {part}", []) for part in found.unanswered]
    start = 0
    for number, (text, cited) in enumerate(lines, 1):
        end = start + len(text)
        support: Literal["supported", "plain"] = "supported" if cited else "plain"
        yield (
            text + PARAGRAPH if number < len(lines) else text,
            CitationRef(
                sentence=number, start=start, end=end, support=support, citations=cited,
                answers=cited[0].score if cited else None,
            ),
        )  # fmt: skip
        start = end + len(PARAGRAPH)


def _quotation(one: RankedSentence) -> tuple[str, list[SourceShown]]:
    return f"{one.shown} [{one.source.label}]", [_cited(one)]


def _cited(one: RankedSentence) -> SourceShown:
    source, at = one.source, one.source.start + one.start
    return SourceShown(
        label=source.label, document=source.document, title=source.title, page=source.page(at), start=at,
        end=source.start + one.end, text=one.text, score=round(one.probability, 3),
    )  # fmt: skip


class CheckedAnswer:
    """An answer as it grows, let through sentence by sentence."""

    def __init__(self, found: RetrievedContext) -> None:
        self._found = found
        self._checker = CitationChecker(found.sources)
        self._held_tokens = 0  # since the newest sentence was let through
        self._held_since: float | None = None
        self._told_at = float("-inf")
        self._written = 0  # characters let through
        self._number = 0

    def feed(self, text: str) -> Iterable[tuple[str, CitationRef]]:
        """More of the answer; returns the checked parts, each with its citations."""
        yield from map(self._shown, self._checker.feed(text))

    def hold(self, tokens: int, now: float) -> AnswerChecking | None:
        """Counts `tokens` that were fed, at `now` in seconds of any clock. Returns the event of a sentence that is held
        back for long, at most once a second.
        """
        if not self._checker.held:
            return None
        self._held_tokens += tokens
        self._held_since = now if self._held_since is None else self._held_since
        long = self._held_tokens >= HELD_TOKENS or now - self._held_since >= HELD_S
        if not long or now - self._told_at < TELL_EVERY_S:
            return None
        self._told_at = now
        return AnswerChecking(tokens=self._held_tokens)

    def skip(self, characters: int) -> None:
        """Count characters that were shown without a check."""
        self._written += characters

    def finish(self) -> Iterable[tuple[str, CitationRef]]:
        yield from map(self._shown, self._checker.finish())

    def _shown(self, checked: CheckedText) -> tuple[str, CitationRef]:
        text = as_text(checked)
        start, self._written = self._written, self._written + len(text)
        self._held_tokens, self._held_since = 0, None
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
            answers=self._found.answers(checked.citations),
        )  # fmt: skip
