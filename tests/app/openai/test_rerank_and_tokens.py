"""`/v1/rerank`, `/v1/tokenize` and `/v1/detokenize`."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from retrieval.index.hybrid import max_sim
from tests.app.gate import GatedEmbedder
from tests.app.library import BEES, DAM, error

QUERY = "When was the dam finished?"


def post(client: httpx.Client, path: str, **body: Any) -> httpx.Response:
    return client.post(f"/v1/{path}", json=body)


def test_documents_come_in_the_order_of_their_relevance(ana: httpx.Client, embedder: GatedEmbedder) -> None:
    reply = post(ana, "rerank", model="default", query=QUERY, documents=[BEES, {"text": DAM}]).json()
    expected = max_sim(embedder, QUERY, [BEES, DAM])
    found = {one["index"]: one["relevance_score"] for one in reply["results"]}
    assert found == pytest.approx(dict(enumerate(expected)))
    assert [one["index"] for one in reply["results"]] == sorted((0, 1), key=lambda at: -expected[at])
    assert reply["model"] == embedder.name and "document" not in reply["results"][0]
    pieces = sum(map(len, embedder.pieces([QUERY, BEES, DAM])))
    assert reply["usage"]["total_tokens"] == pieces


def test_the_best_are_returned_with_their_text(ana: httpx.Client) -> None:
    (only,) = post(ana, "rerank", query=DAM, documents=[BEES, DAM], top_n=1, return_documents=True).json()["results"]
    assert only["index"] == 1 and only["document"] == {"text": DAM}
    assert only["relevance_score"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": []}, "documents"), ({"documents": ["a", " "]}, "documents"), ({"documents": "a"}, "documents"),
        ({"documents": [{"text": "a", "title": "b"}]}, "documents"), ({"query": ""}, "query"), ({"top_n": 0}, "top_n"),
        ({"documents": ["a"] * 1001}, "documents"), ({"max_chunks_per_doc": 3}, "max_chunks_per_doc"),
        ({"query": "q" * 4001}, "query"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_bad_rerank_is_refused_by_name(ana: httpx.Client, body: dict[str, Any], param: str) -> None:
    reply = post(ana, "rerank", **{"query": "q", "documents": ["a"], **body})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_a_rerank_by_another_model_is_refused(ana: httpx.Client) -> None:
    reply = post(ana, "rerank", model="rerank-v3.5", query="q", documents=["a"])
    assert "rerank-v3.5" in error(reply, 404, "model_not_found", "model")


def test_a_text_goes_to_tokens_and_back(ana: httpx.Client) -> None:
    text = "Bees — 蜂 — count <|im_end|> as text?"
    made = post(ana, "tokenize", prompt=text, return_token_strs=True).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) > 0 and made["max_model_len"] > 0
    assert post(ana, "detokenize", tokens=made["tokens"]).json() == {"prompt": text}


def test_messages_make_the_prompt_of_a_chat(ana: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    made = post(ana, "tokenize", messages=messages).json()
    chat = post(ana, "chat/completions", model="default", messages=messages, max_tokens=1).json()
    assert made["count"] == chat["usage"]["prompt_tokens"] and made["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"), ("tokenize", {"prompt": "a", "messages": [{"role": "user"}]}, "prompt"),
        ("tokenize", {"prompt": 3}, "prompt"), ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"messages": [{"role": "x", "content": [{"type": "image"}]}]}, "messages"),
        ("tokenize", {"prompt": "a", "tools": []}, "tools"), ("tokenize", {"prompt": "a", "stream": True}, "stream"),
        ("detokenize", {"tokens": [1, 10**9]}, "tokens"), ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": "a"}, "tokens"), ("detokenize", {}, "tokens"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_bad_tokens_are_refused_by_name(ana: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    reply = post(ana, path, **body)
    assert reply.status_code == 400 and reply.json()["error"]["param"].startswith(param)
