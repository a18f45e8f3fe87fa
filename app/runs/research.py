"""The search of a strategy in a user's documents: passages under labels of one answer, and sentences they support.

Each search's passages are cut to their best statements. The report's citations are checked against all of them, as
those of any answer from documents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from app.errors import invalid
from app.runs.rag import AnswerWay, RetrievedContext, retrieve_context
from reasoning.deep_research import ResearchNote, composed, partial_notice
from reasoning.strategy import FoundPassage
from retrieval.citations import CitationChecker, as_text, is_refusal
from retrieval.prompt_context import PromptSource
from retrieval.query_rewriting import resolve
from retrieval.records import Among
from retrieval.sentence_ranking import ANSWERS, RankedSentence, with_context

if TYPE_CHECKING:
    from app.answering.served_model import ServedModel
    from retrieval import Library

PASSAGE_TOKENS = 1200  # of one search's passages together, or a quarter of the context where that is less
QUOTES = 3  # documents with a sentence that is quoted, of one search


class DocumentResearch:
    """A `SearchSource` over documents. One answer's; used from the event loop."""

    def __init__(
        self, library: Library, served: ServedModel, user: str, question: str, among: Among, *, writes: bool,
        earlier: Sequence[tuple[str, str]] = (), lists_sources: bool = False,
    ) -> None:  # fmt: skip
        """`writes`: the model is able to write from passages. `lists_sources`: a reader has no other list of them."""
        resolved = resolve(question, earlier)
        self.question = question
        self.parts: Sequence[str] = [part.text for part in resolved.parts()]
        self.writes = writes
        self.notes = list[ResearchNote]()
        self._library, self._served, self._user, self._among = library, served, user, among
        self._lists_sources = lists_sources
        self._sources = list[PromptSource]()
        self._ranked = list[RankedSentence]()
        self._queries = list[str]()
        self._score = 0.0

    async def find(self, query: str, limit: int) -> list[FoundPassage]:
        """Searches the documents; nothing where the passages do not seem to answer.

        Raises:
            BadQuery: the query is too long to be searched for.
            NotFound: there is no such collection.
        """
        tokens = min(PASSAGE_TOKENS, self._served.engine.max_model_len // 4)
        way = AnswerWay("generative", tokens)
        found = await retrieve_context(self._library, self._served, self._user, query, (), self._among, way=way)
        if found.verdict == "none":
            return []
        self._queries.append(query)
        sources = [self._labelled(source) for source in found.sources[:limit]]
        self._score = max(self._score, found.score)
        self._ranked += found.ranked
        quotes = dict[str, list[str]]()
        for source, text in _quotes(query, found.ranked, sources):
            quotes.setdefault(source.label, []).append(text)
        return [
            FoundPassage(each.label, each.title, each.text, found.score, tuple(quotes.get(each.label, ())))
            for each in sources
        ]

    async def supported(self, text: str, labels: Sequence[str]) -> str:
        if is_refusal(text):
            return ""
        sources = [each for each in self._sources if not labels or each.label in labels]
        return await asyncio.to_thread(_supported, text, sources)

    def noted(self, question: str, text: str) -> None:
        self.notes.append(ResearchNote(question, text, 0.0))

    def references(self, report: str) -> str:
        cited = [each for each in self._sources if f"[{each.label}]" in report]
        if not self._lists_sources or not cited:
            return ""
        return "\n\nSources:\n" + "\n".join(f"[{each.label}] {each.title}" for each in cited)

    @property
    def partial(self) -> tuple[str, str] | None:
        """Returns the report of a research that was stopped, a notice and the notes; None where nothing was noted."""
        return (partial_notice("stopped", []), composed(self.notes)) if self.notes else None

    def found(self) -> RetrievedContext:
        """Returns all that was found, for the check of the report's citations."""
        return RetrievedContext(
            tuple(self._sources), "answer" if self._sources else "none", self._score, tuple(self._queries),
            ranked=tuple(self._ranked),
        )  # fmt: skip

    def _labelled(self, source: PromptSource) -> PromptSource:
        """The source under a label of its own, or the one that is there for the same place."""
        place = source.document, source.start, source.end
        known = next((each for each in self._sources if (each.document, each.start, each.end) == place), None)
        if known is None:
            known = replace(source, label=f"S{len(self._sources) + 1}")
            self._sources.append(known)
        return known


async def document_research(
    library: Library, served: ServedModel, user: str, question: str, collections: Among, *, writes: bool
) -> DocumentResearch:
    """Returns the search for an API's request, whose reader has no list of sources but the report's own.

    Raises:
        NotFound: there is no such collection.
        ApiError: the request ends with no question.
    """
    if not question.strip():
        raise invalid("messages", "messages end without a text of the user's; accepted: a question to look into.")
    if isinstance(collections, frozenset):
        await asyncio.to_thread(library.rights.readable, user, sorted(collections))
    return DocumentResearch(library, served, user, question, collections, writes=writes, lists_sources=True)


def _quotes(
    query: str, ranked: Sequence[RankedSentence], sources: Sequence[PromptSource]
) -> list[tuple[PromptSource, str]]:
    """Returns the sentence of each document that answers best, where one does, with the source that has it."""
    made = list[tuple[PromptSource, str]]()
    for one in sorted(ranked, key=lambda one: -one.score):
        if one.probability < ANSWERS or len(made) >= QUOTES:
            break
        if any(source.document == one.source.document for source, _ in made):
            continue
        for each in (with_context(query, one), one):
            first, last = each.source.start + each.start, each.source.start + each.end
            has = [s for s in sources if s.document == each.source.document and s.start <= first and last <= s.end]
            if has:
                made.append((has[0], each.shown))
                break
    return made


def _supported(text: str, sources: Sequence[PromptSource]) -> str:
    checker = CitationChecker(sources)
    checked = [*checker.feed(text), *checker.finish()]
    kept = [as_text(each).strip() for each in checked if each.support in ("supported", "elsewhere", "partial")]
    return " ".join(kept)
