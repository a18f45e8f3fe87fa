"""Chats that go on past the model's context, in the page and over the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.params import StreamingWindow
from tests.app.chatting import ask, begun_elsewhere, imported, log_of, new_chat, read
from tests.app.conftest import Server, serving

CONTEXT = 256
LONG = " ".join(f"word{at}" for at in range(12))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("data")
    with serving(model, data, context_shift=True, max_model_len=CONTEXT) as started:
        yield started


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def answered(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    reply = http.post("/v1/chat/completions", json={"model": "default", "temperature": 0, "max_tokens": 8, **fields})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def turns(count: int) -> list[dict[str, str]]:
    said = [{"role": ("user", "assistant")[at % 2], "content": f"{at}: {LONG}"} for at in range(2 * count - 1)]
    return [{"role": "system", "content": "Be brief."}, *said]


def test_a_chat_goes_on_past_the_context_and_says_what_is_forgotten(http: httpx.Client, server: Server) -> None:
    chat, questions, answers = new_chat(http), list[str](), list[dict[str, Any]]()
    while len(answers) < 2 or answers[-2]["usage"]["forgotten_tokens"] == 0:
        answers.append(ask(http, chat, f"question {len(answers)}: {LONG}", max_tokens=4))
        assert answers[-1]["status"] == "completed", answers[-1]
        assert len(answers) < 12, "the chat has passed its context, and nothing is forgotten"
        questions.append(answers[-1]["parent_id"])
    first, *_, last = answers
    assert first["usage"]["forgotten_tokens"] == 0 and first["usage"]["seen_from"] is None
    assert last["usage"]["prompt_tokens"] > CONTEXT
    assert last["usage"]["seen_from"] in questions[1:]
    shown = {each["id"]: each for each in read(http, chat)["messages"]}
    assert shown[last["id"]]["usage"] == last["usage"]  # after a reload, too
    ended = log_of(http, last["run_id"])[-1]
    assert ended["type"] == "run.completed" and ended["usage"] == last["usage"]
    assert server.stats().blocks_used <= CONTEXT // 16


def test_an_exported_chat_says_it_of_its_own_messages(http: httpx.Client) -> None:
    chat = new_chat(http)
    for at in range(8):
        last = ask(http, chat, f"question {at}: {LONG}", max_tokens=4)
    assert last["usage"]["seen_from"] is not None
    exported = begun_elsewhere(http.get("/api/chats/export").json())
    exported["chats"] = [each for each in exported["chats"] if any(m["id"] == last["id"] for m in each["messages"])]
    (made,) = imported(http, exported)
    copied = read(http, made)["messages"]
    assert copied[-1]["usage"]["seen_from"] in {each["id"] for each in copied if each["role"] == "user"}


def test_the_api_shifts_where_it_is_asked_to(http: httpx.Client) -> None:
    long = turns(9)
    refused = http.post("/v1/chat/completions", json={"model": "default", "messages": long})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    reply = answered(http, messages=long, context_shift=True)
    context = reply["usage"]["context"]
    assert reply["usage"]["prompt_tokens"] > CONTEXT and context["window_tokens"] == CONTEXT
    assert reply["usage"]["prompt_tokens"] - CONTEXT < context["forgotten_tokens"] < reply["usage"]["prompt_tokens"]
    short = answered(http, messages=turns(1), context_shift=True)
    assert short["usage"]["context"] == {"window_tokens": CONTEXT, "forgotten_tokens": 0}
    assert "context" not in answered(http, messages=turns(1))["usage"]


def test_an_answer_may_be_longer_than_the_context(http: httpx.Client) -> None:
    fields = {"messages": turns(1), "max_tokens": 3 * CONTEXT, "ignore_eos": True, "temperature": 1.0, "seed": 1}
    usage = answered(http, **fields, context_shift=True)["usage"]
    assert usage["completion_tokens"] == 3 * CONTEXT and usage["context"]["forgotten_tokens"] > CONTEXT


def test_the_system_prompt_is_never_forgotten(
    http: httpx.Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[tuple[list[int], StreamingWindow]]()
    real = server.engine.open

    async def watched(tokens: list[int], **options: Any) -> Any:  # Any: those of `Engine.open`
        opened.append((tokens, options["streaming"]))
        return await real(tokens, **options)

    monkeypatch.setattr(server.engine, "open", watched)
    answered(http, messages=turns(9), context_shift=True)
    answered(http, messages=turns(1), context_shift=True)
    (tokens, window), (_, none) = opened
    kept = server.engine.tokenizer.decode(tokens[: window.sinks])
    assert "Be brief." in kept and "1:" not in kept  # up to the end of a block
    assert window.total <= CONTEXT and none is None  # one that fits is no endless sequence


def test_what_cannot_be_endless_is_refused(http: httpx.Client) -> None:
    def refusal(**fields: Any) -> str:
        asked = {"model": "default", "messages": turns(1), "context_shift": True, **fields}
        reply = http.post("/v1/chat/completions", json=asked)
        assert reply.status_code == 400, reply.text
        return str(reply.json()["error"]["message"])

    assert "context_shift is true, and the strategy 'best_of_n'" in refusal(strategy="best_of_n")
    whole = [{"role": "system", "content": LONG * 6}, *turns(9)[1:]]
    assert "never forgotten; accepted: at most 128" in refusal(messages=whole)


def test_a_server_without_the_setting_refuses(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, max_model_len=CONTEXT) as server, httpx.Client(base_url=server.url) as http:
        asked = {"model": "default", "messages": turns(1), "context_shift": True}
        reply = http.post("/v1/chat/completions", json=asked)
        assert reply.status_code == 400 and "setting context_shift is off; accepted: false" in reply.text
        chat = new_chat(http)
        for at in range(12):
            last = ask(http, chat, f"question {at}: {LONG}", max_tokens=4)
            if last["status"] == "failed":
                break
        assert last["status"] == "failed" and "Start a new chat" in last["error"]
