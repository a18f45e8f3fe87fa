"""The search of a strategy in a user's documents and the web: passages under labels of one answer, and sentences that
they support.

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
    from app.runs.run_tools import RunTools
    from retrieval import Library
    from tools.context import Source

WEB_SEARCH = "web_search"  # the tool that is called, where a run offers it
PASSAGE_TOKENS = 1200  # of one search's passages together, or a quarter of the context where that is less
QUOTES = 3  # documents with a sentence that is quoted, of one search


class DocumentResearch:
    """A `SearchSource` over documents and web pages. One answer's; used from the event loop."""

    def __init__(
        self, library: Library, served: ServedModel, user: str, question: str, among: Among | None, *, writes: bool,
        files: frozenset[int] = frozenset(), earlier: Sequence[tuple[str, str]] = (), tools: RunTools | None = None,
        lists_sources: bool = False,
    ) -> None:  # fmt: skip
        """`among`: the collections to search, None for none; `files`: attached ones beside them. `writes`: the model is
        able to write from passages. `tools` search the web. `lists_sources`: a reader has no other list of sources."""
        resolved = resolve(question, earlier)
        self.question = question
        self.parts: Sequence[str] = [part.text for part in resolved.parts()]
        self.writes = writes
        self.notes = list[ResearchNote]()
        self._library, self._served, self._user = library, served, user
        self._among: Among | None = frozenset[int]() if among is None and files else among
        self._files = files
        self._tools = tools
        self._lists_sources = lists_sources
        self._sources = list[PromptSource]()
        self._pages = dict[str, int]()  # titles of the web's pages, with their addresses
        self._ranked = list[RankedSentence]()
        self._queries = list[str]()
        self._score = 0.0

    async def find(self, query: str, limit: int) -> list[FoundPassage]:
        """Searches the documents, and the web beside them; nothing where the passages do not seem to answer.

        Raises:
            BadQuery: the query is too long to be searched for.
            NotFound: there is no such collection.
        """
        inside, outside = await asyncio.gather(self._documents(query), self._web(query, limit))
        sources = [self._labelled(source) for source in [*inside.sources[:limit], *outside.sources]]
        if not sources:
            return []
        ranked = [*inside.ranked, *outside.ranked]
        self._queries.append(query)
        self._score = max(self._score, inside.score, outside.score)
        self._ranked += ranked
        quotes = dict[str, list[str]]()
        for source, text in _quotes(query, ranked, sources):
            quotes.setdefault(source.label, []).append(text)
        score = max(inside.score, outside.score)
        return [
            FoundPassage(each.label, each.title, each.text, score, tuple(quotes.get(each.label, ())))
            for each in sources
        ]

    async def _documents(self, query: str) -> RetrievedContext:
        if self._among is None:
            return _NOTHING
        tokens = min(PASSAGE_TOKENS, self._served.engine.max_model_len // 4)
        way = AnswerWay("generative", tokens)
        found = await retrieve_context(
            self._library, self._served, self._user, query, (), self._among, files=self._files, way=way
        )  # fmt: skip
        return _NOTHING if found.verdict == "none" else found

    async def _web(self, query: str, limit: int) -> RetrievedContext:
        """Excerpts of the web's pages. What is asked after notes were read may have been asked for by them."""
        if self._tools is None:
            return _NOTHING
        hits = await self._tools.search(WEB_SEARCH, query, limit, [WEB_SEARCH] if self.notes else [])
        pages = [self._page(hit) for hit in hits if hit.text]
        if not pages:
            return _NOTHING
        ranked = await asyncio.to_thread(self._rank, query, pages)
        score = max((one.probability for one in ranked), default=0.0)
        pages = [replace(page, score=score) for page in pages]
        return RetrievedContext(tuple(pages), "answer", score, ranked=tuple(ranked))

    def _page(self, hit: Source) -> PromptSource:
        """A page's excerpt as a source; pages are numbered below 0, where no document is."""
        title = f"{hit.title} ({hit.url})"
        if title not in self._pages:
            self._pages[title] = -1 - len(self._pages)
        text = hit.text or ""
        return PromptSource("S1", self._pages[title], title, 0, len(text), text, 0.0)

    def _rank(self, query: str, pages: Sequence[PromptSource]) -> list[RankedSentence]:
        asked = resolve(query, ())
        rarity = asked.rarity(
            self._library.rarity(self._user, "own" if self._among is None else self._among, self._files)
        )
        return self._library.ranker.rank(asked.text, pages, rarity, None)

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
        for at, known in enumerate(self._sources):
            if (known.document, known.start, known.end) == place:
                self._sources[at] = replace(known, score=max(known.score, source.score))
                return self._sources[at]
        self._sources.append(replace(source, label=f"S{len(self._sources) + 1}"))
        return self._sources[-1]


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


_NOTHING = RetrievedContext((), "none", 0.0)


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
