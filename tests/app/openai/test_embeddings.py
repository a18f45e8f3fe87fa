"""`/v1/embeddings`, as the official client sees it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from app.openai.embeddings import BATCH, MAX_LENGTH
from tests.app.conftest import Server
from tests.app.gate import HELD, GatedEmbedder
from tests.app.library import BEES, DAM, error


@pytest.fixture(scope="module")
def embeds(shelf: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shelf.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_texts_become_vectors_of_length_one(embeds: openai.OpenAI, embedder: GatedEmbedder) -> None:
    reply = embeds.embeddings.create(model="default", input=[DAM, BEES])
    assert (reply.object, reply.model) == ("list", embedder.name) and [d.index for d in reply.data] == [0, 1]
    assert np.allclose([d.embedding for d in reply.data], embedder.embed([DAM, BEES]), atol=1e-7)
    pieces = sum(map(len, embedder.pieces([DAM, BEES])))
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == pieces


def test_numbers_and_base64_say_the_same(embeds: openai.OpenAI, ana: httpx.Client) -> None:
    decoded = embeds.embeddings.create(model="default", input=DAM).data[0].embedding  # the client asks for base64
    plain = ana.post("/v1/embeddings", json={"model": "default", "input": DAM}).json()["data"][0]["embedding"]
    assert np.array_equal(np.array(decoded, np.float32), np.array(plain, np.float32))


def test_the_embedder_answers_to_its_name(embeds: openai.OpenAI, embedder: GatedEmbedder) -> None:
    assert embeds.embeddings.create(model=embedder.name, input="x", user="me").model == embedder.name
    with pytest.raises(openai.NotFoundError, match=embedder.name):
        embeds.embeddings.create(model="text-embedding-3-small", input="x")


def test_fewer_dimensions_are_cut_and_made_length_one_again(embeds: openai.OpenAI) -> None:
    whole = np.array(embeds.embeddings.create(model="default", input=DAM).data[0].embedding)
    cut = np.array(embeds.embeddings.create(model="default", input=DAM, dimensions=5).data[0].embedding)
    assert np.allclose(cut, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)


def test_many_texts_keep_their_order(embeds: openai.OpenAI, embedder: GatedEmbedder) -> None:
    texts = [f"number {n}" for n in range(2 * BATCH + 3)]
    made = [d.embedding for d in embeds.embeddings.create(model="default", input=texts).data]
    assert np.allclose(made, embedder.embed(texts), atol=1e-7)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"), ({"input": ""}, "input"), ({"input": []}, "input"), ({"input": ["a", ""]}, "input"),
        ({"input": [1, 2]}, "input"), ({"input": [[1], [2]]}, "input"), ({"input": ["x"] * 2049}, "input"),
        ({"input": [None]}, "input"), ({"input": {"a": 1}}, "input"), ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 65}, "dimensions"), ({"input": "x", "model": 3}, "model"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "store": True}, "store"), ({"input": "x", "truncate": 3}, "truncate"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_bad_request_is_refused_by_name(ana: httpx.Client, body: dict[str, Any], param: str) -> None:
    reply = ana.post("/v1/embeddings", json={"model": "default", **body})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


@pytest.mark.parametrize("ids", [[1, 2, 3], [[1, 2], [3]]])
def test_token_ids_are_refused_with_the_reason(ana: httpx.Client, ids: Any) -> None:
    reply = ana.post("/v1/embeddings", json={"model": "default", "input": ids})
    message = error(reply, 400, "invalid_value", "input")
    assert "token ids" in message and "check_embedding_ctx_length=False" in message and "embedding_token_ids" in message


@pytest.fixture
def own(shelf: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    state = shelf.app.state.ponder
    monkeypatch.setattr(state, "settings", state.settings.model_copy(update={"embedding_token_ids": "own"}))


@pytest.mark.usefixtures("own")
def test_own_token_ids_are_their_text(embeds: openai.OpenAI, embedder: GatedEmbedder) -> None:
    """The tokenizer of this embedder has ASCII's characters as tokens."""
    one = embeds.embeddings.create(model="default", input=list(DAM.encode())).data[0].embedding
    two = embeds.embeddings.create(model="default", input=[list(BEES.encode()), list(DAM.encode())]).data
    assert np.allclose([one, *(each.embedding for each in two)], embedder.embed([DAM, BEES, DAM]), atol=1e-7)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("ids", "says", "code"),
    [
        ([65, 256], "input[0] has the token id 256, which is not of the tokenizer of 'words-64'; accepted: its ids, "
         "from 0 to 255", "invalid_value"),
        ([[65], [-1]], "input[1] has the token id -1", "invalid_value"),
        ([[65], [65, 200]], "input[1] has token ids that the tokenizer of 'words-64' makes of no text",
         "invalid_value"),
        ([[65], []], "input[1] is []", "invalid_value"), ([65, "b"], "input[0] is [65, 'b']", "invalid_value"),
        ([[65], "b"], "input[1] is 'b'", "invalid_value"), ([True], "input[0] is [True]", "invalid_value"),
        ([[1.5]], "input[0] is [1.5]", "invalid_value"), ([[65]] * 2049, "a list of 2049", "invalid_value"),
        ([65] * (MAX_LENGTH + 1), f"at most {MAX_LENGTH}", "context_length_exceeded"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_token_ids_that_are_not_its_own_are_refused(ana: httpx.Client, ids: Any, says: str, code: str) -> None:
    reply = ana.post("/v1/embeddings", json={"model": "default", "input": ids})
    assert says in error(reply, 400, code, "input")


def test_a_text_that_is_too_long_is_refused_with_its_length(ana: httpx.Client) -> None:
    reply = ana.post("/v1/embeddings", json={"model": "default", "input": ["fine", "x " * (MAX_LENGTH + 1)]})
    message = error(reply, 400, "context_length_exceeded", "input")
    assert "input[1]" in message and str(MAX_LENGTH + 1) in message and str(MAX_LENGTH) in message


def test_a_client_that_leaves_is_not_worked_for(shelf: Server, embedder: GatedEmbedder) -> None:
    texts = ", ".join(f'"{HELD} {n}"' for n in range(20 * BATCH))
    body = f'{{"model": "default", "input": [{texts}]}}'.encode()
    host, port = shelf.url.removeprefix("http://").split(":")
    embedder.gate.clear()
    before = embedder.embedded
    try:
        with socket.create_connection((host, int(port)), 20) as connection:
            head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            assert embedder.waiting.wait(20)
        # The server hears of the end before the gate opens: it answers on its one loop, in order.
        assert httpx.get(f"{shelf.url}/health").status_code == 200
        assert httpx.get(f"{shelf.url}/health").status_code == 200
    finally:
        embedder.gate.set()
    httpx.post(f"{shelf.url}/v1/embeddings", json={"model": "default", "input": "x"}, timeout=20)
    assert embedder.embedded - before < 3 * BATCH
