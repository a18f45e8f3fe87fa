"""Where every chunk belongs, in memory: which of them a search may find is computed anew for each search.

Two numbers a chunk, so a million take 8 MB and a millisecond. Not safe in threads: `views` guards it.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from retrieval.dense import Bits, Ids


class Places:
    """Collections and documents by chunk; 0 where there is no chunk."""

    def __init__(self) -> None:
        self._collections = np.zeros(0, np.int32)
        self._documents = np.zeros(0, np.int32)

    def add(self, places: NDArray[np.int64]) -> None:
        """(chunks, 3): number, document, collection."""
        if not len(places):
            return
        if (needed := int(places[:, 0].max()) + 1) > len(self._documents):
            room = np.zeros(max(needed, len(self._documents) * 5 // 4) - len(self._documents), np.int32)
            self._collections = np.concatenate([self._collections, room])
            self._documents = np.concatenate([self._documents, room])
        self._documents[places[:, 0]] = places[:, 1]
        self._collections[places[:, 0]] = places[:, 2]

    def remove(self, chunks: Ids) -> None:
        held = chunks[chunks < len(self._documents)]
        self._collections[held] = self._documents[held] = 0

    def bits(self, collections: Collection[int], documents: Collection[int] | None = None) -> Bits:
        """The chunks of these collections, and of these documents if given."""
        allowed = _table(collections, self._collections)[self._collections]
        if documents is not None:
            allowed &= _table(documents, self._documents)[self._documents]
        return np.packbits(allowed, bitorder="little")


def _table(numbers: Collection[int], held: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Whether a number is among `numbers`, for all that are held."""
    size = int(held.max(initial=0)) + 1
    table = np.zeros(size, bool)
    table[[number for number in numbers if 0 < number < size]] = True
    return table
