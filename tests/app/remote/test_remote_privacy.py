"""Nothing of a private request or chat is sent to a remote model, whatever it becomes part of."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.app.chatting import Json, begun_elsewhere, change, imported, log_of, read
from tests.app.remote.planted import Planted

MODELS = st.sampled_from(["big", "claude", "auto", "pebble"])
STEPS = st.one_of(
    st.tuples(st.sampled_from(["chat", "messages"]), MODELS, st.booleans(), st.booleans()),
    st.tuples(st.sampled_from(["respond", "refer"]), MODELS, st.booleans(), st.integers(0, 5)),
    st.tuples(st.just("new"), st.booleans()),
    st.tuples(st.sampled_from(["run", "again"]), MODELS, st.integers(0, 5)),
    st.tuples(st.sampled_from(["hide", "copy"]), st.integers(0, 5)),
)
_numbers = itertools.count()


class Client:
    """Asks as a step says. Words of what is private begin with PRIV, all others with OPEN."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        self.chats: list[tuple[str, bool]] = []
        self.responses: list[tuple[str, str, bool]] = []  # id, the id of its item, private
        self.sent: list[str] = []  # open words that a remote was asked with by its name

    def words(self, private: bool) -> str:
        return f"{'PRIV' if private else 'OPEN'}-{next(_numbers)}"

    def take(self, step: tuple[Any, ...]) -> None:
        getattr(self, step[0])(*step[1:])

    def post(self, path: str, body: Json, model: str, private: bool, words: str) -> httpx.Response:
        reply = self.http.post(path, json=body)
        named = model in ("big", "claude")
        if named and private:
            assert reply.status_code == 403 and "private" in reply.text, reply.text
        else:
            assert reply.status_code in (200, 202), reply.text
            self.sent += [words] if named else []
        return reply

    def chat(self, model: str, private: bool, stream: bool) -> None:
        words = self.words(private)
        asked = [{"role": "user", "content": words}]
        body = {"model": model, "messages": asked, "private": private, "stream": stream, "max_tokens": 1}
        reply = self.post("/v1/chat/completions", body, model, private, words)
        if model == "auto" and not stream:
            remote = reply.json()["routing"]["remote"]
            assert remote["sent"] is not private and ("private" in remote["why"]) is private

    def messages(self, model: str, private: bool, stream: bool) -> None:
        words = self.words(private)
        asked = [{"role": "user", "content": words}]
        body = {"model": model, "messages": asked, "private": private, "stream": stream, "max_tokens": 1}
        self.post("/v1/messages", body, model, private, words)

    def respond(self, model: str, private: bool, at: int) -> None:
        """Begins a conversation, or goes on with one."""
        id, _, was = self.responses[at % len(self.responses)] if self.responses and at else (None, "", False)
        words = self.words(private or was)
        self._respond(model, private, words, words, {} if id is None else {"previous_response_id": id})

    def refer(self, model: str, private: bool, at: int) -> None:
        """Refers to an item of an earlier response."""
        if self.responses:
            _, item, was = self.responses[at % len(self.responses)]
            words = self.words(private or was)
            self._respond(
                model, private, words, [{"type": "item_reference", "id": item}, {"role": "user", "content": words}], {}
            )

    def _respond(self, model: str, private: bool, words: str, asked: Any, more: Json) -> None:
        body = {"model": model, "private": private, "max_output_tokens": 16, "input": asked, **more}
        inherits = words.startswith("PRIV")
        reply = self.post("/v1/responses", body, model, inherits, words)
        if reply.status_code == 200:
            made = reply.json()
            assert made.get("private", False) is inherits
            self.responses.append((made["id"], made["output"][0]["id"], inherits))

    def new(self, private: bool) -> None:
        made = self.http.post("/api/chats", json={"private": private}).json()
        assert made["private"] is private
        self.chats.append((made["id"], private))

    def run(self, model: str, at: int) -> None:
        if not self.chats:
            self.new(False)
        id, private = self.chats[at % len(self.chats)]
        words = self.words(private)
        self._run(id, private, model, {"content": words}, words)

    def again(self, model: str, at: int) -> None:
        """Answers the first question of a chat once more."""
        id, private = self.chats[at % len(self.chats)] if self.chats else ("", False)
        messages = read(self.http, id)["messages"] if id else []
        if messages:
            self._run(id, private, model, {"regenerate": messages[0]["id"]}, "")

    def _run(self, id: str, private: bool, model: str, asked: Json, words: str) -> None:
        reply = self.post(f"/api/chats/{id}/runs", {**asked, "model": model, "max_tokens": 1}, model, private, words)
        if reply.status_code == 202:
            log = log_of(self.http, reply.json()["run_id"])
            assert log[-1]["type"] == "run.completed", log
            assert not private or all(each["type"] != "remote.sent" for each in log)

    def hide(self, at: int) -> None:
        if self.chats:
            id, _ = self.chats[at % len(self.chats)]
            assert change(self.http, id, private=True)["private"] is True
            self.chats[at % len(self.chats)] = id, True

    def copy(self, at: int) -> None:
        if self.chats:
            id, private = self.chats[at % len(self.chats)]
            (copy,) = imported(self.http, begun_elsewhere(self.http.get(f"/api/chats/{id}/export").json()))
            assert read(self.http, copy)["private"] is private
            self.chats.append((copy, private))


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=3, max_size=14))
@pytest.mark.usefixtures("never_sure")
def test_a_remote_gets_nothing_of_what_is_private(http: httpx.Client, planted: Planted, steps: list[Any]) -> None:
    planted.requests.clear()
    client = Client(http)
    for step in steps:
        client.take(step)
    assert "PRIV" not in planted.received
    assert all(words in planted.received for words in client.sent)


def test_the_private_words_of_an_answer_stay_too(http: httpx.Client, planted: Planted) -> None:
    """An answer in a private chat is part of the chat, whichever model of here gave it."""
    first = http.post("/v1/responses", json={"model": "pebble", "input": "Hello!", "private": True}).json()
    last = http.post("/v1/responses", json={"model": "pebble", "input": "And?", "previous_response_id": first["id"]})
    assert last.json()["private"] is True
    reply = http.post("/v1/responses", json={"model": "big", "input": "So?", "previous_response_id": last.json()["id"]})
    assert reply.status_code == 403 and reply.json()["error"]["code"] == "private_stays_local"
    assert not planted.requests
