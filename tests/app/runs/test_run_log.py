"""The log and the store beneath it, without HTTP or an engine."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import aclosing
from pathlib import Path

import pytest
import sqlalchemy
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config import AUTO_NAME, LOCAL_USER, BadSetting
from app.db.answer_steps import Usage
from app.db.migrations import newest_revision
from app.db.run_store import RESTART_GAP, Place, RunAnswer
from app.db.store import LoggedEvent, Store
from app.runs.event_log import Deltas, RunLog
from app.runs.events import AnswerDelta, RouteAnswering, RunCancelled, RunQueued, RunStarted
from app.runs.live_runs import RESTARTED, recover_runs
from tests.app import postgres

DATABASES = postgres.DATABASES

NO_USAGE = Usage(prompt_tokens=0, completion_tokens=0, reasoning_tokens=0, cached_tokens=0)


class NowhereStore:
    """Takes events and forgets them."""

    def write_events(self, run_id: str, events: Sequence[LoggedEvent], answer: RunAnswer | None = None) -> Future[None]:
        done = Future[None]()
        done.set_result(None)
        return done


@settings(max_examples=60)
@given(
    chunks=st.lists(st.lists(st.text(min_size=1, max_size=3), max_size=4), max_size=6),
    patience=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=2, max_size=2),
)
def test_readers_that_break_off_and_resume_lose_and_double_nothing(
    chunks: list[list[str]], patience: list[list[int]]
) -> None:
    async def main() -> None:
        log = RunLog("r", NowhereStore())

        async def read(lengths: list[int]) -> list[int]:
            seen: list[int] = []
            for length in itertools.cycle(lengths):
                async with aclosing(log.follow(seen[-1] if seen else 0)) as events:
                    async for event in events:
                        seen.append(event.seq)
                        length -= 1
                        if not length:
                            break
                if log.status != "running" and seen[-1] == log.last_seq:
                    break
            return seen

        readers = [asyncio.create_task(read(lengths)) for lengths in patience]
        for chunk in chunks:
            await asyncio.sleep(0)
            for text in chunk:
                log.append(AnswerDelta(text=text))
        log.append(RunCancelled(usage=NO_USAGE))
        log.append(AnswerDelta(text="too late"))
        expected = list(range(1, sum(map(len, chunks)) + 2))
        assert [await r for r in readers] == [expected, expected]

    asyncio.run(main())


async def test_the_first_delta_goes_at_once_and_the_rest_in_batches() -> None:
    log = RunLog("r", NowhereStore())
    deltas = Deltas(log)
    for letter in "abcd":
        deltas.add("answer", letter)
    await log.settled()
    assert [json.loads(e.data)["text"] for e in log.events] == ["a"]
    follow = log.follow(after=1)
    assert json.loads((await anext(follow)).data)["text"] == "bcd"
    deltas.add("thinking", "x")
    deltas.add("answer", "y")  # a change of part does not wait
    deltas.flush()
    await log.settled()
    assert [(e.type, json.loads(e.data)["text"]) for e in log.events[2:]] == [
        ("thinking.delta", "x"),
        ("answer.delta", "y"),
    ]


async def test_a_delta_says_which_of_its_characters_were_guessed() -> None:
    log = RunLog("r", NowhereStore())
    deltas = Deltas(log)
    deltas.add("answer", "a", guessed=True)
    for text, guessed in (("b", False), ("😀c", True), ("d", True), ("e", False), ("f", True)):
        deltas.add("answer", text, guessed=guessed)
    deltas.add("thinking", "x")
    deltas.add("answer", "y")
    deltas.flush()
    await log.settled()
    told = [(data["text"], data.get("guessed")) for data in (json.loads(event.data) for event in log.events)]
    assert told == [("a", [0, 1]), ("b😀cdef", [1, 4, 5, 6]), ("x", None), ("y", [])]


class SlowStore:
    """Writes when it is told to."""

    def __init__(self) -> None:
        self.writes: list[tuple[list[int], Future[None]]] = []

    def write_events(self, run_id: str, events: Sequence[LoggedEvent], answer: RunAnswer | None = None) -> Future[None]:
        self.writes.append(([event.seq for event in events], Future[None]()))
        return self.writes[-1][1]


async def test_readers_get_what_is_on_disk_and_a_slow_disk_gets_larger_pieces() -> None:
    store = SlowStore()
    log = RunLog("r", store)
    for text in "abcd":
        log.append(AnswerDelta(text=text))
    assert [seqs for seqs, _ in store.writes] == [[1]] and log.events == []
    store.writes[0][1].set_result(None)
    follow = log.follow()
    assert (await anext(follow)).seq == 1
    assert [seqs for seqs, _ in store.writes] == [[1], [2, 3, 4]]
    log.append(RunCancelled(usage=NO_USAGE))
    assert log.ended and log.status == "running"
    store.writes[1][1].set_exception(OSError("disk full"))  # who reads is not to wait for a disk that is full
    store.writes[2][1].set_result(None)
    assert [event.seq async for event in follow] == [2, 3, 4, 5] and log.status == "cancelled"


async def test_a_crash_leaves_runs_that_the_next_start_fails(tmp_path: Path, address: str | None) -> None:
    store = await Store.open(tmp_path, address)
    chat = await store.chats.create(LOCAL_USER)
    await store.runs.begin(LOCAL_USER, chat["id"], "run_1", Place("question", at_leaf=True), {})
    log = RunLog("run_1", store.runs)
    log.append(RunQueued(position=0))
    log.append(RunStarted(model=AUTO_NAME, started_at=1.0, max_tokens=9))
    log.append(RouteAnswering(model="small"))
    log.append(AnswerDelta(text="half an "))
    log.append(AnswerDelta(text="answer"))
    log.flush()
    await store.close()  # and no word of how the run ended

    store = await Store.open(tmp_path, address)
    restarted = LoggedEvent(0, RESTARTED.type, RESTARTED.model_dump_json())
    assert await store.runs.fail_unfinished(restarted, lambda events: recover_runs(events, "restarted")) == 1
    events = await store.runs.events("run_1")
    assert events[-1].type == "run.failed" and json.loads(events[-1].data)["code"] == "server_restarted"
    assert events[-1].seq == 5 + RESTART_GAP  # above any number that a reader saw before the crash
    answer = (await store.chats.whole(LOCAL_USER, chat["id"]))[1][1]
    assert (answer["status"], answer["content"], answer["error"]) == ("failed", "half an answer", "restarted")
    assert answer["model"] == "small", "`auto` wrote nothing"
    assert await store.runs.fail_unfinished(restarted, lambda events: recover_runs(events, "")) == 0
    await store.close()


async def test_one_process_holds_a_data_directory(tmp_path: Path, address: str | None) -> None:
    store = await Store.open(tmp_path, address)
    with pytest.raises(BadSetting, match="another Ponder"):
        await Store.open(tmp_path, address)
    await store.close()
    await (await Store.open(tmp_path, address)).close()


async def test_a_database_of_a_newer_ponder_is_left_alone(tmp_path: Path, address: str | None) -> None:
    store = await Store.open(tmp_path, address)
    later = newest_revision("chats") + 1
    if address is None:
        change = f"PRAGMA user_version = {later}"
    else:
        change = f"UPDATE alembic_version_chats SET version_num = '{later:04}'"
    await store.database.read(lambda db: db.exec_driver_sql(change))
    await store.close()
    with pytest.raises(BadSetting, match="newer Ponder"):
        await Store.open(tmp_path, address)


async def test_deleting_a_chat_deletes_all_of_it(tmp_path: Path, address: str | None) -> None:
    store = await Store.open(tmp_path, address)
    chat = await store.chats.create(LOCAL_USER)
    await store.runs.begin(LOCAL_USER, chat["id"], "run_1", Place("question", at_leaf=True), {})
    await store.deleted.delete("chat", LOCAL_USER, chat["id"])
    await store.deleted.purge(0)
    store.runs.write_events("run_1", [LoggedEvent(1, "run.queued", "{}")])  # a straggler
    index = ("text_index",) if address is None else ()
    for table in ("chats", "messages", "runs", "events", "texts", *index):
        assert await store.database.rows(sqlalchemy.text(f"SELECT count(*) AS n FROM {table}")) == [{"n": 0}]
    await store.close()
