"""Hits into sources for a prompt: their surroundings, within one budget of tokens, labelled S1, S2, … in a fixed order.

Sources are chosen by score and laid out by document and place: the same set always makes the same text, so that the K/V
of a prompt's beginning can be found again. Knows nothing of models; tokens are counted by a function passed in.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from retrieval.document_store import DocumentStore
from retrieval.parsing.parsed import ParsedPage
from retrieval.records import Document, Hit, NotFound

CountTokens = Callable[[str], int]
MAX_TOKEN_LENGTH = 16  # characters of a token at the mean over a text: none has more
OVERHEAD = 8  # tokens of a label, brackets and a line end


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Characters `start` to `end` of a document, under a label; `pages` are those it stands on."""

    label: str
    document: int
    title: str
    start: int
    end: int
    text: str
    score: float
    pages: tuple[ParsedPage, ...] = ()
    context: str = ""  # the headings it stands under, or its table's header

    def page(self, at: int) -> int | None:
        """The page of a character of the document."""
        return next((page.number for page in reversed(self.pages) if page.start <= at), None)

    def part(self, label: str, start: int, end: int) -> PromptSource:
        """Returns characters `start` to `end` of its text as a source of their own."""
        first, last = self.start + start, self.start + end
        pages = tuple(page for page in self.pages if page.start < last and first <= page.end)
        return replace(self, label=label, start=first, end=last, text=self.text[start:end], pages=pages)


@dataclass(frozen=True, slots=True)
class _Window:
    """The window that stands for a hit: its parent, or itself."""

    hit: Hit
    start: int
    end: int
    text: str

    @property
    def document(self) -> int:
        return self.hit.passage.document

    def overlaps(self, other: _Window) -> bool:
        return self.document == other.document and self.start < other.end and other.start < self.end

    def holds(self, hit: Hit) -> bool:
        passage = hit.passage
        return self.document == passage.document and self.start <= passage.start and passage.end <= self.end


def sources(
    store: DocumentStore, user: str, hits: Sequence[Hit], budget: int, count: CountTokens, *, parents: bool = True
) -> list[PromptSource]:
    """The best hits with their parents, or alone where those do not fit, in at most `budget` tokens."""
    windows, left = list[_Window](), budget
    for hit in hits:
        if any(window.holds(hit) for window in windows):
            continue
        for window in _windows(store, user, hit, parents):
            size = count(window.text) + OVERHEAD
            if size <= left and not any(window.overlaps(other) for other in windows):
                windows.append(window)
                left -= size
                break
    windows.sort(key=lambda window: (window.document, window.start))
    return [_source(store, user, number, window) for number, window in enumerate(windows, 1)]


def whole(
    store: DocumentStore, user: str, documents: Iterable[Document], budget: int, count: CountTokens
) -> list[PromptSource]:
    """Each document as one source, its whole text; none where they do not fit in `budget` tokens together."""
    made, left = list[PromptSource](), budget
    for document in documents:
        if document.characters > left * MAX_TOKEN_LENGTH:  # spares reading and counting a book
            return []
        try:
            text, pages = store.text(user, document.id), store.pages(user, document.id)
        except NotFound:  # it went meanwhile
            continue
        left -= count(text) + OVERHEAD
        if left < 0:
            return []
        made.append(
            PromptSource(f"S{len(made) + 1}", document.id, document.title, 0, len(text), text, 1.0, pages)
        )  # fmt: skip
    return made


def labelled(found: Iterable[PromptSource]) -> list[PromptSource]:
    """Sources of several makings in the fixed order, under labels that are each its own."""
    ordered = sorted(found, key=lambda source: (source.document, source.start))
    return [replace(source, label=f"S{number}") for number, source in enumerate(ordered, 1)]


def _windows(store: DocumentStore, user: str, hit: Hit, parents: bool) -> Iterator[_Window]:
    """Yields the windows that may stand for a hit, the largest first."""
    passage = hit.passage
    if parents:
        try:
            yield _Window(hit, *store.parent(user, passage.document, passage.parent))
        except NotFound:  # it went meanwhile
            return
    yield _Window(hit, passage.start, passage.end, passage.text)


def _source(store: DocumentStore, user: str, number: int, window: _Window) -> PromptSource:
    try:
        pages = store.pages(user, window.document)
    except NotFound:
        pages = ()
    here = tuple(page for page in pages if page.start < window.end and window.start <= page.end)
    hit = window.hit
    return PromptSource(
        f"S{number}",
        window.document,
        hit.passage.title,
        window.start,
        window.end,
        window.text,
        hit.score,
        here,
        hit.passage.context,
    )


LABELS = 99  # numbers of `own_labels`


def own_labels(found: Iterable[PromptSource]) -> list[PromptSource]:
    """Sources in the same order, each under a label that its text decides, whatever else is found: so a model's K/V of
    its line may be used again beside other sources. Where two would have the same, the later one gets the next."""
    made, taken = list[PromptSource](), set[int]()
    for source in found:
        number = zlib.crc32(_placed(source).encode()) % LABELS
        while number in taken:
            number = (number + 1) % LABELS
        taken.add(number)
        made.append(replace(source, label=f"S{number + 1}"))
    return made


def lines(found: Iterable[PromptSource]) -> list[str]:
    """The sources as a prompt has them; a row without its table's header would say nothing."""
    return [f"[{source.label}] {_placed(source)}" for source in found]


def layout(found: Sequence[PromptSource]) -> str:
    """The same as one text, a source a line."""
    return "\n".join(lines(found))


def _placed(source: PromptSource) -> str:
    text, context = " ".join(source.text.split()), " ".join(source.context.split())
    return text if not context or context in text else f"({context}) {text}"
