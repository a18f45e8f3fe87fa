"""An embedder without weights: a text's vector is the sum of fixed random ones, one for each of its words."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from retrieval.embedding import Vectors

_PIECE = re.compile(r"\w+|[^\w\s]")


class WordEmbedder:
    name = key = "words-64"
    size = 64
    leading = 0

    def pieces(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        return [[found.span() for found in _PIECE.finditer(text)] for text in texts]

    @property
    def vocabulary(self) -> int:
        return 256

    def text_of(self, ids: Sequence[int]) -> str | None:
        """Its ids are those of ASCII's characters; a text ends with none that stands for no character."""
        text = bytes(ids).decode("ascii", "ignore")
        return text if len(text) == len(ids) else None

    def embed(self, texts: Sequence[str]) -> Vectors:
        made = np.stack([sum(map(_vector, _words(text)), np.full(self.size, 1e-3, np.float32)) for text in texts])
        return np.asarray(made / np.linalg.norm(made, axis=1, keepdims=True), np.float32)

    def embed_query(self, text: str) -> Vectors:
        return self.embed([text])

    def tokens(self, texts: Sequence[str]) -> list[Vectors]:
        return [np.stack([_vector(piece.lower()) for piece in _PIECE.findall(text) or [""]]) for text in texts]


def _words(text: str) -> list[str]:
    return [word.lower() for word in re.findall(r"\w+", text)]


@lru_cache(maxsize=100_000)
def _vector(word: str) -> Vectors:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big")
    drawn = np.random.default_rng(seed).standard_normal(WordEmbedder.size).astype(np.float32)
    return drawn / np.linalg.norm(drawn)
