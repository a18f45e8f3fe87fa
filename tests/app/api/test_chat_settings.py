"""A chat keeps how its answers are made: it is checked as a run's fields are, and used where a run names none."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.app import postgres
from tests.app.chatting import ask, begin, change, file, imported, log_of, message, new_chat, read
from tests.app.conftest import Server
from tests.app.library import error
from tests.app.runs.test_run_settings import prompt, recipe

DATABASES = postgres.DATABASES_SLOW

pytestmark = pytest.mark.slow

KEPT: dict[str, Any] = {"system": "You answer in rhymes.", "temperature": 0.25, "seed": 7, "max_tokens": 3}


def test_a_run_is_made_as_its_chat_says(server: Server, http: httpx.Client) -> None:
    chat = new_chat(http)
    assert read(http, chat)["settings"] is None
    assert change(http, chat, settings=KEPT)["settings"] == KEPT == read(http, chat)["settings"]
    reply = http.post(f"/api/chats/{chat}/runs", json={"content": "hello"})
    made = recipe(http, reply.json()["run_id"])
    assert (made["sampling"]["temperature"], made["sampling"]["seed"], made["max_tokens"]) == (0.25, 7, 3)
    assert KEPT["system"] in prompt(server, made)
    assert "settings" not in http.get("/api/chats").json()["chats"][0], "a list would be as long as its prompts"


def test_a_run_names_what_it_wants_otherwise(server: Server, http: httpx.Client) -> None:
    chat = new_chat(http)
    change(http, chat, settings=KEPT)
    made = recipe(http, begin(http, chat, "hello", temperature=0.5, system=None)["run_id"])
    assert (made["sampling"]["temperature"], made["sampling"]["seed"]) == (0.5, 7)
    assert KEPT["system"] not in prompt(server, made), "null takes it away"
    change(http, chat, settings={})
    assert KEPT["system"] not in prompt(server, recipe(http, begin(http, chat, "again")["run_id"]))


def test_the_fields_of_reasoning_are_taken_from_the_chat_together_or_not_at_all(http: httpx.Client) -> None:
    chat = new_chat(http)
    change(http, chat, settings={"strategy": "best_of_n", "strategy_options": {"n": 2}})
    run = begin(http, chat, "hello", max_tokens=4)["run_id"]
    assert [event["type"] for event in log_of(http, run)].count("candidate.done") == 2
    run = begin(http, chat, "again", max_tokens=4, reasoning_effort="none")["run_id"]
    assert "candidate.done" not in [event["type"] for event in log_of(http, run)]


@pytest.mark.parametrize(
    ("settings", "param", "accepted"),
    [
        ({"temperature": 3}, "settings.temperature", "0 (greedy) to 2"),
        ({"tools": []}, "settings.tools", "1 to 128"),
        ({"reasoning_effort": "vast"}, "settings.reasoning_effort", '"medium"'),
        ({"content": "x"}, "settings.content", "temperature, thinking"),
        ({"temperature": "1"}, "settings.temperature", "number"),
        ({"system": " "}, "system", "non-empty"),
        ({"model": "nobody"}, "model", "tiny"),
        ({"tools": ["nothing"]}, "tools", "accepted"),
        ({"thinking": {"waits": 99}}, "thinking.waits", "0 to 64"),
        ({"strategy": "nothing"}, "strategy", "best_of_n"),
        ({"strategy_options": {"n": 2}}, "strategy_options", "strategy"),
        ({"reasoning_effort": "low", "strategy": "best_of_n"}, "strategy", "one of them"),
    ],
)
def test_what_no_run_would_take_is_not_kept(
    http: httpx.Client, settings: dict[str, Any], param: str, accepted: str
) -> None:
    chat = new_chat(http)
    for refused in (
        http.patch(f"/api/chats/{chat}", json={"settings": settings}),
        http.post("/api/chats", json={"settings": settings}),
    ):
        told = refused.json()["error"]
        assert refused.status_code in (400, 404) and (told["param"], accepted in told["message"]) == (param, True), told
    assert read(http, chat)["settings"] is None


def test_collections_that_one_may_not_read_are_not_kept(ana: httpx.Client, bob: httpx.Client) -> None:
    number = bob.post("/api/collections", json={"name": "bob's"}).json()["id"]
    refused = ana.patch(f"/api/chats/{new_chat(ana)}", json={"settings": {"collections": [number]}})
    error(refused, 404, "not_found")
    assert change(bob, new_chat(bob), settings={"collections": [number]})["settings"] == {"collections": [number]}


def test_settings_go_with_a_file_and_a_run_of_what_is_not_there_is_refused_by_name(ana: httpx.Client) -> None:
    kept = {"model": "elsewhere", "tools": ["unheard_of"], "temperature": 0.5}
    (chat,) = imported(ana, file(message("0", None, "user", "q"), message("1", "0", "assistant", "a"), settings=kept))
    assert read(ana, chat)["settings"] == kept
    assert ana.get(f"/api/chats/{chat}/export").json()["chats"][0]["settings"] == kept
    runs = f"/api/chats/{chat}/runs"
    assert "elsewhere" in error(ana.post(runs, json={"content": "q"}), 404, "model_not_found", "model")
    refused = ana.post(runs, json={"content": "q", "model": None})
    assert "unheard_of" in error(refused, 400, "unknown_tool", "tools")
    assert ask(ana, chat, "q", model=None, tools=None)["status"] == "completed"


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"temperature": 3}, "temperature"), ({"more": 1}, "more"), ({"system": " "}, "system"),
        ({"thinking": {"waits": 99}}, "thinking.waits"),
    ],
)  # fmt: skip
def test_a_file_with_settings_of_a_wrong_form_is_refused(
    ana: httpx.Client, settings: dict[str, Any], param: str
) -> None:
    refused = ana.post("/api/chats/import", json=file(settings=settings))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"chats[0].settings.{param}")
    assert f"chats[0].settings.{param}" in refused.json()["error"]["message"] or param == "more"


def test_an_answer_keeps_the_name_of_the_model_that_wrote_it(http: httpx.Client, ana: httpx.Client) -> None:
    chat = new_chat(http)
    ask(http, chat, "hello")
    question, answer = read(http, chat)["messages"]
    assert (question["model"], answer["model"]) == (None, "tiny")
    sent = http.get(f"/api/chats/{chat}/export").json()
    (copy,) = imported(ana, sent)
    assert [each["model"] for each in read(ana, copy)["messages"]] == [None, "tiny"]
