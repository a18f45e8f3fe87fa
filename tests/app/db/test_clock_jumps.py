"""The wall clock is set by a day while the server runs: nothing that waits ends early, late or never."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Connection

from app.admission.rate_limits import KeyLimits, RateWindows
from app.auth import LoginThrottle
from app.db.connection import insert
from app.db.run_store import RunKey, remember
from app.db.sqlite import NotThere
from app.db.store import Store
from app.db.tables import messages, runs
from app.sequences.leased import Lease
from tests.app import postgres

DATABASES = postgres.DATABASES

DAY_S = 86_400.0
Jump = Callable[[float], None]
both_ways = pytest.mark.parametrize("by_s", [DAY_S, -DAY_S])


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Jump:
    """Sets the wall clock; the monotonic one goes on."""
    real = time.time

    def set_by(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + seconds)

    return set_by


@both_ways
def test_a_key_at_its_limit_waits_a_minute_at_most(jump: Jump, by_s: float) -> None:
    rates = RateWindows()
    rates.spend("key", 100)
    assert not rates.request("key", 1) and rates.request("key", 1) > 0
    jump(by_s)
    assert 0 <= rates.request("key", 1) < 61
    assert 0 <= rates.wait_s("key", 100, 50) < 121
    for window in rates.windows("key", KeyLimits(requests=1, tokens=100)):
        assert 0 <= window.reset_s < 121
    assert rates.request("key", 1) > 0  # and counts again


@both_ways
async def test_a_lease_says_how_long_it_has_left(jump: Jump, by_s: float) -> None:
    ended = asyncio.Event()
    lease = Lease(100.0, ended.set)
    jump(by_s)
    left = lease.expires_at
    assert left is not None and 95 < left - time.time() <= 100
    lease.end()
    short = Lease(0.05, ended.set)
    jump(-by_s)
    await asyncio.wait_for(ended.wait(), 20)
    short.end()


@both_ways
async def test_a_deleted_chat_may_come_back_as_long_as_was_said(
    jump: Jump, by_s: float, tmp_path: Path, address: str | None
) -> None:
    store = await Store.open(tmp_path, address)
    try:
        chat = await store.chats.create("ana")
        await store.deleted.delete("chat", "ana", chat["id"])
        jump(by_s)
        due_s = await store.deleted.purge()
        assert due_s is not None and 0 < due_s <= 600
        await store.deleted.restore("chat", "ana", chat["id"])
        await store.deleted.delete("chat", "ana", chat["id"])
        assert await store.deleted.purge(0.0) is None
        with pytest.raises(NotThere):
            await store.deleted.restore("chat", "ana", chat["id"])
    finally:
        await store.close()


@both_ways
async def test_an_idempotency_key_is_known_for_its_day(
    jump: Jump, by_s: float, tmp_path: Path, address: str | None
) -> None:
    store = await Store.open(tmp_path, address)
    key = RunKey("key", "body")
    try:
        chat = (await store.chats.create("ana"))["id"]

        def begin(db: Connection) -> None:
            run = {"id": "run", "chat_id": chat, "message_id": "message", "status": "completed", "params": "{}"}
            insert(db, runs, {**run, "created_at": 0.0})
            message = {"id": "message", "chat_id": chat, "position": 1, "role": "assistant", "content": ""}
            insert(db, messages, {**message, "status": "completed", "created_at": 0.0, "parent_id": "question"})
            remember(db, "ana", key, "run", "message")

        await store.database.read(begin)
        jump(by_s)
        started = await store.run_keys.run_of("ana", key)
        assert started is not None and started.run_id == "run"
    finally:
        await store.close()


@both_ways
def test_attempts_wait_as_long_as_they_did(jump: Jump, by_s: float) -> None:
    attempts = LoginThrottle()
    for _ in range(6):
        attempts.failed("203.0.113.1")
    before = attempts.wait_s("203.0.113.1", "hash")
    jump(by_s)
    assert 0 < attempts.wait_s("203.0.113.1", "hash") <= before
