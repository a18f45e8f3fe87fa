"""Measures a search on a judged set in the layout of BEIR: nDCG@10, recall@k, MRR@10 and latency.

A folder with `corpus.jsonl` (`_id`, `title`, `text`), `queries.jsonl` (`_id`, `text`) and `qrels/*.tsv` (query,
document, grade). The measures are those of trec_eval: gain is the grade, discount log2(rank + 1).
"""

from __future__ import annotations

import csv
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from retrieval.embedding import Embedder
from retrieval.index.hybrid import DENSE_SHARE, MAX_QUERY_LENGTH, Query
from retrieval.index.publish import Text
from retrieval.library import Library

RECALL_AT = (5, 10, 100)
USER = "judge"


class BadSet(Exception):
    """A folder that is no judged set; the message names the missing part."""


@dataclass(frozen=True, slots=True)
class Judged:
    """`grades[query][document]`; a document that is not in it is not relevant."""

    corpus: Mapping[str, tuple[str, str]]  # title and text
    queries: Mapping[str, str]
    grades: Mapping[str, Mapping[str, int]]
    omitted: Mapping[str, str] = field(default_factory=dict)  # of some queries, a document that is not searched

    @property
    def asked(self) -> list[str]:
        """The queries that have a relevant document."""
        return [query for query, grades in self.grades.items() if query in self.queries and max(grades.values()) > 0]

    def asked_by_document(self, least: int = 4) -> Judged:
        """Returns long questions: for each query with at least `least` relevant documents, the text of one of them,
        chosen by chance, which is to find the others."""
        rng = random.Random("long questions")
        queries, grades, omitted = dict[str, str](), dict[str, Mapping[str, int]](), dict[str, str]()
        for query in self.asked:
            relevant = sorted(one for one, grade in self.grades[query].items() if grade > 0 and one in self.corpus)
            if len(relevant) >= least:
                omitted[query] = rng.choice(relevant)
                queries[query] = self.corpus[omitted[query]][1]
                grades[query] = {one: g for one, g in self.grades[query].items() if one != omitted[query]}
        return replace(self, queries=queries, grades=grades, omitted=omitted)


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over the queries that have a relevant document."""

    queries: int
    ndcg_10: float
    mrr_10: float
    recall: Mapping[int, float]
    p50_ms: float
    p99_ms: float


def read(folder: Path, split: str | None = None) -> Judged:
    """
    Raises:
        BadSet: a file is missing or not as it should be.
    """
    try:
        corpus = {one["_id"]: (one.get("title", ""), one["text"]) for one in _lines(folder / "corpus.jsonl")}
        queries = {one["_id"]: one["text"] for one in _lines(folder / "queries.jsonl")}
        files = sorted((folder / "qrels").glob(f"{split or '*'}.tsv"))
        if not files:
            raise BadSet(f"There is no {split or '*'}.tsv in {folder / 'qrels'}: lines of query, document and grade.")
        chosen = next((file for file in files if file.stem == "test"), files[0])
        grades: dict[str, dict[str, int]] = {}
        with chosen.open(encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.reader(file, delimiter="\t")):
                if number == 0 and not row[-1].lstrip("-").isdigit():
                    continue
                grades.setdefault(row[0], {})[row[-2]] = int(row[-1])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise BadSet(f"{folder} is no set in the layout of BEIR: {type(error).__name__}: {error}") from None
    return Judged(corpus, queries, grades)


def _lines(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.strip())


def measure(judged: Judged, rankings: Mapping[str, Sequence[str]], seconds: Sequence[float]) -> Quality:
    """`rankings` are the documents found for each query, best first; `seconds` the duration of each search."""
    asked = judged.asked
    if not asked:
        raise BadSet("No query has a relevant document.")
    p50, p99 = np.percentile(seconds or [0.0], (50, 99)) * 1e3
    return Quality(
        len(asked),
        statistics.fmean(ndcg(rankings.get(query, ()), judged.grades[query], 10) for query in asked),
        statistics.fmean(reciprocal_rank(rankings.get(query, ()), judged.grades[query], 10) for query in asked),
        {
            k: statistics.fmean(recall(rankings.get(query, ()), judged.grades[query], k) for query in asked)
            for k in RECALL_AT
        },
        float(p50),
        float(p99),
    )


def run(
    folder: Path,
    *,
    split: str | None = None,
    rerank: bool = False,
    dense_share: float = DENSE_SHARE,
    by_document: bool = False,
    embedder: Embedder | None = None,
    workplace: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Quality:
    """Index the corpus of a judged set and search for its queries, one at a time. `progress` hears of documents.

    The index is made in `workplace`, or in a folder that is deleted afterwards. `by_document` asks as
    `Judged.asked_by_document` says.

    Raises:
        BadSet: as `read`.
    """
    judged = read(folder, split)
    if by_document:
        judged = judged.asked_by_document()
    with TemporaryDirectory() as temporary, Library.open(workplace or Path(temporary), embedder) as library:
        mine = library.collection(USER)
        if not mine.documents:
            texts = [Text(source, text, title) for source, (title, text) in judged.corpus.items() if text or title]
            tell = progress or (lambda done, total: None)
            library.publisher.add(USER, mine.id, texts, lambda done: tell(done, len(texts)))
        rankings, seconds = dict[str, list[str]](), list[float]()
        for query in judged.asked:
            began = time.perf_counter()
            rankings[query] = _ranking(library, judged, query, rerank, dense_share)
            seconds.append(time.perf_counter() - began)
    return measure(judged, rankings, seconds)


def _ranking(library: Library, judged: Judged, asked: str, rerank: bool, dense_share: float) -> list[str]:
    """Documents by their best chunk. Copies are shown: a judged set may rate both as relevant."""
    query = Query(
        USER, judged.queries[asked][:MAX_QUERY_LENGTH], 3 * max(RECALL_AT), rerank=rerank, repeats=True,
        dense_share=dense_share, filters={"source": {"ne": judged.omitted[asked]}} if asked in judged.omitted else None,
    )  # fmt: skip
    return list(dict.fromkeys(hit.passage.source for hit in library.search(query).hits))


def ndcg(ranking: Sequence[str], grades: Mapping[str, int], k: int) -> float:
    gained = sum(max(0, grades.get(one, 0)) / math.log2(rank + 1) for rank, one in enumerate(ranking[:k], 1))
    ideal = sorted((grade for grade in grades.values() if grade > 0), reverse=True)[:k]
    return gained / sum(grade / math.log2(rank + 1) for rank, grade in enumerate(ideal, 1))


def recall(ranking: Sequence[str], grades: Mapping[str, int], k: int) -> float:
    relevant = {one for one, grade in grades.items() if grade > 0}
    return len(relevant & set(ranking[:k])) / len(relevant)


def reciprocal_rank(ranking: Sequence[str], grades: Mapping[str, int], k: int) -> float:
    return next((1 / rank for rank, one in enumerate(ranking[:k], 1) if grades.get(one, 0) > 0), 0.0)
