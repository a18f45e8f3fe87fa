"""Interface of the indexes that a search uses: files beside SQLite (`views`), or PostgreSQL's (`retrieval/postgres/`).

Both find only what they are allowed to: rights and filters narrow the search itself, never its result. Scores are the
same in both: cosines, and BM25 by counts within the collections that are searched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from retrieval.embedding import Vectors


class SearchScope(Protocol):
    """The chunks that one search may find."""

    def dense(self, vector: Vectors, count: int) -> dict[int, float]:
        """Cosines of the `count` chunks nearest to a vector, (1, size), by number."""
        ...

    def lexical(self, text: str, count: int) -> dict[int, float]:
        """BM25 scores of the best `count` chunks, by number."""
        ...


class SearchIndex(Protocol):
    """The dense and the lexical index of a store. Safe in threads."""

    def changing(self) -> AbstractContextManager[None]:
        """Around a change of the truth: no search sees a part of it."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Around a search."""
        ...

    def scope(self, user: str, collections: Collection[int], documents: Collection[int] | None) -> SearchScope:
        """The chunks of these collections, and of these documents if given, that the user may read."""
        ...

    def stored(self, chunks: Sequence[int]) -> dict[int, Vectors]:
        """The vectors of those of the chunks that are there, by number."""
        ...

    def rarity(self, collections: Collection[int]) -> Callable[[str], float]:
        """Returns a function of a stem's inverse document frequency in these collections."""
        ...

    def spread(self) -> None:
        """Reorganises an index that has grown, while searches go on."""
        ...

    def save(self, at_least: float = 0.0) -> None:
        """Keeps for the next start what is in memory alone, if more than that share of it changed."""
        ...

    def close(self) -> None: ...
