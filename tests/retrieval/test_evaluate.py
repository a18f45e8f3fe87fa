"""Judging a search: the measures by hand, whole judged sets, and folders that are none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from retrieval.judged_search import BadSet, ndcg, read, recall, reciprocal_rank, run
from tests.known_answers import shared
from tests.retrieval.words import WordEmbedder


def test_the_measures_are_those_of_trec_eval() -> None:
    grades = {"a": 2, "b": 1, "c": 0, "d": 1}
    ranking = ["c", "b", "x", "a"]
    ideal = 2 + 1 / math.log2(3) + 1 / 2
    assert ndcg(ranking, grades, 10) == pytest.approx((1 / math.log2(3) + 2 / math.log2(5)) / ideal)
    assert ndcg(ranking, grades, 1) == 0.0 and ndcg(["a", "b", "d"], grades, 10) == pytest.approx(1.0)
    assert recall(ranking, grades, 2) == pytest.approx(1 / 3) and recall(ranking, grades, 4) == pytest.approx(2 / 3)
    assert reciprocal_rank(ranking, grades, 10) == 0.5 and reciprocal_rank(ranking, grades, 1) == 0.0


@pytest.fixture
def judged(tmp_path: Path) -> Path:
    """Two documents that answer a question each, and one that answers none."""
    corpus = [
        {"_id": "d1", "title": "Dams", "text": "The dam of Orsk was finished in 1931."},
        {"_id": "d2", "title": "", "text": "A green lake lies behind the hills."},
        {"_id": "d3", "title": "Trains", "text": "The railway is slow."},
    ]
    queries = [{"_id": "q1", "text": "when was the dam finished"}, {"_id": "q2", "text": "where is the green lake"}]
    for name, lines in (("corpus", corpus), ("queries", queries)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t2\nq2\td3\t0\n")
    return tmp_path


def test_a_judged_set_is_indexed_searched_and_measured(judged: Path) -> None:
    told = list[tuple[int, int]]()
    quality = run(judged, embedder=WordEmbedder(), progress=lambda done, total: told.append((done, total)))
    assert (quality.queries, quality.ndcg_10, quality.mrr_10, quality.recall[100]) == (2, 1.0, 1.0, 1.0)
    assert told[-1] == (3, 3) and 0 < quality.p50_ms <= quality.p99_ms


def test_a_document_asks_for_the_others_that_answer_the_same_question(judged: Path) -> None:
    (judged / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t2\nq2\td3\t1\n")
    made = read(judged).asked_by_document(least=2)
    assert made.asked == ["q2"]
    chosen = made.omitted["q2"]
    (other,) = {"d2", "d3"} - {chosen}
    assert made.queries["q2"] == made.corpus[chosen][1] and set(made.grades["q2"]) == {other}
    with (judged / "corpus.jsonl").open("a") as corpus, (judged / "qrels/test.tsv").open("a") as grades:
        for name in ("d4", "d5"):
            corpus.write(json.dumps({"_id": name, "text": "A green lake lies behind the hills."}) + "\n")
            grades.write(f"q2\t{name}\t1\n")
    found = run(judged, embedder=WordEmbedder(), by_document=True)
    assert found.queries == 1 and found.ndcg_10 == 1.0  # were it found itself, it would stand before the others


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("corpus.jsonl", "corpus.jsonl"), ("queries.jsonl", "queries.jsonl"), ("qrels/test.tsv", "tsv"),
    ],
)  # fmt: skip
def test_a_folder_that_lacks_a_part_is_refused_by_its_name(judged: Path, broken: str, said: str) -> None:
    (judged / broken).unlink()
    with pytest.raises(BadSet, match=said):
        read(judged)


def test_a_set_whose_judgements_name_no_query_is_refused(judged: Path) -> None:
    (judged / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq9\td1\t1\n")
    with pytest.raises(BadSet, match="No query"):
        run(judged, embedder=WordEmbedder())


@pytest.mark.slow
def test_bm25_alone_keeps_its_known_quality() -> None:
    folder = shared("retrieval/cranfield")
    quality = run(folder, embedder=WordEmbedder(), dense_share=0.0)
    assert quality.queries == 225
    assert quality.ndcg_10 >= 0.40 and quality.recall[100] >= 0.73  # the reference's BM25 has .404 and .738
