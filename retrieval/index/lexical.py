"""The lexical index: BM25 by tantivy over the chunks' words, identifiers also in their parts.

`parseHttpHeader`, `parse_http_header` and `parse-http-header` all match "http header". Collections and documents are
terms too, so a search finds nothing that its user may not read. Scores come from counts within the collections that
are searched: tantivy's own are of the whole index, and would leak other users' texts. Not safe in threads for writing:
`views` guards it.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import tantivy

from retrieval.durable import Damaged, Record, clear_away, make_folder, read_record, write_record
from retrieval.index.bm25 import (
    SHARES,
    FieldQuery,
    best_scored,
    field_queries,
    heaviest,
    inverse_document_frequency,
    term_hashes,
)
from retrieval.index.dense import Bits, Ids

log = logging.getLogger("ponder.retrieval")

FORMAT = 2  # goes up when the indexed fields change: the index is then made anew
MEMORY = 64 << 20  # bytes that the writer buffers
WIDE = 0.2  # of the index: a search of more looks for passages anywhere first, and leaves out what it may not find
SPARE = 1.5  # times as many passages as are likely to be enough for that
MARGIN = 100  # passages scored beyond those asked for: tantivy chooses them, by a mean length over the whole index
LENGTH_BITS = 16  # of a field's number of words
REMOVED_AT_ONCE = 10_000  # chunks
LOOKUP_WORDS = 24  # of a query, those that weigh most: they choose the candidates, and all its words score them

_WORD = re.compile(r"[^\W_]+(?:[_'’.-][^\W_]+)*")
_PARTS = re.compile(r"[A-Z]+(?![a-zà-þ])|[A-ZÀ-Þ]?[a-zà-þß]+|\d+|[^\W\d_]+")
_PARTS_OF_SEGMENT = ("idx", "pos", "term", "store", "fast", "fieldnorm")
_FOOTER = 8  # bytes at a file's end: the length of a JSON object before them, then tantivy's number
_VERSION = ("major", "minor", "patch", "index_format_version")  # of a footer
_MAGIC = (1337).to_bytes(4, "little")
_MAX_FOOTER_LENGTH = 4096
_READ = 1 << 20  # bytes of a file that are summed up at once

_POSSESSIVE = re.compile(r"['’]s$", re.IGNORECASE)
_HYPHEN = re.compile("\u00ad\\s*")


def unbroken(text: str) -> str:
    """A text without the soft hyphens at which words were broken into lines."""
    return _HYPHEN.sub("", text) if "\u00ad" in text else text


def terms(text: str) -> list[str]:
    """The words of a text in lower case; of an identifier, its parts and then itself."""
    return [term for word in _WORD.findall(text) for term in _of_word(word)]


@lru_cache(maxsize=1 << 16)  # a language's common words: half the time of indexing went into them
def _of_word(word: str) -> tuple[str, ...]:
    word = _POSSESSIVE.sub("", word)
    parts = _PARTS.findall(word)
    whole = word.lower().replace("’", "'")
    if len(parts) < 2:
        return (whole,)
    if re.search(r"[-.']", word) is None or len(parts) > 3:
        return (*(part.lower() for part in parts), whole)
    return tuple(part.lower() for part in parts)


# Beside those that tantivy leaves out: words that questions are made of.
_EMPTY = [
    "who", "whom", "whose", "what", "when", "where", "which", "why", "how", "do", "does", "did", "done", "has",
    "have", "had", "having", "can", "could", "would", "should", "may", "might", "must", "shall", "i", "me",
    "my", "you", "your", "he", "him", "his", "she", "her", "hers", "we", "us", "our", "they", "them", "its",
    "am", "been", "being", "were", "than", "from", "about", "also", "some", "any", "more", "most", "many",
    "much", "very", "just", "there", "here",
]  # fmt: skip


def _analyzer(*, stopwords: bool) -> tantivy.TextAnalyzer:
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace()).filter(tantivy.Filter.remove_long(60))
    if not stopwords:
        builder = builder.filter(tantivy.Filter.stopword("english")).filter(tantivy.Filter.custom_stopword(_EMPTY))
    return builder.filter(tantivy.Filter.stemmer("english")).build()


_ALL, _CONTENT = _analyzer(stopwords=True), _analyzer(stopwords=False)
_STEMMED = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace()).build()


def stems(text: str) -> list[str]:
    """The words of a text as they are indexed."""
    return list(_ALL.analyze(" ".join(terms(text))))


def content(text: str) -> list[str]:
    """The same without those that say nothing alone."""
    return list(_CONTENT.analyze(" ".join(terms(text))))


def query_terms(query: str) -> Counter[str]:
    """The stems of a query that say something, or all where none does, by how often it has each."""
    return Counter(content(query)) or Counter(stems(query))


class LexicalIndex:
    """A folder of tantivy's, beside a record of its files at the last commit."""

    def __init__(self, folder: Path) -> None:
        """Open it as of its last commit. A damaged folder is deleted: `generation` is -1 then."""
        self._folder = folder
        self._record = folder / "generation.json"
        builder = tantivy.SchemaBuilder()
        builder.add_unsigned_field("chunk", stored=True, indexed=True, fast=True)
        builder.add_unsigned_field("collection", indexed=True)
        builder.add_unsigned_field("document", indexed=True)
        for field in SHARES:
            builder.add_text_field(field, tokenizer_name="ponder", index_option="freq")
            builder.add_bytes_field(f"{field}_hashes", stored=True)
        builder.add_text_field("held", tokenizer_name="ponder", index_option="basic")  # see `_held`
        self._schema = builder.build()
        try:
            self._generation = self._checked()
            self._open()
        except FileNotFoundError:
            self._begin_anew()
        except (Damaged, ValueError, OSError) as error:  # tantivy raises ValueError
            log.warning("The lexical index is made again: %s.", error)
            self._begin_anew()

    def _open(self) -> None:
        self._index = tantivy.Index(self._schema, path=str(self._folder))
        self._index.register_tokenizer("ponder", _STEMMED)
        self._writer = self._index.writer(MEMORY, 1)
        self._totals = dict[int, _Totals]()  # of collections as of the last commit

    def _begin_anew(self) -> None:
        for attempt in range(10):
            try:
                clear_away(self._folder)
                break
            except OSError as error:  # tantivy's threads outlive an index that failed to open, for a moment
                if error.errno != errno.ENOTEMPTY or attempt == 9:
                    raise
                time.sleep(0.05)
        make_folder(self._folder)
        self._generation = -1
        self._open()

    def _checked(self) -> int:
        """The generation of the folder, with every file as tantivy wrote it.

        Tantivy keeps a CRC in each file but does not ask for it, and panics or finds wrong passages in a damaged one.
        Files of merges that ended after the commit are not in the record; they have as many documents.

        Raises:
            FileNotFoundError: there is no index yet.
            Damaged: it cannot be used; the message says why.
        """
        if not self._folder.is_dir() or not any(self._folder.iterdir()):
            raise FileNotFoundError(self._folder)
        try:
            record = read_record(self._record)
        except FileNotFoundError:
            raise Damaged(f"{self._record.name} is missing") from None
        if record.get("format") != FORMAT:
            raise Damaged(f"{self._record.name} has format {record.get('format')}, and today's is {FORMAT}")
        try:
            meta = json.loads((self._folder / "meta.json").read_text("utf-8"))
            json.loads((self._folder / ".managed.json").read_text("utf-8"))
            if any(meta[part] != record[part] for part in ("schema", "index_settings")):
                raise Damaged("meta.json describes another index than the one that was written")
            if (held := _documents(meta)) != record["documents"]:
                raise Damaged(f"meta.json counts {held} chunks, and {record['documents']} were written")
            for name in _files(meta):
                footer = _summed(self._folder / name)
                if footer != record["files"].get(name, footer):
                    raise Damaged(f"{name} is another file than the one that was written")
        except Damaged:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"its files cannot be read: {str(error) or type(error).__name__}") from None
        return int(record["generation"])

    def __len__(self) -> int:
        return int(self._index.searcher().num_docs)

    @property
    def generation(self) -> int:
        """The number that `commit` was last given; -1 for an index that is new."""
        return self._generation

    def clear(self) -> None:
        """Forget every chunk; the next commit has the chunks added from here on."""
        self._writer.delete_all_documents()
        self._generation = -1

    def add(self, chunk: int, collection: int, document: int, text: str, title: str) -> None:
        made = tantivy.Document()
        made.add_unsigned("chunk", chunk)
        made.add_unsigned("collection", collection)
        made.add_unsigned("document", document)
        held = {_held(collection)}
        for field, words in zip(SHARES, (stems(text), stems(title)), strict=True):
            made.add_text(field, " ".join(words))
            made.add_bytes(f"{field}_hashes", term_hashes(words))
            held |= {_held(collection, field, word) for word in words}
            held |= {_held(collection, field, bit) for bit in range(LENGTH_BITS) if len(words) >> bit & 1}
        made.add_text("held", " ".join(held))
        self._writer.add_document(made)

    def remove(self, chunks: Iterable[int]) -> None:
        """Delete the chunks added under these numbers so far."""
        waiting = iter(chunks)
        while some := [int(chunk) for chunk in islice(waiting, REMOVED_AT_ONCE)]:
            # By query: `delete_documents_by_term` makes a signed term of a number, which no unsigned field contains.
            self._writer.delete_documents_by_query(tantivy.Query.term_set_query(self._schema, "chunk", some))

    def commit(self, generation: int) -> None:
        """Make additions and deletions visible, as of that generation."""
        self._writer.commit()
        self._index.reload()
        self._totals = {}
        self._write_record(generation)
        self._generation = generation

    def _write_record(self, generation: int) -> None:
        meta: Record = json.loads((self._folder / "meta.json").read_text("utf-8"))
        files = dict[str, Record]()
        for name in _files(meta):
            try:
                files[name] = _footer(self._folder / name)[1]
            except FileNotFoundError:  # a merge ended meanwhile
                continue
        told = {"format": FORMAT, "generation": generation, "documents": _documents(meta), "files": files}
        write_record(self._record, {**told, "schema": meta["schema"], "index_settings": meta["index_settings"]})

    def search(
        self, query: str, count: int, collections: Collection[int], documents: Collection[int] | None = None,
        allowed: Bits | None = None,
    ) -> tuple[Ids, list[float]]:  # fmt: skip
        """Numbers and BM25 scores, best first; words count by how rare they are in these collections.

        `allowed`: the chunks of these collections and documents. With it the same is found, sooner where they are much
        of the index.
        """
        if not collections or (documents is not None and not documents):
            return np.zeros(0, np.int64), []
        counted = self._counted(collections)
        searcher, asked = counted.searcher, field_queries(query_terms(query), counted)
        if not any(each.weights for each in asked.values()):
            return np.zeros(0, np.int64), []
        candidates = self._candidates(searcher, asked)
        addresses = _found_anywhere(searcher, candidates, count + MARGIN, allowed)
        if addresses is None:
            must = [(tantivy.Occur.Must, candidates), (tantivy.Occur.Must, self._among("collection", collections))]
            if documents is not None:
                must.append((tantivy.Occur.Must, self._among("document", documents)))
            hits = searcher.search(tantivy.Query.boolean_query(must), count + MARGIN, count=False).hits
            addresses = [address for _, address in hits]
        ids = np.array(searcher.fast_field_values("chunk", addresses), np.int64)
        found = [searcher.doc(address) for address in addresses]
        hashes = {field: [doc[f"{field}_hashes"][0] for doc in found] for field in asked}
        return best_scored(asked, ids, hashes, count)

    def _candidates(self, searcher: tantivy.Searcher, asked: Mapping[str, FieldQuery]) -> tantivy.Query:
        """Any of the words that weigh most, with tantivy's weights, which count over the whole index, put right."""
        chosen = heaviest(asked, LOOKUP_WORDS)
        should = []
        for field, each in asked.items():
            for stem in chosen:
                if weight := each.weights.get(stem):
                    boost = weight / max(
                        inverse_document_frequency(searcher.doc_freq(field, stem), searcher.num_docs), 1e-6
                    )
                    term = tantivy.Query.term_query(self._schema, field, stem)
                    should.append((tantivy.Occur.Should, tantivy.Query.boost_query(term, boost)))
        return tantivy.Query.boolean_query(should)

    def _among(self, field: str, numbers: Collection[int]) -> tantivy.Query:
        """A filter that adds nothing to the score."""
        among = tantivy.Query.term_set_query(self._schema, field, sorted(numbers))
        return tantivy.Query.const_score_query(among, 0.0)

    def rarity(self, collections: Collection[int]) -> Callable[[str], float]:
        """Returns a stem's inverse document frequency in these collections."""
        return self._counted(collections).rarity

    def _counted(self, collections: Collection[int]) -> _Counted:
        totals = self._totals  # before the searcher, so that none is kept for longer than it is valid
        return _Counted(self._index.searcher(), collections, totals)

    def close(self) -> None:
        self._writer.wait_merging_threads()


def _found_anywhere(
    searcher: tantivy.Searcher, candidates: tantivy.Query, count: int, allowed: Bits | None
) -> list[tantivy.DocAddress] | None:
    """Returns the best `count` of the chunks that are `allowed`, without a filter by collections: tantivy goes through
    all their passages for it. None where those found are too few, and where `allowed` is little of the index.
    """
    share = 0.0 if allowed is None else float(np.bitwise_count(allowed).sum()) / max(searcher.num_docs, 1)
    if allowed is None or share < WIDE:
        return None
    wanted = math.ceil(SPARE * count / share)
    addresses = [address for _, address in searcher.search(candidates, wanted, count=False).hits]
    ids = np.array(searcher.fast_field_values("chunk", addresses), np.int64)
    held = np.append(allowed, np.uint8(0))[np.minimum(ids >> 3, len(allowed))]
    (kept,) = (held >> (ids & 7).astype(np.uint8) & 1).nonzero()
    whole = len(kept) >= count or len(addresses) < wanted
    return [addresses[at] for at in kept[:count].tolist()] if whole else None


class _Counted:
    """Counts of passages in some collections, as of one moment."""

    def __init__(self, searcher: tantivy.Searcher, collections: Collection[int], totals: dict[int, _Totals]) -> None:
        self.searcher = searcher
        self._collections = collections
        self._totals = [
            totals.get(number) or totals.setdefault(number, self._added_up(number)) for number in collections
        ]
        self._passages = sum(each.passages for each in self._totals)
        self._holding = dict[tuple[str, str], int]()

    def holding(self, stem: str, field: str = "text") -> int:
        """Passages that have a stem."""
        if (field, stem) not in self._holding:
            held = (self.searcher.doc_freq("held", _held(number, field, stem)) for number in self._collections)
            self._holding[field, stem] = sum(held)
        return self._holding[field, stem]

    def rarity(self, stem: str, field: str = "text") -> float:
        return inverse_document_frequency(self.holding(stem, field), self._passages)

    def mean_length(self, field: str) -> float:
        """Words of a passage's field."""
        return max(sum(each.words[field] for each in self._totals) / max(self._passages, 1), 1.0)

    def _added_up(self, collection: int) -> _Totals:
        def count(field: str, bit: int) -> int:
            return self.searcher.doc_freq("held", _held(collection, field, bit)) << bit

        passages = self.searcher.doc_freq("held", _held(collection))
        return _Totals(passages, {field: sum(count(field, bit) for bit in range(LENGTH_BITS)) for field in SHARES})


@dataclass(frozen=True, slots=True)
class _Totals:
    """Passages of a collection, and the words in each of their fields."""

    passages: int
    words: Mapping[str, int]


def _held(collection: int, field: str = "", what: str | int = "") -> str:
    """A term of every passage of a collection; of those with a stem in a field; of those with a bit in its length.

    Tantivy counts the passages of a term, so these are counts within a collection.
    """
    kind = "#" if isinstance(what, int) else ":"
    return f"{collection}{kind}{field}{kind}{what}"


def _documents(meta: Record) -> int:
    """The documents of an index's segments, less those deleted."""
    return sum(part["max_doc"] - (part["deletes"] or {"num_deleted_docs": 0})["num_deleted_docs"]
               for part in meta["segments"])  # fmt: skip


def _files(meta: Record) -> Iterator[str]:
    """The names of the files of an index's segments."""
    for part in meta["segments"]:
        name = part["segment_id"].replace("-", "")
        yield from (f"{name}.{kind}" for kind in _PARTS_OF_SEGMENT)
        if part["deletes"]:
            yield f"{name}.{part['deletes']['opstamp']}.del"


def _footer(path: Path) -> tuple[int, Record]:
    """Bytes of a file before its footer, and the footer: the version that wrote it, and the CRC of those bytes.

    Raises:
        OSError: it cannot be read.
        Damaged: there is no such footer.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _MAX_FOOTER_LENGTH))
        end = file.read()
    length = int.from_bytes(end[-_FOOTER:-4], "little")
    try:
        if end[-4:] != _MAGIC or not 0 < length <= len(end) - _FOOTER:
            raise ValueError
        footer: Record = json.loads(end[-_FOOTER - length : -_FOOTER])
        if not all(isinstance(footer["version"][part], int) for part in _VERSION) or not isinstance(footer["crc"], int):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise Damaged(f"{path.name} has no footer") from None
    return size - _FOOTER - length, footer


def _summed(path: Path) -> Record:
    """The footer of a file that has the CRC which stands there.

    Raises:
        OSError: it cannot be read.
        Damaged: it has another one.
    """
    left, footer = _footer(path)
    crc = 0
    with path.open("rb") as file:
        while left and (data := file.read(min(left, _READ))):
            crc, left = zlib.crc32(data, crc), left - len(data)
    if crc != footer["crc"]:
        raise Damaged(f"{path.name} does not match its checksum")
    return footer
