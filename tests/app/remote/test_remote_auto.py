"""`model: auto` with a remote as its last step: it is asked where it may be, and the report says why or why not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from reasoning.route import FirstTokens
from tests.app.chatting import change, log_of, new_chat, read
from tests.app.conftest import Server
from tests.app.remote.planted import TEXT, Json, Planted, chunk, refuses, sends, speaks

ASKED = [{"role": "user", "content": "Use 2, 3 and 4 to make 24."}]
pytestmark = pytest.mark.usefixtures("never_sure")


def ask(http: httpx.Client, **fields: Any) -> Json:
    reply = http.post("/v1/chat/completions", json={"model": "auto", "messages": ASKED, "max_tokens": 8, **fields})
    assert reply.status_code == 200, reply.text
    made: Json = reply.json()
    return made


def test_it_asks_the_remote_where_no_model_of_here_is_sure(http: httpx.Client, planted: Planted) -> None:
    answer = ask(http)
    routing = answer["routing"]
    assert answer["model"] == "big" and answer["choices"][0]["message"]["content"] == TEXT
    assert [(each["model"], each["passed"]) for each in routing["tried"]] == [("pebble", False), ("big", True)]
    assert routing["model"] == "big" and routing["escalated"] and routing["tried"][1]["verdicts"] == []
    sent = routing["remote"]
    assert sent["sent"] and sent["why"] == "no model of this server was sure enough" and sent["messages"] == 1
    assert answer["usage"]["completion_tokens"] == 5 + routing["tried"][0]["tokens"]


def test_streamed_it_begins_with_the_remotes_first_word(http: httpx.Client, planted: Planted) -> None:
    body = {"model": "auto", "messages": ASKED, "max_tokens": 3, "stream": True}
    lines = http.post("/v1/chat/completions", json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {each["model"] for each in chunks} == {"big"}
    assert "".join(c["delta"].get("content") or "" for each in chunks for c in each["choices"]) == TEXT
    assert chunks[-1]["routing"]["remote"]["sent"]


def test_a_run_says_what_it_sends(http: httpx.Client, planted: Planted) -> None:
    body = {"content": "Use 2, 3 and 4 to make 24.", "model": "auto", "max_tokens": 3}
    log = log_of(http, http.post(f"/api/chats/{new_chat(http)}/runs", json=body).json()["run_id"])
    kinds = [each["type"] for each in log]
    assert kinds.index("route.tried") < kinds.index("remote.sent") < kinds.index("route.answering")
    assert next(each for each in log if each["type"] == "answer.done")["text"] == TEXT


def test_an_answer_keeps_the_model_that_the_router_chose(http: httpx.Client, planted: Planted) -> None:
    chat = new_chat(http)
    change(http, chat, settings={"model": "auto", "max_tokens": 3})
    for model in (None, "pebble"):
        named = {} if model is None else {"model": model}
        reply = http.post(f"/api/chats/{chat}/runs", json={"content": "Use 2, 3 and 4 to make 24.", **named})
        log_of(http, reply.json()["run_id"])
    assert [each["model"] for each in read(http, chat)["messages"]] == [None, "big", None, "pebble"]
    refused = http.patch(f"/api/chats/{chat}", json={"settings": {"model": "big", "min_p": 0.1}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_p"), refused.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"private": True}, "this is private"),
        ({"logprobs": True}, "logprobs is given, which the remote model 'big' does not take"),
        ({"min_p": 0.1}, "min_p is given"),
    ],
)  # fmt: skip
def test_the_report_says_why_it_stayed(http: httpx.Client, planted: Planted, fields: Json, words: str) -> None:
    answer = ask(http, **fields)
    remote = answer["routing"]["remote"]
    assert answer["model"] == "pebble" and not remote["sent"] and words in remote["why"]
    assert not planted.requests


def test_a_spent_budget_keeps_it_here(remotes: Server, http: httpx.Client, planted: Planted) -> None:
    spending = remotes.app.state.ponder.models.remotes["big"].spending
    there = spending._settings
    spending._settings = there.model_copy(update={"cost_per_month": 1e-9})
    try:
        answer = ask(http)
    finally:
        spending._settings = there
    assert answer["model"] == "pebble" and "budget" in answer["routing"]["remote"]["why"] and not planted.requests


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_here_is_given_where_the_remote_fails(http: httpx.Client, planted: Planted, stream: bool) -> None:
    planted.does(refuses(400, "no"))
    if stream:
        text = http.post("/v1/chat/completions", json={"model": "auto", "messages": ASKED, "stream": True}).text
        assert '"model":"pebble"' in text and '"finish_reason":' in text and '"error":{' not in text
        return
    answer, alone = ask(http, temperature=0), ask(http, temperature=0, private=True)
    assert answer["model"] == "pebble" and answer["choices"] == alone["choices"] and answer["usage"] == alone["usage"]
    remote = answer["routing"]["remote"]
    assert remote["sent"] and "refused the request" in remote["error"] and answer["routing"]["model"] == "pebble"


def test_an_answer_that_began_unsure_is_whole_where_the_remote_fails(
    remotes: Server, http: httpx.Client, planted: Planted
) -> None:
    auto = remotes.app.state.ponder.models.auto
    there, auto.gate = auto.gate, FirstTokens(1.0)
    try:
        planted.does(refuses(400, "no"))
        answer = ask(http, temperature=0, max_tokens=40)
        alone = ask(http, temperature=0, max_tokens=40, private=True)
    finally:
        auto.gate = there
    assert answer["routing"]["tried"][0]["verdicts"][0]["gate"] == "first tokens"
    assert answer["choices"] == alone["choices"] and answer["usage"]["completion_tokens"] == 40


def test_an_answer_of_here_is_given_where_the_remotes_has_not_the_form(http: httpx.Client, planted: Planted) -> None:
    planted.does(speaks("no JSON"))
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    answer = ask(http, response_format=form)
    assert answer["model"] == "pebble" and len(planted.requests) == 2
    assert "is not as it was asked for" in answer["routing"]["remote"]["error"]


def test_a_remote_that_breaks_off_in_its_answer_is_an_error(http: httpx.Client, planted: Planted) -> None:
    planted.does(sends(chunk({"content": "Pa"})))
    reply = http.post("/v1/chat/completions", json={"model": "auto", "messages": ASKED, "max_tokens": 3})
    assert reply.status_code == 502 and reply.json()["error"]["code"] == "remote_dropped"
    planted.does(speaks())


def test_tools_of_a_client_go_to_it_too(http: httpx.Client, planted: Planted) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    assert ask(http, tools=[tool])["model"] == "big" and planted.body["tools"] == [tool]
