"""Ways through a library for an agent: search, open the text around a hit, find a string, list. Every answer is
bounded.

Each is a plain function with arguments that a model can write, for one user and some collections. Knows nothing of
tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retrieval.index.hybrid import BadQuery, Query
from retrieval.library import Library
from retrieval.records import Among, Document, NotFound
from retrieval.spans import Folded, sentences

MAX_COUNT = 20  # results of one call
WINDOW = 1500  # characters around a place
MAX_STRING_LENGTH = 200  # characters to look for


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Characters `start` to `end` of a document; `before` and `after` say how many more there are."""

    document: int
    title: str
    page: int | None
    start: int
    end: int
    text: str
    before: int
    after: int


class Browser:
    """One user's way through some collections, the user's own unless others are named."""

    def __init__(self, library: Library, user: str, collections: Among = "own") -> None:
        self._library = library
        self._user = user
        self._collections = collections

    def search(self, query: str, limit: int = 5) -> list[Excerpt]:
        """The passages that answer best.

        Raises:
            BadQuery: it is empty or too long.
        """
        found = self._library.search(Query(self._user, query, min(limit, MAX_COUNT), self._collections))
        return [self._excerpt(hit.passage.document, hit.passage.start, hit.passage.end) for hit in found.hits]

    def open(self, document: int, start: int, end: int | None = None, around: int = WINDOW) -> Excerpt:
        """Returns the whole sentences at and around a place.

        Raises:
            NotFound: there is no such document.
            BadQuery: the place is not in it.
        """
        about = self._document(document)
        if not 0 <= start < about.characters:
            raise BadQuery(f"Character {start} is not in document {document}; it has {about.characters:,}.")
        around = min(around, WINDOW)
        end = min(about.characters, max(start + 1, end or start + 1), start + WINDOW)
        low, high = max(0, start - around), min(about.characters, end + around)
        text = self._library.store.text(self._user, document, low, high)
        borders = list(sentences(text))
        if low and (first := next((a for a, _ in borders[1:] if a <= start - low), None)) is not None:
            low, text = low + first, text[first:]
        if high < about.characters and (last := [b for _, b in sentences(text) if low + b >= end][:-1]):
            high, text = low + last[-1], text[: last[-1]]
        return self._made(about, low, low + len(text), text)

    def find(self, string: str, document: int | None = None, limit: int = 10) -> list[Excerpt]:
        """Returns the places of a string word for word, ignoring case and spacing, each with its sentence.

        Raises:
            BadQuery: it is empty or too long.
            NotFound: there is no such document.
        """
        string = " ".join(string.split())
        if not string or len(string) > MAX_STRING_LENGTH:
            raise BadQuery(f"The string has {len(string)} characters; 1 to {MAX_STRING_LENGTH} are looked for.")
        if document is not None:
            candidates: Sequence[int] = [self._document(document).id]
        else:
            words = max(string.split(), key=len)  # the longest word narrows best, and has no space to differ in
            among = self._library.rights.readable(self._user, self._collections)
            candidates = self._library.store.containing(among, words, 5 * MAX_COUNT)
        found = list[Excerpt]()
        for number in candidates:
            text = self._library.store.text(self._user, number)
            for start, end in Folded(text).all(string):
                found.append(self.open(number, start, end, around=200))
                if len(found) == min(limit, MAX_COUNT):
                    return found
        return found

    def list(self, after: int = 0, limit: int = MAX_COUNT) -> Sequence[Document]:
        """Documents, the newest first, from number `after` of them on."""
        among = self._library.rights.readable(self._user, self._collections)
        held = [each for each in self._library.store.documents(self._user) if each.collection in among]
        return held[after : after + min(limit, MAX_COUNT)]

    def _document(self, number: int) -> Document:
        about = self._library.store.document(self._user, number)
        if about.collection not in self._library.rights.readable(self._user, self._collections):
            raise NotFound(f"There is no document {number}.")
        return about

    def _excerpt(self, document: int, start: int, end: int) -> Excerpt:
        about = self._document(document)
        return self._made(about, start, end, self._library.store.text(self._user, document, start, end))

    def _made(self, about: Document, start: int, end: int, text: str) -> Excerpt:
        pages = self._library.store.pages(self._user, about.id)
        page = next((page.number for page in reversed(pages) if page.start <= start), None)
        return Excerpt(about.id, about.title, page, start, end, text, start, about.characters - end)
