"""`POST /api/search`: passages with their places, and no body that makes it fail."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.app.library import BEES, DAM, add, error, search

_scalar = st.text(max_size=6) | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()
_json = st.recursive(
    st.none() | _scalar,
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=6), some, max_size=3),
)
_operators = st.sampled_from(["eq", "ne", "gt", "gte", "lt", "lte", "in", "x"])
_filters = st.dictionaries(
    st.sampled_from(["document", "title", "year", "created_at"]) | st.text(max_size=6),
    _scalar | st.dictionaries(_operators, _scalar | st.lists(_scalar, max_size=3), max_size=3) | _json,
    max_size=3,
)


def test_a_passage_has_its_place(ana: httpx.Client) -> None:
    document = add(ana, "dam.md", f"# The dam\n\n{DAM}", metadata={"year": 1931})
    (hit,) = search(ana, "When was the dam finished?")
    span = hit["span"]
    text = ana.get(f"/api/documents/{document['id']}/text?start={span['start']}&end={span['end']}").json()["text"]
    assert text == hit["text"] and DAM in text and span["page"] is None
    assert hit["document"] == {name: document[name] for name in ("id", "title", "source", "collection")}
    assert hit["score"] > 0 and hit["scores"]["dense"] > 0 and hit["scores"]["lexical"] > 0
    assert hit["scores"]["rerank"] is None and hit["metadata"] == {"year": 1931}
    assert hit["scores"]["cosine"] == pytest.approx(hit["scores"]["dense"], abs=2e-3)


def test_the_better_passage_comes_first(ana: httpx.Client) -> None:
    add(ana, "dam.txt", DAM)
    add(ana, "bees.txt", BEES)
    assert [hit["text"] for hit in search(ana, "how bees dance")] == [BEES, DAM]
    assert [hit["text"] for hit in search(ana, "how bees dance", limit=1)] == [BEES]


def test_rerank_adds_its_score(ana: httpx.Client) -> None:
    add(ana, "dam.txt", DAM)
    reply = ana.post("/api/search", json={"query": "granite", "rerank": True}).json()
    assert reply["passages"][0]["scores"]["rerank"] > 0 and "rerank" in reply["seconds"]


def test_the_served_model_can_be_the_judge(ana: httpx.Client) -> None:
    add(ana, "dam.txt", DAM)
    add(ana, "bees.txt", BEES)
    plain = {hit["text"]: hit["scores"]["rerank"] for hit in search(ana, "granite dance", rerank=True)}
    judged = {hit["text"]: hit["scores"]["rerank"] for hit in search(ana, "granite dance", rerank="model")}
    assert judged.keys() == plain.keys() == {DAM, BEES}
    assert all(score is not None and score != plain[text] for text, score in judged.items())
    again = {hit["text"]: hit["scores"]["rerank"] for hit in search(ana, "granite dance", rerank="model")}
    assert again == pytest.approx(judged, abs=1e-3)


def test_filters_and_collections_narrow_it(ana: httpx.Client) -> None:
    work = ana.post("/api/collections", json={"name": "Work"}).json()["id"]
    add(ana, "dam.txt", DAM, metadata={"year": 1931}, collection=work)
    add(ana, "bees.txt", BEES, metadata={"year": 2020})
    assert [hit["text"] for hit in search(ana, "dam bees", filters={"year": {"gte": 2000}})] == [BEES]
    assert [hit["text"] for hit in search(ana, "dam bees", collections=[work])] == [DAM]
    assert search(ana, "dam bees", filters={"year": {"in": [1, 2]}}) == []


def test_nulls_are_absent(ana: httpx.Client) -> None:
    add(ana, "dam.txt", DAM)
    assert search(ana, "dam", limit=None, filters=None, collections=None, rerank=None)


def test_nobody_finds_anothers_documents(ana: httpx.Client, bob: httpx.Client) -> None:
    add(ana, "dam.txt", DAM)
    assert search(bob, "granite dam") == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "query"), ({"query": ""}, "query"), ({"query": " \n"}, "query"), ({"query": 3}, "query"),
        ({"query": "x", "limit": 0}, "limit"), ({"query": "x", "limit": 1001}, "limit"),
        ({"query": "x", "limit": 1.0}, "limit"), ({"query": "x", "rerank": "yes"}, "rerank"),
        ({"query": "x", "filters": []}, "filters"), ({"query": "x", "filters": {"a": {"like": "b"}}}, "filters"),
        ({"query": "x", "filters": {"a": None}}, "filters"), ({"query": "x", "filters": {"a": 10**30}}, "filters"),
        ({"query": "x", "filters": {"a": {"in": list(range(1001))}}}, "filters"),
        ({"query": "x", "filters": {str(n): 1 for n in range(21)}}, "filters"),
        ({"query": "x", "collections": 1}, "collections"), ({"query": "x", "k": 3}, "k"),
        ({"query": "x", "user": "y"}, "user"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_bad_search_is_refused_by_name(ana: httpx.Client, body: dict[str, Any], param: str) -> None:
    reply = ana.post("/api/search", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_a_query_of_100_kb_says_what_would_be_accepted(ana: httpx.Client) -> None:
    message = error(ana.post("/api/search", json={"query": "dam " * 25_000}), 400, "invalid_query", "query")
    assert "99,999" in message and "4,000" in message


def test_a_collection_that_is_not_there_is_not_found(ana: httpx.Client) -> None:
    for number in (999_999, -1, 10**30):
        error(ana.post("/api/search", json={"query": "x", "collections": [number]}), 404, "not_found")


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(filters=_filters)
def test_no_filter_makes_the_server_fail(ana: httpx.Client, filters: dict[str, Any]) -> None:
    reply = ana.post("/api/search", json={"query": "dam", "filters": filters})
    assert reply.status_code in (200, 400), (reply.text, filters)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(query=st.text(max_size=60) | st.text('"()+-:^~*\\/[]{}AND OR NOT', max_size=30))
def test_no_query_makes_the_server_fail(ana: httpx.Client, query: str) -> None:
    reply = ana.post("/api/search", json={"query": query})
    assert reply.status_code in (200, 400), (reply.text, query)
