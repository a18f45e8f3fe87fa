"""An embedder without weights that can be held up, so that a test sees an ingest half-way."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from retrieval.embedding import Vectors
from tests.retrieval.words import WordEmbedder

HELD = "heldup"  # a text with this word waits at a closed gate


class GatedEmbedder(WordEmbedder):
    """`waiting` is set while a text waits for `gate` to open."""

    def __init__(self) -> None:
        self.gate, self.waiting = threading.Event(), threading.Event()
        self.embedded = 0  # texts
        self.gate.set()

    def embed(self, texts: Sequence[str]) -> Vectors:
        if any(HELD in text for text in texts) and not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(30)
            self.waiting.clear()
        self.embedded += len(texts)
        return super().embed(texts)
