"""The dense index: FAISS over the chunks' vectors, flat while that is fast and in cells when there are many.

A view of the truth that can be made again from it. A search gets the chunks it may find as a bitmap over their numbers,
and looks at no others. Not safe in threads: `views` guards it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from retrieval.durable import Damaged, clear_away, digest_of, put_in_place
from retrieval.embedding import Vectors

FLAT_UP_TO = 100_000  # vectors that are compared one by one
PROBED = 64  # cells looked at
CELLS = 4  # times the root of the number of vectors
TRAINED_ON = 64  # vectors for each cell

_IVF: Any = faiss.SearchParametersIVF
_FLAT: Any = faiss.SearchParameters
Ids = NDArray[np.int64]
Bits = NDArray[np.uint8]  # the lowest bit of byte 0 is chunk 0: may it be found?


class DenseIndex:
    """Inner products of vectors of length 1, so cosines."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._index: Any = _flat(size)  # faiss's stubs declare the SWIG functions, not its Python wrappers
        self._cells = 0

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def add(self, ids: Ids, vectors: Vectors) -> None:
        if len(ids):
            self._index.add_with_ids(vectors, ids)

    def remove(self, ids: Ids) -> None:
        if len(ids) and len(self):
            self._index.remove_ids(faiss.IDSelectorBatch(ids))

    def search(self, queries: Vectors, count: int, allowed: Bits | None = None) -> tuple[Ids, Vectors]:
        """Numbers and cosines, (queries, count), best first; -1 where there are fewer."""
        if not len(self):
            return np.full((len(queries), 0), -1, np.int64), np.zeros((len(queries), 0), np.float32)
        bitmap: Any = faiss.IDSelectorBitmap
        selector = None if allowed is None else bitmap(allowed)
        if self._cells:
            parameters: Any = _IVF(sel=selector, nprobe=min(PROBED, self._cells))
        else:
            parameters = _FLAT(sel=selector)
        cosines, ids = self._index.search(queries, min(count, len(self)), params=parameters)
        return ids, cosines

    @property
    def crowded(self) -> bool:
        """Returns whether `in_cells` would make it faster: flat and large, or four times the size its cells were made
        for."""
        return len(self) > max(FLAT_UP_TO, 4 * (self._cells // CELLS) ** 2)

    @classmethod
    def in_cells(cls, ids: Ids, vectors: Vectors) -> DenseIndex:
        """An index in about 4·√n cells, in half precision. Takes seconds."""
        made = cls(vectors.shape[1])
        made._cells = int(CELLS * np.sqrt(len(ids)))
        quantizer: Any = faiss.IndexFlatIP(made.size)
        index: Any = faiss.IndexIVFScalarQuantizer(
            quantizer, made.size, made._cells, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT, False
        )  # by_residual is off: the codes are the vectors, so `all` can give them back
        index.own_fields = True
        quantizer.this.disown()
        sample = np.random.default_rng(0).permutation(len(ids))[: TRAINED_ON * made._cells]
        if faiss.get_num_gpus():  # for k-means alone: a GPU's index would not heed which chunks a search may find
            index.clustering_index = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(made.size))
        index.train(vectors[sample])
        index.add_with_ids(vectors, ids)
        made._index = index
        return made

    def all(self) -> tuple[Ids, Vectors]:
        """Everything in it, from a flat index as from cells."""
        if not self._cells:
            ids = faiss.vector_to_array(self._index.id_map)
            flat: Any = faiss.downcast_index(self._index.index)
            return ids, faiss.rev_swig_ptr(flat.get_xb(), len(ids) * self.size).reshape(-1, self.size).copy()
        lists = self._index.invlists
        parts, vectors = [np.zeros(0, np.int64)], [np.zeros((0, self.size), np.float32)]
        for cell in range(self._cells):
            if count := lists.list_size(cell):
                parts.append(faiss.rev_swig_ptr(lists.get_ids(cell), count).copy())
                codes = faiss.rev_swig_ptr(lists.get_codes(cell), count * 2 * self.size)
                vectors.append(codes.view(np.float16).reshape(count, self.size).astype(np.float32))
        return np.concatenate(parts), np.concatenate(vectors)

    def save(self, path: Path) -> str:
        """Write it whole or not at all. Returns the digest that `load` asks for."""
        partial = path.with_suffix(".partial")
        clear_away(partial)
        faiss.write_index(self._index, str(partial))
        digest = digest_of(partial)
        put_in_place(partial, path)
        return digest

    @classmethod
    def load(cls, path: Path, size: int, digest: str) -> DenseIndex:
        """Read a file that `save` wrote. FAISS trusts its files: it is given none with another digest.

        Raises:
            Damaged: it is not as it was written, or of another size.
        """
        made = cls(size)
        try:
            if digest_of(path) != digest:
                raise Damaged(f"{path.name} does not match its digest")
            made._index = faiss.read_index(str(path))
        except (RuntimeError, OSError) as error:
            raise Damaged(f"{path.name} cannot be read: {error}") from None
        if getattr(made._index, "by_residual", False):
            raise Damaged(f"{path.name} holds differences to its cells' centres, which earlier versions kept")
        if made._index.d != size:
            raise Damaged(f"{path.name} has vectors of {made._index.d} numbers, not {size}")
        made._cells = int(getattr(made._index, "nlist", 0))
        return made


def _flat(size: int) -> Any:
    inner: Any = faiss.IndexFlatIP(size)
    index = faiss.IndexIDMap(inner)
    index.own_fields = True
    inner.this.disown()
    return index
