"""Chats as files: the round trip is identity but for ids, and what is not sound is refused as a whole."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.request_body import MAX_BODY_BYTES, json_value
from tests.app import postgres
from tests.app.chatting import Json, ask, begin, change, file, imported, log_of, message, new_chat, read
from tests.app.conftest import Server
from tests.app.library import error
from tests.app.runs.test_runs import BusyEngine

DATABASES = postgres.DATABASES_SLOW

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
moments = st.floats(0, 1e11, allow_nan=False)
measures = st.none() | st.floats(0, 1e6, allow_nan=False)
usages = st.none() | st.fixed_dictionaries(
    {f"{what}_tokens": st.integers(0, 2**53) for what in ("prompt", "completion", "reasoning", "cached")},
    optional={"forgotten_tokens": st.integers(0, 2**53)},
)
kept = st.none() | st.fixed_dictionaries(
    {},
    optional={
        "model": texts, "system": texts.filter(str.strip), "temperature": st.floats(0, 2), "seed": st.integers(-9, 9),
        "tools": st.just("all") | st.lists(texts, min_size=1, max_size=3), "collections": st.lists(st.integers(0, 9)),
        "thinking": st.booleans() | st.just({"max_tokens": 9}), "strategy_options": st.just({"n": 2}),
    },
)  # fmt: skip


files = st.fixed_dictionaries({"name": texts.filter(bool), "bytes": st.integers(0, 2**53)})


@st.composite
def steps(draw: st.DrawFn) -> list[Json]:
    made = []
    for number in range(draw(st.integers(0, 2))):
        ids = [f"c{number}{at}" for at in range(draw(st.integers(1, 2)))]
        calls = [{"id": id, "name": "calculator", "arguments": draw(texts)} for id in ids]
        results = [{"call_id": id, "text": draw(texts), "untrusted": draw(st.booleans())} for id in ids]
        made.append({"content": draw(texts), "calls": calls, "results": results})
    return [*made, {"content": draw(texts), "calls": [], "results": []}] if made else []


@st.composite
def chats(draw: st.DrawFn) -> Json:
    messages: list[Json] = []
    for number in range(draw(st.integers(0, 8))):
        parent = draw(st.sampled_from([None, *messages]))
        fields: Json = {"created_at": draw(moments)}
        role = "assistant" if parent is not None and parent["role"] == "user" else "user"
        if role == "assistant":
            fields |= {name: draw(measures) for name in ("thinking_s", "ttft_s", "tokens_per_s")}
            fields |= {"thinking": draw(texts), "usage": draw(usages), "steps": draw(steps())}
            fields |= {"status": draw(st.sampled_from(["completed", "failed", "cancelled"]))}
            fields |= {"error": draw(st.none() | texts), "grounded": draw(st.booleans())}
            fields |= {"model": draw(st.none() | texts.filter(bool))}
        if role == "user":
            fields |= {"files": draw(st.lists(files, max_size=2))}
        content = draw(texts) if role == "assistant" else draw(texts.filter(str.strip))
        messages.append(message(str(number), None if parent is None else parent["id"], role, content, **fields))
    leaves = [each["id"] for each in messages if each["id"] not in {other["parent_id"] for other in messages}]
    return {
        "title": draw(texts), "created_at": draw(moments), "updated_at": draw(moments), "pinned": draw(st.booleans()),
        "private": draw(st.booleans()), "folder": draw(st.none() | st.sampled_from(["work", "home"])),
        "settings": draw(kept), "messages": messages, "leaf_id": draw(st.sampled_from(leaves)) if leaves else None,
    }  # fmt: skip


def renumbered(chat: Json) -> Json:
    """With ids that count from 0, as every import gives new ones, and every field that has a default."""
    ids = {each["id"]: str(at) for at, each in enumerate(chat["messages"])} | {None: None}
    defaults: Json = {"thinking": "", "usage": None, "steps": [], "status": "completed", "error": None}
    defaults |= {"thinking_s": None, "ttft_s": None, "tokens_per_s": None, "grounded": False, "images": [], "files": []}
    defaults |= {"model": None}
    messages = [
        {**defaults, **each, "id": ids[each["id"]], "parent_id": ids[each["parent_id"]]} for each in chat["messages"]
    ]
    for each in messages:
        each["usage"] = each["usage"] and {"forgotten_tokens": 0, "seen_from": None, **each["usage"]}
    return {**chat, "leaf_id": ids[chat["leaf_id"]], "messages": messages}


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.lists(chats(), min_size=1, max_size=3, unique_by=lambda chat: chat["created_at"]))
def test_what_is_imported_is_exported_but_for_ids(ana: httpx.Client, sent: list[Json]) -> None:
    ids = imported(ana, {"format": "ponder.chats", "version": 1, "chats": sent})
    try:
        got = [ana.get(f"/api/chats/{id}/export").json() for id in ids]
        assert all(each["format"] == "ponder.chats" and each["version"] == 1 for each in got)
        assert [renumbered(each["chats"][0]) for each in got] == [renumbered(each) for each in sent]
        whole = ana.get("/api/chats/export").json()["chats"]
        assert sorted(map(json.dumps, whole)) == sorted(json.dumps(each["chats"][0]) for each in got)
    finally:
        for id in ids:
            assert ana.delete(f"/api/chats/{id}").status_code == 200


def test_a_chat_that_was_made_here_can_go_elsewhere_and_on(ana: httpx.Client, bob: httpx.Client) -> None:
    chat = new_chat(ana)
    folder = ana.post("/api/folders", json={"name": "work"}).json()["id"]
    answer = ask(ana, chat, "one", thinking=True, max_tokens=40)
    ask(ana, chat, regenerate=answer["parent_id"])
    ask(ana, chat, "two")
    change(ana, chat, pinned=True, folder_id=folder, title="mine")
    exported = ana.get(f"/api/chats/{chat}/export")
    assert "attachment" in exported.headers["content-disposition"]
    sent = exported.json()
    (there,) = imported(bob, sent)
    again = bob.get(f"/api/chats/{there}/export").json()
    assert renumbered(again["chats"][0]) == renumbered(sent["chats"][0])
    assert not {each["id"] for each in again["chats"][0]["messages"]} & {
        each["id"] for each in sent["chats"][0]["messages"]
    }
    assert ask(bob, there, "three")["status"] == "completed"
    assert [each["name"] for each in bob.get("/api/folders").json()["folders"]] == ["work"]
    assert ana.get("/api/chats/export").json() == sent


def test_an_answer_being_made_is_exported_as_cut_off(http: httpx.Client, server: Server) -> None:
    chat = new_chat(http)
    with BusyEngine(server):
        run = begin(http, chat, "one")["run_id"]
        sent = http.get(f"/api/chats/{chat}/export").json()
    log_of(http, run)
    assert sent["chats"][0]["messages"][1]["status"] == "cancelled"
    (copy,) = imported(http, sent)
    assert read(http, copy)["active_run_id"] is None


ONE, TWO = message("0", None, "user", "q"), message("1", "0", "assistant", "a")
CALL = {"id": "c", "name": "x", "arguments": "{}"}
RESULT = {"call_id": "c", "text": "r", "untrusted": True}
LAST: list[Json] = [{"content": "a"}]


def acted(calls: list[Json], results: list[Json], last: list[Json] = LAST) -> Json:
    return file(ONE, {**TWO, "steps": [{"content": "", "calls": calls, "results": results}, *last]})


def test_the_sound_file_that_the_others_differ_from_is_taken(ana: httpx.Client) -> None:
    (chat,) = imported(ana, acted([CALL], [RESULT]))
    assert [len(step["calls"]) for step in read(ana, chat)["messages"][1]["steps"]] == [1, 0]


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({}, "format"), ({**file(), "format": "x"}, "format"), ({**file(), "version": 2}, "version"),
        ({**file(), "more": 1}, "more"), (file(more=1), "chats[0].more"), (file(title="x" * 201), "chats[0].title"),
        (file({**ONE, "more": 1}), "chats[0].messages[0].more"),
        (file({**ONE, "role": "system"}), "chats[0].messages[0].role"),
        (file({**ONE, "status": "running"}), "chats[0].messages[0].status"),
        (file({**ONE, "parent_id": "0"}), "chats[0].messages[0].parent_id"),
        (file({**ONE, "parent_id": "1"}, TWO), "chats[0].messages[0].parent_id"),
        (file(ONE, ONE), "chats[0].messages[1].id"), (file(TWO, ONE, leaf="0"), "chats[0].messages[0].parent_id"),
        (file({**TWO, "parent_id": None}), "chats[0].messages[0].role"),
        (file(ONE, {**TWO, "role": "user"}), "chats[0].messages[1].role"),
        (file({**ONE, "content": " "}), "chats[0].messages[0]"), (file(ONE, TWO, leaf="0"), "chats[0].leaf_id"),
        (file(ONE, TWO, leaf="9"), "chats[0].leaf_id"), (file(leaf="9"), "chats[0].leaf_id"),
        (acted([CALL], []), "chats[0].messages[1].steps"), (acted([], [RESULT]), "chats[0].messages[1].steps"),
        (acted([], []), "chats[0].messages[1].steps"), (acted([CALL] * 2, [RESULT] * 2), "chats[0].messages[1].steps"),
        (acted([CALL], [RESULT], last=[]), "chats[0].messages[1].steps"),
        (acted([CALL], [{**RESULT, "text": "x" * 4001}]), "chats[0].messages[1].steps[0].results[0].text"),
        (file(ONE, {**TWO, "files": [{"name": "a.txt", "bytes": 1}]}), "chats[0].messages[1].files"),
        (file({**ONE, "files": [{"name": "a", "bytes": 1, "id": "f"}]}), "chats[0].messages[0].files[0].id"),
        (file(ONE, {**TWO, "created_at": -1}), "chats[0].messages[1].created_at"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_file_that_is_not_sound_is_refused_as_a_whole(ana: httpx.Client, sent: Json, param: str) -> None:
    if sent.get("chats"):
        sent = {**sent, "chats": [file(ONE, TWO)["chats"][0], *sent["chats"]]}
        param = param.replace("chats[0]", "chats[1]")
    reply = ana.post("/api/chats/import", json=sent)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
    assert "accepted" in reply.json()["error"]["message"]
    assert ana.get("/api/chats").json()["chats"] == [] and ana.get("/api/folders").json()["folders"] == []


def test_a_file_that_is_too_large_is_refused(http: httpx.Client) -> None:
    reply = http.post("/api/chats/import", content=b" " * (33 << 20))
    error(reply, 413, "body_too_large")
    reply = http.post("/api/chats/import", content=b'{"chats": ["' + b"a" * (11 << 20) + b'"]}')
    assert "more than 10,485,760 characters; accepted: at most that many" in error(reply, 400, "invalid_json")


@pytest.mark.slow
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(texts, parts, max_size=4),
))  # fmt: skip
def test_a_long_body_is_read_like_a_short_one(value: object) -> None:
    text = json.dumps(value)
    assert json_value(text + " " * MAX_BODY_BYTES) == json_value(text) == value


@pytest.mark.parametrize(
    "text", ['{"a": 1', "[1,]", "NaN", "[1e999]", '"\\ud800"', "[" * 300 + "]" * 300, '{"a": "\n"}', "1 1"]
)
def test_a_long_body_that_is_no_json_is_refused_like_a_short_one(text: str) -> None:
    for sent in (text, text + " " * MAX_BODY_BYTES):
        with pytest.raises(ValueError):
            json_value(sent)


def take_in(client: httpx.Client, sent: Json) -> tuple[list[str], list[str]]:
    """The chats that a file has brought, and those that were there."""
    reply = client.post("/api/chats/import", json=sent)
    assert reply.status_code == 201, reply.text
    known = reply.json()["known"]
    assert [each["position"] for each in known] == sorted(each["position"] for each in known)
    return reply.json()["chat_ids"], [each["chat_id"] for each in known]


def test_a_file_that_is_imported_again_brings_nothing(ana: httpx.Client, bob: httpx.Client) -> None:
    sent = file(ONE, TWO)
    sent["chats"] += file(ONE, created_at=2.0)["chats"]
    (first, second), known = take_in(ana, sent)
    assert known == []
    change(ana, first, title="mine now", pinned=True)
    assert take_in(ana, sent) == ([], [first, second])
    assert take_in(ana, ana.get("/api/chats/export").json()) == ([], [first, second])
    assert len(ana.get("/api/chats").json()["chats"]) == 2
    assert take_in(bob, sent)[1] == [], "another user's chats are not looked at"
    ana.delete(f"/api/chats/{second}")
    (again,), known = take_in(ana, sent)
    assert known == [first] and again != second, "what was deleted comes back"


def test_a_chat_that_was_made_here_is_known_in_its_own_export(ana: httpx.Client) -> None:
    chat = new_chat(ana)
    answer = ask(ana, chat, "one")
    ask(ana, chat, regenerate=answer["parent_id"])
    sent = ana.get(f"/api/chats/{chat}/export").json()
    assert take_in(ana, sent) == ([], [chat])


def test_a_chat_that_was_gone_on_with_is_kept_beside_the_other(ana: httpx.Client) -> None:
    three = message("2", "1", "user", "more")
    (short,), _ = take_in(ana, file(ONE, TWO))
    (long,), known = take_in(ana, file(ONE, TWO, three))
    assert known == [] and len(read(ana, long)["messages"]) == 3 and len(read(ana, short)["messages"]) == 2
    assert take_in(ana, file(ONE, TWO, three)) == ([], [long]) and take_in(ana, file(ONE, TWO)) == ([], [short])
    (other,), _ = take_in(ana, file(ONE, {**TWO, "content": "b"}))
    assert take_in(ana, file(ONE, {**TWO, "parent_id": "0", "id": "x"})) == ([], [short]), "ids are the file's own"
    assert len({short, long, other}) == 3


def test_nobody_exports_what_is_anothers(ana: httpx.Client, bob: httpx.Client) -> None:
    (chat,) = imported(ana, file(ONE, TWO))
    error(bob.get(f"/api/chats/{chat}/export"), 404, "chat_not_found")
    assert bob.get("/api/chats/export").json()["chats"] == []
    (other,) = imported(ana, file(ONE, TWO, created_at=2.0, updated_at=3.0))
    listed: list[Any] = ana.get("/api/chats").json()["chats"]
    assert [each["id"] for each in listed] == [other, chat]
