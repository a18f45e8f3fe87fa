"""Tests what a person sets for an answer is what the model reads and how its words are drawn."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from app.runs.rag import INSTRUCTION, RetrievedContext
from tests.app.chatting import ask, begin, log_of, new_chat
from tests.app.conftest import Server

SYSTEM = "You answer in rhymes. ⟨ξ⟩"


def recipe(http: httpx.Client, run: str) -> dict[str, Any]:
    log_of(http, run)
    made: dict[str, Any] = json.loads(http.get(f"/api/runs/{run}/trace").text.partition("\n")[0])
    return made


def prompt(server: Server, made: dict[str, Any]) -> str:
    return server.engine.tokenizer.decode(made["tokens"][: made["prompt_tokens"]])


def test_the_system_prompt_stands_before_the_whole_conversation(server: Server, http: httpx.Client) -> None:
    chat = new_chat(http)
    ask(http, chat, "one", max_tokens=4)
    read = prompt(server, recipe(http, begin(http, chat, "two", system=SYSTEM, max_tokens=4)["run_id"]))
    assert read.index(SYSTEM) < read.index("one") < read.index("two")
    assert SYSTEM not in prompt(server, recipe(http, begin(http, chat, "three", max_tokens=4)["run_id"]))


def test_sources_stand_behind_the_system_prompt_in_one_message() -> None:
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Why?"}]
    first, *rest = RetrievedContext((), "answer", 1.0).messages(turns)
    assert first["role"] == "system" and first["content"].startswith(f"{SYSTEM}\n\n{INSTRUCTION}")
    assert rest == turns[1:]
    first, *rest = RetrievedContext((), "answer", 1.0).messages(turns[1:])
    assert first["content"].startswith(INSTRUCTION) and rest == turns[1:]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.7), ("top_p", 0.5), ("top_k", 3), ("min_p", 0.2), ("repetition_penalty", 1.3),
        ("presence_penalty", -1.0), ("frequency_penalty", 2.0), ("seed", -7),
    ],
)  # fmt: skip
def test_words_are_drawn_as_it_says(http: httpx.Client, name: str, value: float) -> None:
    usual = recipe(http, begin(http, new_chat(http), "hello", max_tokens=4)["run_id"])["sampling"]
    drawn = recipe(http, begin(http, new_chat(http), "hello", max_tokens=4, **{name: value})["run_id"])["sampling"]
    assert usual[name] != value and drawn[name] == value
    assert {key for key in usual if usual[key] != drawn[key]} <= {name, "seed"}


def test_a_seed_makes_the_same_answer_twice(http: httpx.Client) -> None:
    fields = {"temperature": 1.5, "max_tokens": 30, "thinking": False}
    texts = [ask(http, new_chat(http), "hello", seed=seed, **fields)["content"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("body", "param", "accepted"),
    [
        ({"system": ""}, "system", "1 to 100000 characters"),
        ({"system": " \n"}, "system", "non-empty"),
        ({"system": "x" * 100_001}, "system", "100000"),
        ({"system": 3}, "system", "text"),
        ({"top_p": 0}, "top_p", "at most 1"),
        ({"top_k": -1}, "top_k", "0 (off)"),
        ({"top_k": 2.5}, "top_k", "integer"),
        ({"min_p": 1}, "min_p", "less than 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"presence_penalty": 3}, "presence_penalty", "-2 to 2"),
        ({"frequency_penalty": "x"}, "frequency_penalty", "number"),
        ({"seed": 2**63}, "seed", "64-bit"),
    ],
)
def test_what_cannot_be_is_refused_by_name(http: httpx.Client, body: dict[str, Any], param: str, accepted: str) -> None:
    refused = http.post(f"/api/chats/{new_chat(http)}/runs", json={"content": "hello", **body})
    told = refused.json()["error"]
    assert (refused.status_code, told["param"]) == (400, param) and accepted in told["message"]


def test_a_system_prompt_longer_than_the_context_is_told_so(http: httpx.Client) -> None:
    chat = new_chat(http)
    *_, end = log_of(http, begin(http, chat, "hello", system="x" * 90_000)["run_id"])
    assert end["type"] == "run.failed" and end["code"] == "context_length_exceeded"
