"""The dense index: FAISS over the chunks' vectors, flat while that is fast and in cells when there are many.

A view of the truth that can be made again from it. A search is told which chunks it may find, as bits over their
numbers, and looks at no others. Not safe in threads: `views` guards it.
"""

from __future__ import annotations

import os
from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray

from retrieval.embedding import Vectors

FLAT_UP_TO = 100_000  # vectors that are compared one by one
PROBED = 64  # cells looked at
TRAINED_ON = 64  # vectors for each cell

Ids = NDArray[np.int64]
Bits = NDArray[np.uint8]  # bit i of byte i // 8: chunk i may be found


class DenseIndex:
    """Inner products of vectors of length 1, so cosines."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._index = _flat(size)
        self._cells = 0

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def add(self, ids: Ids, vectors: Vectors) -> None:
        if len(ids):
            self._index.add_with_ids(vectors, ids)
            if len(self) > FLAT_UP_TO and len(self) > 4 * max(self._cells**2 // 16, FLAT_UP_TO // 4 * (self._cells > 0)):
                self._rebuild()

    def remove(self, ids: Ids) -> None:
        if len(ids) and len(self):
            self._index.remove_ids(faiss.IDSelectorBatch(ids))

    def search(self, queries: Vectors, count: int, allowed: Bits | None = None) -> tuple[Ids, Vectors]:
        """Numbers and cosines, (queries, count), best first; -1 where there are fewer."""
        if not len(self):
            return np.full((len(queries), 0), -1, np.int64), np.zeros((len(queries), 0), np.float32)
        selector = None if allowed is None else faiss.IDSelectorBitmap(allowed)
        if self._cells:
            parameters = faiss.SearchParametersIVF(sel=selector, nprobe=min(PROBED, self._cells))
        else:
            parameters = faiss.SearchParameters(sel=selector)
        cosines, ids = self._index.search(queries, min(count, len(self)), params=parameters)
        return ids, cosines

    def _rebuild(self) -> None:
        """Go from flat to cells, or to more cells: about 4·√n of them, in half precision."""
        ids, vectors = self._all()
        self._cells = int(4 * np.sqrt(len(ids)))
        quantizer = faiss.IndexFlatIP(self.size)
        index = faiss.IndexIVFScalarQuantizer(
            quantizer, self.size, self._cells, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
        )
        index.own_fields = True
        quantizer.this.disown()
        sample = np.random.default_rng(0).permutation(len(ids))[: TRAINED_ON * self._cells]
        index.train(vectors[sample])
        index.set_direct_map_type(faiss.DirectMap.Hashtable)
        index.add_with_ids(vectors, ids)
        self._index = index

    def _all(self) -> tuple[Ids, Vectors]:
        """Everything in it, from a flat index as from cells."""
        if not self._cells:
            ids = faiss.vector_to_array(self._index.id_map)
            flat = faiss.downcast_index(self._index.index)
            return ids, faiss.rev_swig_ptr(flat.get_xb(), len(ids) * self.size).reshape(-1, self.size).copy()
        ids = np.concatenate([_cell_ids(self._index, cell) for cell in range(self._cells)])
        return ids, np.stack([self._index.reconstruct(int(each)) for each in ids])

    def ids(self) -> Ids:
        return self._all()[0]

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        partial = path.with_suffix(".partial")
        faiss.write_index(self._index, str(partial))
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path, size: int) -> DenseIndex:
        """
        Raises:
            ValueError: it is damaged, or of another size.
        """
        made = cls(size)
        try:
            made._index = faiss.downcast_index(faiss.read_index(str(path)))
        except RuntimeError as error:
            raise ValueError(f"{path.name} cannot be read: {error}") from None
        if made._index.d != size:
            raise ValueError(f"{path.name} has vectors of {made._index.d} numbers, not {size}")
        made._cells = int(getattr(made._index, "nlist", 0))
        return made


def _flat(size: int) -> faiss.IndexIDMap2:
    inner = faiss.IndexFlatIP(size)
    index = faiss.IndexIDMap(inner)
    index.own_fields = True
    inner.this.disown()
    return index


def _cell_ids(index: faiss.IndexIVF, cell: int) -> Ids:
    lists = index.invlists
    return faiss.rev_swig_ptr(lists.get_ids(cell), lists.list_size(cell)).copy()


def bits(ids: Ids, universe: int) -> Bits:
    """The set of `ids`, all below `universe`, as bits."""
    marked = np.zeros((universe + 7) // 8 * 8, bool)
    marked[ids] = True
    return np.packbits(marked, bitorder="little")
