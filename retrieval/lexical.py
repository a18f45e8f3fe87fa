"""The lexical index: BM25 by tantivy over the chunks' words, identifiers also in their parts.

`parseHttpHeader`, `parse_http_header` and `parse-http-header` all match "http header". Collections and documents are
terms too, so a search never looks at what its user may not read. Not safe in threads for writing: `views` guards it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import tantivy

from retrieval.dense import Ids

FORMAT = 1  # goes up when what is indexed changes: the index is then made anew
MEMORY = 64 << 20  # bytes that the writer buffers
MOST_WORDS = 12  # different words of a query that are looked up: the rarest, which find nearly all there is

_WORD = re.compile(r"[^\W_]+(?:[_'’.-][^\W_]+)*")
_PARTS = re.compile(r"[A-Z]+(?![a-zà-þ])|[A-ZÀ-Þ]?[a-zà-þß]+|\d+|[^\W\d_]+")


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


def stems(text: str) -> list[str]:
    """The words of a text as they are indexed."""
    return list(_ALL.analyze(" ".join(terms(text))))


def content(text: str) -> list[str]:
    """The same without those that say nothing alone."""
    return list(_CONTENT.analyze(" ".join(terms(text))))


class LexicalIndex:
    """A folder of tantivy's."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        builder = tantivy.SchemaBuilder()
        builder.add_unsigned_field("chunk", stored=True, indexed=True, fast=True)
        builder.add_unsigned_field("collection", indexed=True)
        builder.add_unsigned_field("document", indexed=True)
        builder.add_text_field("text", tokenizer_name="ponder")
        builder.add_text_field("title", tokenizer_name="ponder")
        self._schema = builder.build()
        self._index = tantivy.Index(self._schema, path=str(folder))
        self._index.register_tokenizer("ponder", _ALL)
        self._writer = self._index.writer(MEMORY, 1)

    def __len__(self) -> int:
        return int(self._index.searcher().num_docs)

    @property
    def generation(self) -> int:
        """What `commit` was last told; -1 for a folder that never was, or of another format."""
        try:
            held = json.loads((self._folder / "generation.json").read_text("utf-8"))
        except (OSError, ValueError):
            return -1
        return int(held["generation"]) if held.get("format") == FORMAT else -1

    def clear(self) -> None:
        self._writer.delete_all_documents()

    def add(self, chunk: int, collection: int, document: int, text: str, title: str) -> None:
        made = tantivy.Document()
        made.add_unsigned("chunk", chunk)
        made.add_unsigned("collection", collection)
        made.add_unsigned("document", document)
        made.add_text("text", " ".join(terms(text)))
        made.add_text("title", " ".join(terms(title)))
        self._writer.add_document(made)

    def remove(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self._writer.delete_documents_by_term("chunk", int(chunk))

    def commit(self, generation: int) -> None:
        """Make what was added and removed visible, as of that generation."""
        self._writer.commit()
        self._index.reload()
        path = self._folder / "generation.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"format": FORMAT, "generation": generation}), "utf-8")
        os.replace(partial, path)

    def search(
        self, query: str, count: int, collections: Collection[int], documents: Collection[int] | None = None
    ) -> tuple[Ids, list[float]]:
        """Numbers and BM25 scores, best first."""
        wanted = self._query(query)
        if wanted is None or not collections or (documents is not None and not documents):
            return np.zeros(0, np.int64), []
        must = [(tantivy.Occur.Must, wanted), (tantivy.Occur.Must, self._among("collection", collections))]
        if documents is not None:
            must.append((tantivy.Occur.Must, self._among("document", documents)))
        searcher = self._index.searcher()
        hits = searcher.search(tantivy.Query.boolean_query(must), count, count=False).hits
        ids = [searcher.doc(address)["chunk"][0] for _, address in hits]
        return np.array(ids, np.int64), [score for score, _ in hits]

    def _query(self, query: str) -> tantivy.Query | None:
        stemmed = set(content(query)) or set(stems(query))
        if not stemmed:
            return None
        should = []
        for stem in sorted(stemmed, key=lambda stem: (-self.rarity(stem), stem))[:MOST_WORDS]:
            should.append((tantivy.Occur.Should, tantivy.Query.term_query(self._schema, "text", stem)))
            in_title = tantivy.Query.term_query(self._schema, "title", stem)
            should.append((tantivy.Occur.Should, tantivy.Query.boost_query(in_title, 0.5)))
        return tantivy.Query.boolean_query(should)

    def _among(self, field: str, numbers: Collection[int]) -> tantivy.Query:
        """A filter that adds nothing to the score."""
        among = tantivy.Query.term_set_query(self._schema, field, sorted(numbers))
        return tantivy.Query.const_score_query(among, 0.0)

    def rarity(self, stem: str) -> float:
        """How much a stem tells: its inverse document frequency over all chunks."""
        searcher = self._index.searcher()
        holding = searcher.doc_freq("text", stem)
        return math.log(1 + (searcher.num_docs - holding + 0.5) / (holding + 0.5))

    def close(self) -> None:
        self._writer.wait_merging_threads()
