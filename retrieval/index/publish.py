"""From a text to a searchable document: cut, embedded, stored and shown, without a word about files or jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from retrieval.document_store import DocumentStore
from retrieval.embedding import Embedder
from retrieval.index.chunking import ChunkShape, cut
from retrieval.index.search_index import SearchIndex
from retrieval.index.views import embedded_text
from retrieval.parsing.parsed import Parsed
from retrieval.records import Metadata, New

BATCH = 64  # chunks embedded at once, and then kept
GROUP_CHUNKS = 256  # that become visible together


@dataclass(frozen=True, slots=True)
class Text:
    """A document that came as text. A text of a `source` that is there replaces it."""

    source: str
    text: str
    title: str = ""
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A document that lacks nothing but its vectors; `texts` are its chunks as they are embedded."""

    new: New
    texts: Sequence[str]

    @property
    def by_hash(self) -> Iterator[tuple[bytes, str]]:
        return zip(self.new.hashes, self.texts, strict=True)


class Publisher:
    """Puts documents into a store and its views."""

    def __init__(
        self, store: DocumentStore, views: SearchIndex, embedder: Embedder, shape: ChunkShape | None = None
    ) -> None:
        self._store, self._views, self._embedder = store, views, embedder
        self._shape = shape or ChunkShape()

    def prepare(
        self, source: str, version: str, parsed: Parsed, metadata: Metadata, size: int, file: Path | None = None,
        owned: bool = False, root: Path | None = None, folder: int | None = None,
    ) -> Prepared:  # fmt: skip
        """Cut a text; `size` is that of its file in bytes."""
        made = cut(parsed, self._embedder.pieces, self._shape)
        title = parsed.title or source
        texts = [embedded_text(title, c.context, parsed.text[c.start : c.end]) for c in made.chunks]
        hashes = [hashlib.sha256(text.encode()).digest()[:16] for text in texts]
        return Prepared(New(source, version, parsed, made, hashes, size, metadata, file, owned, root, folder), texts)

    def embed(self, documents: Sequence[Prepared], done: Callable[[set[bytes]], None] = lambda known: None) -> None:
        """Embed texts that no document had before. After each batch `done` gets the hashes that have vectors."""
        texts = dict(pair for each in documents for pair in each.by_hash)
        known = self._store.chunks.known(self._embedder.key, list(texts))
        missing = sorted(texts.keys() - known, key=lambda digest: (len(texts[digest]), digest))  # little padding
        for at in range(0, len(missing), BATCH):
            some = missing[at : at + BATCH]
            vectors = self._embedder.embed([texts[digest] for digest in some])
            self._store.chunks.put_vectors(self._embedder.key, some, vectors)
            known |= set(some)
            done(known)

    def show(self, user: str, collection: int, documents: Sequence[Prepared], replace: bool = True) -> list[int]:
        """Make documents visible, all at once. Returns their numbers.

        Raises:
            NotFound: there is no such collection.
            NotAllowed: the user may only read it.
            SourceTaken: another user added one of a source, and `replace` is false.
        """
        with self._views.changing():
            numbers, replaced = self._store.put(user, collection, [each.new for each in documents], replace)
        for file in replaced:
            file.unlink(missing_ok=True)
        return numbers

    def add(
        self, user: str, collection: int, texts: Sequence[Text], done: Callable[[int], None] = lambda n: None
    ) -> None:
        """Texts as documents, some at a time; `done` hears how many are visible.

        Raises:
            NotFound, NotAllowed: as `show`.
        """
        group, shown = list[Prepared](), 0
        for number, one in enumerate(texts, 1):
            parsed = Parsed(one.text, one.title, "prose", "text/plain")
            version = hashlib.sha256(f"{one.title}\0{one.text}".encode()).hexdigest()
            group.append(self.prepare(one.source, version, parsed, one.metadata, len(one.text.encode())))
            if number == len(texts) or sum(len(each.texts) for each in group) >= GROUP_CHUNKS:
                self.embed(group)
                self.show(user, collection, group)
                shown += len(group)
                group = []
                done(shown)
        self._views.spread()
