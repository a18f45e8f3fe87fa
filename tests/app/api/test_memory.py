"""Tests that notes about a person are shown to that person, can be changed, taken back and erased, and that a note of
the model is the only thing written unasked."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.auth import LOCAL
from app.config import LOCAL_USER, Settings
from app.db.memory_store import MAX_NOTES, MemoryFull, Origin
from app.db.store import Store
from app.runs.memory import keeps_memory
from tests.app import postgres
from tests.app.conftest import Server
from tests.app.library import error
from tools.builtin.notes import Notebook
from tools.outcome import Call, Outcome
from tools.session import Session

DATABASES = postgres.DATABASES_SLOW

pytestmark = pytest.mark.slow


def remember(server: Server, text: str, user: str, run: str, chat: str | None = None) -> Outcome:
    return called(server, "remember", {"text": text}, user, run, chat)


def called(server: Server, tool: str, given: dict[str, Any], user: str, run: str, chat: str | None = None) -> Outcome:
    state: Any = server.app.state.ponder
    session = Session(user, run, chat)
    (outcome,) = server.on_loop(state.tool_service.executor.run([Call("call_1", tool, given)], session))
    assert isinstance(outcome, Outcome)
    return outcome


@pytest.fixture
def mine(http: httpx.Client) -> httpx.Client:
    """A client of somebody without notes."""
    http.delete("/api/memory")
    http.patch("/api/memory", json={"enabled": True})
    return http


def test_a_models_note_is_listed_and_erased_by_its_user_alone(mine: httpx.Client, server: Server) -> None:
    ours, theirs = remember(server, "Likes tea.", LOCAL.id, "a"), remember(server, "Likes rum.", "somebody", "b")
    assert ours.ok and theirs.ok
    (note,) = mine.get("/api/memory").json()["notes"]
    assert (note["text"], note["source"], note["earlier"]) == ("Likes tea.", "tool", [])
    assert ours.result.text == f"Kept as note {note['number']}."  # which the page reads, to offer to take it back
    assert mine.delete(f"/api/memory/{note['number']}").status_code == 204
    assert mine.get("/api/memory").json()["notes"] == []
    again = mine.delete(f"/api/memory/{note['number']}")
    assert again.status_code == 404 and "no note" in again.json()["error"]["message"]
    for wrong in ("x", "-1", "9" * 40):
        assert mine.delete(f"/api/memory/{wrong}").status_code == 404


def test_a_models_newer_note_replaces_and_is_taken_back(mine: httpx.Client, server: Server) -> None:
    remember(server, "The user lives in Lyon.", LOCAL.id, "c")
    newer = remember(server, "The user lives in Rome.", LOCAL.id, "d")
    (note,) = mine.get("/api/memory").json()["notes"]
    assert newer.result.text == f"Kept as note {note['number']}. It replaces: The user lives in Lyon."
    assert (note["text"], note["earlier"][0]["text"]) == ("The user lives in Rome.", "The user lives in Lyon.")
    address = f"/api/memory/{note['number']}/undo"
    error(mine.post(address, json={"text": "The user lives in Lyon."}), 409, "note_changed", "text")
    assert mine.post(address, json={"text": note["text"]}).json()["note"]["text"] == "The user lives in Lyon."
    assert mine.post(address, json={"text": "The user lives in Lyon."}).json() == {"note": None}
    assert mine.get("/api/memory").json()["notes"] == []


def test_the_tools_read_and_erase_a_users_memory(mine: httpx.Client, server: Server) -> None:
    mine.post("/api/memory", json={"text": "Likes tea."})
    assert "Likes tea." in called(server, "recall", {"words": "TEA"}, LOCAL.id, "e").result.text
    assert called(server, "recall", {"words": "rum"}, LOCAL.id, "f").result.text == "No note has any of these words."
    assert "Likes tea." in called(server, "list_notes", {}, LOCAL.id, "g").result.text
    assert called(server, "list_notes", {}, "nobody-else", "h").result.text == "There are no notes."


def test_the_tools_keep_nothing_where_memory_is_off(mine: httpx.Client, server: Server) -> None:
    private = mine.post("/api/chats", json={"private": True}).json()["id"]
    refused = remember(server, "Likes tea.", LOCAL.id, "i", private)
    assert not refused.ok and "chat, which is private" in refused.result.text
    mine.patch("/api/memory", json={"enabled": False})
    for tool, given in (("remember", {"text": "Likes tea."}), ("list_notes", {}), ("recall", {"words": "tea"})):
        assert "you have switched it off" in called(server, tool, given, LOCAL.id, tool).result.text
    error(mine.post("/api/memory", json={"text": "Likes tea."}), 409, "memory_off")
    assert mine.get("/api/memory").json() | {"limits": {}} == {
        "available": True, "enabled": False, "notes": [], "limits": {},
    }  # fmt: skip
    mine.patch("/api/memory", json={"enabled": True})


def test_notes_are_added_changed_and_exported_with_their_history(mine: httpx.Client) -> None:
    first = mine.post("/api/memory", json={"text": " I live \n in Lyon "})
    assert first.status_code == 201 and first.json()["text"] == "I live in Lyon"
    number = first.json()["number"]
    other = mine.post("/api/memory", json={"text": "Likes tea."}).json()["number"]
    changed = mine.patch(f"/api/memory/{number}", json={"text": "I live in Rome"}).json()
    assert (changed["text"], changed["attribute"], changed["source"]) == ("I live in Rome", "home", "user")
    assert [each["text"] for each in changed["earlier"]] == ["I live in Lyon"]
    assert mine.get(f"/api/memory/{number}").json() == changed
    taken = error(mine.patch(f"/api/memory/{other}", json={"text": "I live in Bonn"}), 409, "note_taken", "text")
    assert f"Note {number} tells that already" in taken
    file = mine.get("/api/memory/export")
    assert "attachment" in file.headers["content-disposition"]
    assert [note["text"] for note in file.json()["notes"]] == ["Likes tea.", "I live in Rome"]
    assert mine.delete("/api/memory").json() == {"erased": 2}
    for text in ("", " ", "x" * 2001):
        assert mine.post("/api/memory", json={"text": text}).status_code == 400


def test_notes_go_into_the_file_of_all_chats_and_come_back(mine: httpx.Client) -> None:
    for text in ("I live in Lyon", "I live in Rome", "Likes tea."):
        mine.post("/api/memory", json={"text": text})
    file = {**mine.get("/api/chats/export").json(), "chats": []}
    before = mine.get("/api/memory").json()["notes"]
    assert mine.post("/api/chats/import", json=file).status_code == 201
    assert mine.get("/api/memory").json()["notes"] == before, "what is there already is not taken twice"
    mine.delete("/api/memory")
    mine.post("/api/memory", json={"text": "I live in Bonn"})
    mine.post("/api/chats/import", json=file)
    (home,) = [note for note in mine.get("/api/memory").json()["notes"] if note["attribute"] == "home"]
    assert home["text"] == "I live in Bonn", "it was written later"
    assert [each["text"] for each in home["earlier"]] == ["I live in Rome", "I live in Lyon"]


@pytest.mark.parametrize("erase", [False, True])
def test_a_note_outlives_its_chat_unless_it_is_to_go_with_it(mine: httpx.Client, server: Server, erase: bool) -> None:
    chat = mine.post("/api/chats", json={}).json()["id"]
    remember(server, "Likes tea.", LOCAL.id, f"from {chat}", chat)
    assert mine.get("/api/memory").json()["notes"][0]["chat_id"] == chat
    mine.delete(f"/api/chats/{chat}", params={"notes": "erase"} if erase else {})
    notes = mine.get("/api/memory").json()["notes"]
    assert [(note["text"], note["chat_id"]) for note in notes] == ([] if erase else [("Likes tea.", None)])
    mine.post(f"/api/chats/{chat}/restore")
    assert mine.get("/api/memory").json()["notes"][0]["chat_id"] == chat
    mine.delete(f"/api/chats/{chat}", params={"notes": "erase"} if erase else {})
    state: Any = server.app.state.ponder
    server.on_loop(state.store.deleted.purge(0))
    held = server.on_loop(
        state.store.database.read(lambda db: db.exec_driver_sql("SELECT text FROM memory_notes").all())
    )
    assert (("Likes tea.",) in held) is not erase


async def test_a_users_notes_have_a_limit(tmp_path: Path, address: str | None) -> None:
    store = await Store.open(tmp_path, address)
    for number in range(MAX_NOTES):
        await store.memory.keep("ana", f"note {number}", None, Origin("user"))
    with pytest.raises(MemoryFull, match="500 notes already"):
        await store.memory.keep("ana", "one more", None, Origin("user"))
    assert (await store.memory.keep("ben", "first", None, Origin("user"))).number == 1
    await store.close()


async def test_a_number_is_not_given_twice_and_what_is_erased_is_not_in_the_file(tmp_path: Path) -> None:
    store = await Store.open(tmp_path)
    assert (await store.memory.keep("ana", "The word is xyzzyplugh.", None, Origin("user"))).number == 1
    assert not (await store.memory.keep("ana", "The word is xyzzyplugh.", None, Origin("user"))).new
    await store.memory.erase("ana", 1)
    assert (await store.memory.keep("ana", "Tea.", None, Origin("user"))).number == 2
    await store.close()
    with sqlite3.connect(tmp_path / "ponder.db") as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    assert b"plugh" not in b"".join(path.read_bytes() for path in tmp_path.glob("ponder.db*"))


async def test_notes_of_earlier_versions_are_taken_over_once(tmp_path: Path, address: str | None) -> None:
    book = Notebook(tmp_path / "notes.db")
    for user, text in (("ana", "gone"), ("ana", "Likes tea."), ("ben", "Likes rum.")):
        book.remember(user, text)
    book.forget("ana", 1)
    store = await Store.open(tmp_path, address)
    assert await store.memory.adopt(book.path) == 2 and not book.path.exists()
    assert [(note["number"], note["text"]) for note in await store.memory.of("ana")] == [(2, "Likes tea.")]
    assert await store.memory.adopt(book.path) == 0
    assert (await store.memory.keep("ana", "More.", None, Origin("user"))).number == 3
    await store.close()


@pytest.mark.parametrize(
    ("given", "keeps"),
    [
        ({}, True), ({"host": "0.0.0.0"}, False), ({"host": "0.0.0.0", "auth": "keys"}, True),
        ({"host": "0.0.0.0", "memory": "on"}, True), ({"memory": "off"}, False),
    ],
)  # fmt: skip
def test_memory_is_for_known_users_or_as_the_operator_says(given: dict[str, Any], keeps: bool) -> None:
    assert keeps_memory(Settings(**given)) is keeps and LOCAL.id == LOCAL_USER


async def test_a_server_without_memory_says_so(tmp_path: Path, address: str | None) -> None:
    store = await Store.open(tmp_path, address)
    store.memory.available = False
    with pytest.raises(Exception, match="operator has switched memory off"):
        await store.memory.keep("ana", "Tea.", None, Origin("user"))
    assert await store.memory.for_prompt("ana", "chat_1", ()) == []
    await store.close()


def test_what_writes_or_executes_asks_unless_it_can_be_undone_or_touches_nothing(server: Server) -> None:
    """README, docs/tools.md and docs/api.md name the two that do not."""
    state: Any = server.app.state.ponder
    server.on_loop(state.tool_service.ready())
    unasked = {
        t.name for t in state.tool_service.registry if t.permission in ("write", "execute") and t.approval == "never"
    }
    assert unasked <= {"python", "remember"} and "remember" in unasked
    assert state.tool_service.registry.get("forget").approval == "always"
