"""Tests what is deleted is not there any more, comes back whole for a while, and then never."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Connection, Table, text, update

from app.config import LOCAL_USER
from app.db.run_store import Place
from app.db.sqlite import NotThere
from app.db.store import KEPT_S, Store
from app.db.tables import chats, folders
from tests.app import postgres
from tests.app.chatting import Json, ask, begin, change, log_of, new_chat, read
from tests.app.library import error

DATABASES = postgres.DATABASES_SLOW


def folder(http: httpx.Client, name: str) -> str:
    return str(http.post("/api/folders", json={"name": name}).json()["id"])


def ids(http: httpx.Client) -> list[str]:
    return [each["id"] for each in http.get("/api/chats").json()["chats"]]


def deleted(http: httpx.Client, path: str) -> Json:
    reply = http.delete(path)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_deleted_chat_is_nowhere_and_comes_back_whole(ana: httpx.Client) -> None:
    chat = new_chat(ana)
    answer = ask(ana, chat, "axolotl")
    ask(ana, chat, regenerate=answer["parent_id"])
    change(ana, chat, pinned=True, folder_id=folder(ana, "pets"))
    before, run = read(ana, chat, all="true"), answer["run_id"]

    told = deleted(ana, f"/api/chats/{chat}")
    assert told["id"] == chat and 0 < told["restorable_until"] - time.time() <= KEPT_S
    assert chat not in ids(ana)
    assert ana.get("/api/chats/search?q=axolotl").json()["results"] == []
    assert ana.get("/api/chats/export").json()["chats"] == []
    assert [each["chats"] for each in ana.get("/api/folders").json()["folders"]] == [0]
    for method, path, body in (
        ("GET", "", None), ("PATCH", "", {"title": "x"}), ("DELETE", "", None), ("GET", "/export", None),
        ("POST", "/runs", {"content": "x"}), ("GET", "/permissions", None),
    ):  # fmt: skip
        error(ana.request(method, f"/api/chats/{chat}{path}", json=body), 404, "chat_not_found")
    error(ana.get(f"/api/runs/{run}/events"), 404, "run_not_found")

    for _ in range(2):  # the second time it is there already
        assert ana.post(f"/api/chats/{chat}/restore").status_code == 200
    assert read(ana, chat, all="true") == before and chat in ids(ana)
    assert [each["chat_id"] for each in ana.get("/api/chats/search?q=axolotl").json()["results"]] == [chat]
    assert log_of(ana, run)[-1]["type"] == "run.completed"


def test_deleting_a_chat_ends_its_answer_and_frees_it(ana: httpx.Client) -> None:
    chat = new_chat(ana)
    run = begin(ana, chat, "x", max_tokens=1500)["run_id"]
    deleted(ana, f"/api/chats/{chat}")
    assert ana.post(f"/api/chats/{chat}/restore").json()["id"] == chat
    assert log_of(ana, run)[-1]["type"] in ("run.cancelled", "run.completed")
    back = read(ana, chat)
    assert back["active_run_id"] is None and back["messages"][0]["content"] == "x"
    assert ask(ana, chat, "y")["status"] == "completed"


def test_nobody_restores_anothers(ana: httpx.Client, bob: httpx.Client) -> None:
    chat, work = new_chat(ana), folder(ana, "work")
    deleted(ana, f"/api/chats/{chat}")
    deleted(ana, f"/api/folders/{work}")
    error(bob.post(f"/api/chats/{chat}/restore"), 404, "chat_not_found")
    error(bob.post(f"/api/folders/{work}/restore"), 404, "folder_not_found")
    error(ana.post("/api/chats/chat_x/restore"), 404, "chat_not_found")
    error(ana.post(f"/api/chats/{chat}/restore?colour=red"), 400, "unknown_parameter", "colour")
    assert ids(ana) == ids(bob) == [] and ana.get("/api/folders").json()["folders"] == []


def test_a_deleted_folder_comes_back_with_its_chats(ana: httpx.Client) -> None:
    work, other = folder(ana, "work"), folder(ana, "other")
    stays, moves = new_chat(ana), new_chat(ana)
    for chat in (stays, moves):
        change(ana, chat, folder_id=work)
    deleted(ana, f"/api/folders/{work}")
    assert read(ana, stays)["folder_id"] is None and read(ana, moves)["folder_id"] is None
    assert ana.get(f"/api/chats/{stays}/export").json()["chats"][0]["folder"] is None
    error(ana.patch(f"/api/chats/{stays}", json={"folder_id": work}), 404, "folder_not_found")
    error(ana.patch(f"/api/folders/{work}", json={"name": "x"}), 404, "folder_not_found")
    change(ana, moves, folder_id=other)  # what was done since stays done
    assert ana.post(f"/api/folders/{work}/restore").json()["name"] == "work"
    assert read(ana, stays)["folder_id"] == work and read(ana, moves)["folder_id"] == other


def test_a_folder_does_not_come_back_beside_one_of_its_name(ana: httpx.Client) -> None:
    work = folder(ana, "work")
    deleted(ana, f"/api/folders/{work}")
    again = folder(ana, "work")
    error(ana.post(f"/api/folders/{work}/restore"), 409, "name_taken", "name")
    ana.patch(f"/api/folders/{again}", json={"name": "new work"})
    assert ana.post(f"/api/folders/{work}/restore").status_code == 200


async def test_what_was_deleted_long_ago_is_erased(tmp_path: Path, address: str | None) -> None:
    store = await Store.open(tmp_path, address)
    old, new = [(await store.chats.create(LOCAL_USER))["id"] for _ in range(2)]
    box = (await store.folders.create(LOCAL_USER, "box"))["id"]
    await store.runs.begin(LOCAL_USER, old, "run_1", Place("question", at_leaf=True), {})
    for chat in (old, new):
        await store.deleted.delete("chat", LOCAL_USER, chat)
    await store.deleted.delete("folder", LOCAL_USER, box)
    store.database.write(lambda db: _age(db, chats, old))
    store.database.write(lambda db: _age(db, folders, box))
    with pytest.raises(NotThere):  # before it is erased, too
        await store.deleted.restore("chat", LOCAL_USER, old)
    due_s = await store.deleted.purge()
    assert due_s is not None and KEPT_S - 60 < due_s <= KEPT_S
    assert await store.database.rows(text("SELECT id FROM chats")) == [{"id": new}]
    for table in ("folders", "messages", "runs"):
        assert await store.database.rows(text(f"SELECT count(*) AS n FROM {table}")) == [{"n": 0}]
    await store.deleted.restore("chat", LOCAL_USER, new)
    assert await store.deleted.purge() is None
    await store.close()


def _age(db: Connection, table: Table, id: str) -> None:
    db.execute(update(table).where(table.c.id == id).values(deleted_at=table.c.deleted_at - KEPT_S))


async def test_the_purge_wakes_when_something_is_due(tmp_path: Path, address: str | None) -> None:
    store = await Store.open(tmp_path, address)
    purging = asyncio.create_task(store.deleted.purge_when_due(0.02))
    chat = (await store.chats.create(LOCAL_USER))["id"]
    await store.deleted.delete("chat", LOCAL_USER, chat)
    async with asyncio.timeout(60):  # else it would wait for ever
        while await store.database.rows(text("SELECT id FROM chats")):
            await asyncio.sleep(0.005)
    assert not purging.done()
    purging.cancel()
    await store.close()
