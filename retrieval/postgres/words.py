"""The words of chunks in PostgreSQL: stems as `tsvector`s for a GIN index, and their counts by collection for BM25.

The stems are made here, by the rules of the lexical index beside SQLite, and not by `to_tsvector`: its words depend on
a configuration, and an identifier would not be found by its parts. Words are indexed in the transaction that adds their
chunks, so a search sees both or neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from retrieval.document_database import StoreConnection
from retrieval.index.bm25 import SHARES, inverse_document_frequency, term_hashes
from retrieval.index.chunks import ChunkRow
from retrieval.index.lexical import stems
from retrieval.index.views import indexed_text

BATCH = 1000  # chunks
TITLE = "^"  # before a stem of a title, which no stem begins with

_NEW = """SELECT c.id, c.document, c.collection, c.hash, c.text, c.context, d.title
    FROM chunks c JOIN documents d ON d.id = c.document
    WHERE c.added >= ? AND c.id > ? AND c.words IS NULL ORDER BY c.id LIMIT ?"""
_INDEX = "UPDATE chunks SET words = array_to_tsvector(?::text[]), text_hashes = ?, title_hashes = ? WHERE id = ?"
_COUNT = """INSERT INTO terms (collection, term, chunks)
    SELECT * FROM unnest(?::bigint[], ?::text[], ?::bigint[])
    ON CONFLICT (collection, term) DO UPDATE SET chunks = terms.chunks + excluded.chunks"""
_TOTAL = """INSERT INTO lexical_totals AS t (collection, chunks, text, title) VALUES (?, ?, ?, ?)
    ON CONFLICT (collection) DO UPDATE
    SET chunks = t.chunks + excluded.chunks, text = t.text + excluded.text, title = t.title + excluded.title"""


def index_words(db: StoreConnection, generation: int) -> None:
    """Indexes the chunks that came with a generation or later, in the transaction of their coming."""
    last = 0
    while rows := [ChunkRow(*row) for row in db.execute(_NEW, (generation, last, BATCH))]:
        last = rows[-1].id
        holding, totals, values = Counter[tuple[int, str]](), dict[int, Counter[str]](), list[tuple[Any, ...]]()
        for row in rows:
            text, title = stems(indexed_text(row)), stems(row.title)
            words = sorted({*text, *(TITLE + stem for stem in title)})
            values.append((words, term_hashes(text), term_hashes(title), row.id))
            holding.update((row.collection, word) for word in words)
            total = totals.setdefault(row.collection, Counter())
            total.update({"chunks": 1, "text": len(text), "title": len(title)})
        db.executemany(_INDEX, values)
        counted = sorted(holding.items())
        db.execute(
            _COUNT,
            ([number for (number, _), _ in counted], [word for (_, word), _ in counted], [n for _, n in counted]),
        )
        for number, total in sorted(totals.items()):
            db.execute(_TOTAL, (number, total["chunks"], total["text"], total["title"]))


class WordCounts:
    """Counts of the passages in some collections, as `bm25.Counts`, of the stems that were asked for."""

    def __init__(self, db: StoreConnection, collections: Collection[int], words: Collection[str]) -> None:
        among = sorted(collections)
        totals = db.execute(
            """SELECT sum(chunks), sum(text), sum(title) FROM lexical_totals
               WHERE collection = ANY(?::bigint[])""",
            (among,),
        ).fetchone()
        self._passages, *lengths = (int(total or 0) for total in totals)
        self._lengths = dict(zip(SHARES, lengths, strict=True))
        asked = [*words, *(TITLE + word for word in words)]
        rows = db.execute(
            """SELECT term, sum(chunks) FROM terms
               WHERE collection = ANY(?::bigint[]) AND term = ANY(?::text[]) GROUP BY term""",
            (among, asked),
        )
        self._holding = {term: int(count) for term, count in rows}

    def holding(self, stem: str, field: str = "text") -> int:
        return self._holding.get(stem if field == "text" else TITLE + stem, 0)

    def rarity(self, stem: str, field: str = "text") -> float:
        return inverse_document_frequency(self.holding(stem, field), self._passages)

    def mean_length(self, field: str) -> float:
        return max(self._lengths[field] / max(self._passages, 1), 1.0)


def as_tsquery(words: Sequence[str]) -> str:
    """A query for chunks with any of the stems in their text or title."""
    return " | ".join(f"{_quoted(word)} | {_quoted(TITLE + word)}" for word in words)


def _quoted(word: str) -> str:
    return "'" + word.replace("\\", "\\\\").replace("'", "''") + "'"


def rarest(words: Sequence[str], counts: WordCounts, limit: int) -> list[str]:
    """The rarest of the stems, as many as `limit` chunks have together; one at least."""
    chosen, total = list[str](), 0
    for word in sorted(words, key=lambda word: (counts.holding(word), word)):
        total += max(counts.holding(word), counts.holding(word, "title"))
        if chosen and total > limit:
            break
        chosen.append(word)
    return chosen
