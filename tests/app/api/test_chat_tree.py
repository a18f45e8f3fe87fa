"""Messages as a tree, over HTTP: branches, what is current, and what the model reads."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.app import postgres
from tests.app.chatting import ask, begin, change, log_of, new_chat, read
from tests.app.conftest import Server
from tests.app.library import error
from tests.app.runs.test_runs import BusyEngine

DATABASES = postgres.DATABASES_SLOW


@pytest.fixture
def chat(http: httpx.Client) -> str:
    return new_chat(http)


def prompt_of(http: httpx.Client, server: Server, run: str) -> str:
    """Returns what the model read."""
    recipe = json.loads(http.get(f"/api/runs/{run}/trace").text.splitlines()[0])
    return server.engine.tokenizer.decode(recipe["tokens"][: recipe["prompt_tokens"]])


class Branching(RuleBasedStateMachine):
    """Asks, edits, regenerates and chooses, and holds the chat to a plain list of messages."""

    http: httpx.Client
    server: Server

    @initialize()
    def empty(self) -> None:
        self.chat = new_chat(self.http)
        self.parents: dict[str, str | None] = {}  # the oldest first
        self.said: dict[str, str] = {}
        self.roles: dict[str, str] = {}
        self.leaf: str | None = None
        self.asked = 0

    def path(self, id: str | None) -> list[str]:
        return [] if id is None else [*self.path(self.parents[id]), id]

    def answered(self, answer: dict[str, Any], question: str) -> None:
        assert answer["parent_id"] == question and answer["status"] == "completed"
        self.parents[answer["id"]] = question
        self.said[answer["id"]], self.roles[answer["id"]] = answer["content"], "assistant"
        self.leaf = answer["id"]
        read_by_model = prompt_of(self.http, self.server, answer["run_id"])
        shown = [self.said[id] for id in self.path(question)]
        at = 0
        for text in shown:  # all of the branch, in its order
            at = read_by_model.index(text, at) + len(text)
        others = {text for id, text in self.said.items() if text.startswith("question") and text not in shown}
        assert not [text for text in others if text in read_by_model]

    def question(self, **fields: Any) -> None:
        self.asked += 1
        content = f"question{self.asked:03}"
        answer = ask(self.http, self.chat, content, **fields)
        question = answer["parent_id"]
        self.parents[question] = fields.get("parent_id", self.leaf)
        self.said[question], self.roles[question] = content, "user"
        self.answered(answer, question)

    def drawn(self, data: st.DataObject, role: str) -> str:
        return data.draw(st.sampled_from([id for id in self.parents if self.roles[id] == role]))

    @rule()
    def go_on(self) -> None:
        self.question()

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def edit(self, data: st.DataObject) -> None:
        self.question(parent_id=self.parents[self.drawn(data, "user")])

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def branch(self, data: st.DataObject) -> None:
        self.question(parent_id=self.drawn(data, "assistant"))

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def regenerate(self, data: st.DataObject) -> None:
        question = self.drawn(data, "user")
        self.answered(ask(self.http, self.chat, regenerate=question), question)

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def choose(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(list(self.parents)))
        below = [id for id in self.parents if chosen in self.path(id) and id not in self.parents.values()]
        self.leaf = below[-1]
        assert change(self.http, self.chat, leaf_id=chosen)["leaf_id"] == self.leaf

    @invariant()
    def shows_what_was_said(self) -> None:
        current, whole = read(self.http, self.chat), read(self.http, self.chat, all="true")
        assert current["leaf_id"] == whole["leaf_id"] == self.leaf
        assert [each["id"] for each in current["messages"]] == self.path(self.leaf)
        assert {each["id"]: each["parent_id"] for each in whole["messages"]} == self.parents
        assert [each["id"] for each in whole["messages"]] == list(self.parents)
        for each in whole["messages"]:
            assert each["content"] == self.said[each["id"]]
            siblings = [id for id, parent in self.parents.items() if parent == self.parents[each["id"]]]
            assert each["siblings"] == siblings
            assert each in current["messages"] or each["id"] not in self.path(self.leaf)


@pytest.mark.slow
def test_branches_are_what_was_asked_edited_and_chosen(http: httpx.Client, server: Server) -> None:
    class OnServer(Branching):
        pass

    OnServer.http, OnServer.server = http, server
    run_state_machine_as_test(OnServer, settings=settings(max_examples=8, stateful_step_count=12))


def test_an_edited_question_and_a_second_answer_are_siblings(http: httpx.Client, chat: str) -> None:
    first = ask(http, chat, "one")
    edited = ask(http, chat, "two", parent_id=None)
    again = ask(http, chat, regenerate=edited["parent_id"])
    question, answer = read(http, chat)["messages"]
    assert question["siblings"] == [first["parent_id"], edited["parent_id"]] and question["parent_id"] is None
    assert answer["id"] == again["id"] and answer["siblings"] == [edited["id"], again["id"]]
    assert change(http, chat, leaf_id=first["parent_id"])["leaf_id"] == first["id"]
    assert [each["content"] for each in read(http, chat)["messages"]] == ["one", first["content"]]


def test_three_answers_to_a_question_are_made_side_by_side(http: httpx.Client, chat: str, server: Server) -> None:
    other = ask(http, chat, "other")["parent_id"]
    with BusyEngine(server):
        first = begin(http, chat, "one", parent_id=None)
        question = first["question_id"]

        def refused(field: str | None, code: str, status: int, **fields: Any) -> None:
            error(http.post(f"/api/chats/{chat}/runs", json=fields), status, code, field)

        refused(None, "chat_busy", 409, regenerate=question)
        refused(None, "chat_busy", 409, regenerate=other, compare=True)  # of another question
        refused("compare", "invalid_value", 400, content="two", compare=True)
        second = begin(http, chat, regenerate=question, compare=True, temperature=0.5)
        third = begin(http, chat, regenerate=question, compare=True, strategy="beam", strategy_options={"width": 2})
        refused(None, "chat_busy", 409, regenerate=question, compare=True)
        runs = [each["run_id"] for each in (first, second, third)]
        shown = read(http, chat)
        assert shown["active_run_ids"] == runs and shown["active_run_id"] == runs[0]
        assert http.post(f"/api/runs/{runs[1]}/cancel").status_code == 202  # the others go on
        assert read(http, chat)["active_run_ids"] == [runs[0], runs[2]]
        fourth = begin(http, chat, regenerate=question, compare=True)  # in the place that is free again
    logs = [log_of(http, each["run_id"]) for each in (first, third, fourth)]
    assert [log[-1]["type"] for log in logs] == ["run.completed"] * 3
    assert [log[1]["strategy"] for log in logs] == [None, "beam", None]
    assert change(http, chat, leaf_id=third["message_id"])["leaf_id"] == third["message_id"]
    end = read(http, chat)
    assert end["active_run_ids"] == [] and end["active_run_id"] is None
    assert end["messages"][1]["siblings"] == [each["message_id"] for each in (first, second, third, fourth)]
    assert ask(http, chat, "more")["status"] == "completed"  # the chat is free


def test_a_deleted_chat_ends_all_answers_that_are_compared(http: httpx.Client, chat: str, server: Server) -> None:
    with BusyEngine(server):
        first = begin(http, chat, "one")
        second = begin(http, chat, regenerate=first["question_id"], compare=True)
        assert http.delete(f"/api/chats/{chat}").status_code == 200
        assert http.post(f"/api/chats/{chat}/restore").status_code == 200
        assert [log_of(http, each["run_id"])[-1]["type"] for each in (first, second)] == ["run.cancelled"] * 2


def test_a_running_branch_is_told_of_while_another_is_shown(http: httpx.Client, chat: str, server: Server) -> None:
    first = ask(http, chat, "one")
    with BusyEngine(server):
        begun = begin(http, chat, "two", parent_id=None)
        shown = change(http, chat, leaf_id=first["id"])
        assert shown["leaf_id"] == first["id"] and read(http, chat)["active_run_id"] == begun["run_id"]
    log_of(http, begun["run_id"])
    assert read(http, chat)["leaf_id"] == first["id"] and read(http, chat)["active_run_id"] is None


@pytest.fixture
def others(http: httpx.Client) -> dict[str, Any]:
    return ask(http, new_chat(http), "elsewhere")


def test_what_cannot_be_answered_is_refused_and_nothing_is_added(
    http: httpx.Client, chat: str, others: dict[str, Any]
) -> None:
    answer = ask(http, chat, "one")
    question, at = answer["parent_id"], f"/api/chats/{chat}/runs"
    before = read(http, chat, all="true")
    error(http.post(at, json={"content": "x", "parent_id": question}), 400, "invalid_value", "parent_id")
    error(http.post(at, json={"content": "x", "parent_id": 3}), 400, "invalid_value", "parent_id")
    error(http.post(at, json={"content": "x", "parent_id": others["id"]}), 404, "message_not_found")
    error(http.post(at, json={"regenerate": answer["id"]}), 400, "invalid_value", "regenerate")
    error(http.post(at, json={"regenerate": others["parent_id"]}), 404, "message_not_found")
    error(http.post(at, json={"regenerate": question, "content": "x"}), 400, "invalid_value", "content")
    error(http.post(at, json={"regenerate": question, "parent_id": None}), 400, "invalid_value", "parent_id")
    error(http.post(at, json={"parent_id": None}), 400, "missing_required_parameter", "content")
    error(http.patch(f"/api/chats/{chat}", json={"leaf_id": others["id"]}), 404, "message_not_found")
    error(http.get(f"/api/chats/{chat}?all=yes"), 400, "invalid_value", "all")
    error(http.get(f"/api/chats/{chat}?al=true"), 400, "unknown_parameter", "al")
    assert read(http, chat, all="true") == before


def test_the_last_messages_of_a_branch_alone(http: httpx.Client, chat: str) -> None:
    for text in ("one", "two", "three"):
        ask(http, chat, text)
    whole = read(http, chat)
    assert whole["earlier"] == 0
    for last in (1, 3, 6, 500):
        part = read(http, chat, last=str(last))
        assert part["messages"] == whole["messages"][-last:] and part["earlier"] == max(0, 6 - last)
    for wrong in (0, 501, "x"):
        error(http.get(f"/api/chats/{chat}?last={wrong}"), 400, "invalid_value", "last")
    error(http.get(f"/api/chats/{chat}?last=2&all=true"), 400, "invalid_value", "last")
