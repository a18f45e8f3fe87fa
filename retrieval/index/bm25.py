"""BM25 of passages by counts within the collections that are searched, so that a score tells nothing of other texts.

Knows nothing of where passages are kept: an index chooses candidates, and gives their stems as `term_hashes` and the
counts as `Counts`. Weights are those of Robertson et al. (TREC-3); a word that the query repeats gains by K3 (TREC-4).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

K1, B = 1.2, 0.75  # of BM25, as tantivy has them
K3 = 8.0  # of BM25: how soon a word that the query repeats gains no more (Robertson et al., TREC-4)
SHARES = {"text": 1.0, "title": 0.5}  # of the fields in a score


class Counts(Protocol):
    """Counts of the passages in some collections, as of one moment."""

    def holding(self, stem: str, field: str = "text") -> int:
        """Passages that have a stem."""
        ...

    def rarity(self, stem: str, field: str = "text") -> float:
        """Inverse document frequency of a stem."""
        ...

    def mean_length(self, field: str) -> float:
        """Words of a passage's field; 1 at least."""
        ...


@dataclass(frozen=True, slots=True)
class FieldQuery:
    """A query's stems with their weights in one field."""

    weights: Mapping[str, float]
    mean_length: float

    def scores(self, hashes: Sequence[bytes]) -> NDArray[np.float64]:
        """BM25 of one field of some passages, by the hashes of their stems, as `term_hashes` makes them."""
        if not self.weights or not hashes:
            return np.zeros(len(hashes))
        weights = {_hash(stem): weight for stem, weight in self.weights.items()}
        stems = np.array(sorted(weights), np.uint32)
        lengths = np.array([len(each) // 4 for each in hashes], np.int64)
        passages = np.repeat(np.arange(len(hashes)), lengths)
        held = np.frombuffer(b"".join(hashes), np.uint32)
        likely = np.zeros(1 << 16, bool)  # by half a hash: few of the stems are asked for, and searching takes longer
        likely[stems & 0xFFFF] = True
        (those,) = likely[held & 0xFFFF].nonzero()
        at = np.minimum(np.searchsorted(stems, held[those]), len(stems) - 1)
        asked = stems[at] == held[those]
        cells = passages[those[asked]] * len(stems) + at[asked]
        times = np.bincount(cells, minlength=len(hashes) * len(stems)).reshape(len(hashes), len(stems))
        norm = K1 * (1 - B + B * lengths / self.mean_length)
        gained: NDArray[np.float64] = times * (K1 + 1) / (times + norm[:, None])
        return gained @ np.array([weights[stem] for stem in stems.tolist()])


def field_queries(times: Mapping[str, int], counts: Counts) -> dict[str, FieldQuery]:
    """Weighs a query's stems, by how often it has each, in each of the fields."""
    repeated = {stem: count * (K3 + 1) / (count + K3) for stem, count in times.items()}
    return {
        field: FieldQuery(
            {
                stem: share * weight * counts.rarity(stem, field)
                for stem, weight in repeated.items()
                if counts.holding(stem, field)
            },
            counts.mean_length(field),
        )
        for field, share in SHARES.items()
    }


def heaviest(asked: Mapping[str, FieldQuery], count: int) -> list[str]:
    """The stems that weigh most in any field, the heaviest first."""
    weights = {
        stem: max(each.weights.get(stem, 0.0) for each in asked.values())
        for each in asked.values()
        for stem in each.weights
    }
    return sorted(weights, key=lambda stem: (-weights[stem], stem))[:count]


def best_scored(
    asked: Mapping[str, FieldQuery], ids: NDArray[np.int64], hashes: Mapping[str, Sequence[bytes]], count: int
) -> tuple[NDArray[np.int64], list[float]]:
    """Numbers and scores of the best `count` of some passages, best first; `hashes` are of each field."""
    scores = sum((each.scores(hashes[field]) for field, each in asked.items()), np.zeros(len(ids)))
    best = np.lexsort((ids, -scores))[:count]
    return ids[best], scores[best].tolist()


def term_hashes(words: Sequence[str]) -> bytes:
    """Four bytes a stem: enough to count some stems in a passage, and quicker than its text."""
    return np.fromiter(map(_hash, words), np.uint32, len(words)).tobytes()


def _hash(stem: str) -> int:
    return zlib.crc32(stem.encode())


def inverse_document_frequency(holding: int, passages: int) -> float:
    """As BM25 has it: never negative."""
    return math.log(1 + (max(passages - holding, 0) + 0.5) / (holding + 0.5))
