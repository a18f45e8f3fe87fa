"""Idempotency keys: a run that is asked for again is the same run, whoever loses whose answer on the way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection, update

from app.config import LOCAL_USER
from app.db.run_store import KEPT_S, Place, RunKey
from app.db.sqlite import KeyReused
from app.db.store import Store
from app.db.tables import run_keys
from tests.app import postgres
from tests.app.chatting import log_of, new_chat, read
from tests.app.conftest import Server
from tests.app.library import error
from tests.app.runs.test_runs import BusyEngine

DATABASES = postgres.DATABASES_SLOW


@pytest.fixture
def chat(ana: httpx.Client) -> str:
    return new_chat(ana)


def send(http: httpx.Client, chat: str, key: str, content: str = "one", **fields: Any) -> httpx.Response:
    body = {"content": content, "max_tokens": 2, **fields}
    return http.post(f"/api/chats/{chat}/runs", json=body, headers={"Idempotency-Key": key})


def test_the_same_request_gives_the_same_run(ana: httpx.Client, chat: str) -> None:
    first, again = send(ana, chat, "k"), send(ana, chat, "k")
    assert first.status_code == again.status_code == 202 and first.json() == again.json()
    log_of(ana, first.json()["run_id"])
    assert send(ana, chat, "k").json() == first.json()  # and when it has ended
    assert len(read(ana, chat)["messages"]) == 2
    assert send(ana, chat, "another").json() != first.json()


def test_a_run_is_found_by_its_key_while_the_chat_is_busy_with_it(ana: httpx.Client, chat: str, shelf: Server) -> None:
    with BusyEngine(shelf):
        first = send(ana, chat, "k")
        assert send(ana, chat, "k").json() == first.json()
        error(send(ana, chat, "another"), 409, "chat_busy")
    log_of(ana, first.json()["run_id"])
    assert send(ana, chat, "another").status_code == 202  # a refusal is not remembered


def test_another_request_with_the_key_is_refused(ana: httpx.Client, chat: str) -> None:
    assert send(ana, chat, "k").status_code == 202
    message = error(send(ana, chat, "k", "two"), 409, "idempotency_key_reused", "Idempotency-Key")
    assert "accepted" in message
    error(send(ana, chat, "k", temperature=0), 409, "idempotency_key_reused", "Idempotency-Key")
    error(send(ana, new_chat(ana), "k"), 409, "idempotency_key_reused", "Idempotency-Key")


def test_requests_that_come_together_make_one_run(ana: httpx.Client, chat: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: send(ana, chat, "k"), range(8)))
    assert {reply.status_code for reply in replies} == {202}
    assert len({reply.json()["run_id"] for reply in replies}) == 1
    assert len(read(ana, chat)["messages"]) == 2


def test_a_key_is_its_users_own(ana: httpx.Client, bob: httpx.Client, chat: str) -> None:
    first, other = send(ana, chat, "k"), send(bob, new_chat(bob), "k")
    assert other.status_code == 202 and other.json()["run_id"] != first.json()["run_id"]


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "é".encode("latin-1").decode("latin-1")])
def test_a_key_that_is_none_is_refused(ana: httpx.Client, chat: str, key: str) -> None:
    headers = [(b"Idempotency-Key", key.encode("latin-1"))]
    reply = ana.post(f"/api/chats/{chat}/runs", json={"content": "x"}, headers=headers)
    error(reply, 400, "invalid_value", "Idempotency-Key")
    assert read(ana, chat)["messages"] == []


def test_two_keys_are_refused(ana: httpx.Client, chat: str) -> None:
    headers = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    reply = ana.post(f"/api/chats/{chat}/runs", json={"content": "x"}, headers=headers)
    error(reply, 400, "invalid_value", "Idempotency-Key")
    assert read(ana, chat)["messages"] == []


async def test_keys_outlast_a_restart_and_end_after_a_day(tmp_path: Path, address: str | None) -> None:
    store = await Store.open(tmp_path, address)
    chat = (await store.chats.create(LOCAL_USER))["id"]
    key = RunKey("k", "digest")
    begun = await store.runs.begin(LOCAL_USER, chat, "run_1", Place("question", at_leaf=True), {}, key)
    await store.close()
    store = await Store.open(tmp_path, address)
    assert await store.run_keys.run_of(LOCAL_USER, key) == ("run_1", begun.message_id, begun.branch[-1]["id"])
    assert await store.run_keys.run_of("another", key) is None
    with pytest.raises(KeyReused):
        await store.run_keys.run_of(LOCAL_USER, RunKey("k", "other"))
    store.database.write(lambda db: _age(db, KEPT_S))
    assert await store.run_keys.run_of(LOCAL_USER, key) is None
    await store.runs.begin(LOCAL_USER, chat, "run_2", Place("again", parent_id=None), {}, key)
    assert (await store.run_keys.run_of(LOCAL_USER, key) or ("", ""))[0] == "run_2"
    await store.deleted.delete("chat", LOCAL_USER, chat)
    assert await store.run_keys.run_of(LOCAL_USER, key) is None
    await store.close()


def _age(db: Connection, by_s: float) -> None:
    db.execute(update(run_keys).values(created_at=run_keys.c.created_at - by_s))
