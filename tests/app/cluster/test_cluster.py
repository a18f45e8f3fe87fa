"""Servers of one database: who lives, who has a run, and what they tell each other, without HTTP or an engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from app.cluster import Cluster, open_store
from app.cluster.commands import CommandChannel, ServerSilent
from app.cluster.leases import LEASE_S
from app.cluster.redis_client import redis_client
from app.cluster.run_streams import MAX_ENTRIES, RunStreams
from app.config import LOCAL_USER, BadSetting, Settings, load_settings
from app.config.settings import changed_settings
from app.db.answer_steps import Usage
from app.db.run_store import RESTART_GAP, KeyTaken, LoggedEvent, Place, RunAnswer, RunKey
from app.db.sqlite import ChatBusy, RunTaken
from app.db.store import Store
from app.runs.event_log import RunLog
from app.runs.events import AnswerDelta, RunCancelled, RunQueued
from app.runs.live_runs import LOST, recover_runs
from app.runs.remote_runs import RemoteRunLog, RemoteRuns
from tests.app.cluster.redis_server import RedisServer, redis_server

NO_USAGE = Usage(prompt_tokens=0, completion_tokens=0, reasoning_tokens=0, cached_tokens=0)
CUT = LoggedEvent(9999, LOST.type, LOST.model_dump_json())


@pytest.fixture
async def stores(tmp_path: Path, schema: str) -> AsyncIterator[list[Store]]:
    """The stores of two servers of one database."""
    opened = [await Store.open(tmp_path / name, schema, shared=True) for name in ("a", "b")]
    yield opened
    for store in opened:
        await store.close()


@asynccontextmanager
async def joined(store: Store, redis: RedisServer) -> AsyncIterator[Cluster]:
    cluster = await Cluster.join(redis.address, store.database)
    try:
        yield cluster
    finally:
        await cluster.leave()


async def begun(store: Store, run: str = "run_1", **place: Any) -> str:
    """Begins a run in a new chat."""
    chat = str((await store.chats.create(LOCAL_USER))["id"])
    await store.runs.begin(LOCAL_USER, chat, run, Place("question", at_leaf=True, **place), {})
    return chat


async def taken(store: Store, server: str | None) -> dict[str, LoggedEvent]:
    terminal = LoggedEvent(0, LOST.type, LOST.model_dump_json())
    return await store.runs.take_over(server, terminal, lambda events: recover_runs(events, LOST.message))


# -- settings


def test_redis_needs_a_database_that_can_be_shared() -> None:
    with pytest.raises(BadSetting, match="database is not"):
        Settings(redis="redis://localhost").check_servers()
    Settings(redis="redis://localhost", database="postgresql://ponder@db.example/ponder").check_servers()


@pytest.mark.parametrize(
    "given",
    ["http://u:hunter2@h", "localhost:6379", "redis://", "unix://", "redis://:hunter2@", "redis://:hun/hunter2@h"],
)
def test_another_address_is_refused_without_being_shown(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PONDER_REDIS", given)
    with pytest.raises(BadSetting, match=r"^PONDER_REDIS .*accepted: the address of a Redis server") as told:
        load_settings()
    assert "hunter2" not in str(told.value)


def test_the_password_is_in_no_settings_that_are_shown() -> None:
    given = Settings(redis="redis://:hunter2@cache.example:6379/0")
    assert given.redis_address == "redis://:hunter2@cache.example:6379/0"
    shown = f"{given!r} {changed_settings(given)} {given.model_dump_json()} {given.model_dump()}"
    assert "hunter2" not in shown and changed_settings(given)["redis"] == "…"


async def test_without_a_redis_there_is_no_start(tmp_path: Path, schema: str) -> None:
    nobody = Settings(redis="redis://:hunter2@127.0.0.1:9/0", database=schema, data_dir=tmp_path)
    with pytest.raises(BadSetting, match="No Redis answers at the address of --redis") as told:
        await open_store(nobody)
    assert "hunter2" not in str(told.value)


async def test_without_its_client_redis_is_refused(
    tmp_path: Path, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(BadSetting, match=r"pip install 'ponder\[redis\]'"):
        await open_store(Settings(redis="redis://localhost", database=schema, data_dir=tmp_path))


# -- who has the database


async def test_members_share_a_database_with_nobody_else(tmp_path: Path, schema: str) -> None:
    first = await Store.open(tmp_path / "a", schema, shared=True)
    second = await Store.open(tmp_path / "b", schema, shared=True)
    assert first.database.member != second.database.member
    with pytest.raises(BadSetting, match="another Ponder is using it"):
        await Store.open(tmp_path / "c", schema)
    await first.close()
    await second.close()
    alone = await Store.open(tmp_path / "c", schema)
    with pytest.raises(BadSetting, match="a Ponder without --redis is using it"):
        await Store.open(tmp_path / "a", schema, shared=True)
    await alone.close()


async def test_a_member_is_seen_in_the_database_also_after_its_connection_was_lost(
    stores: list[Store], schema: str
) -> None:
    first, second = stores
    assert first.database.member and second.database.member
    names = [first.database.member, second.database.member, "server_nobody"]
    assert await first.runs.connected(names) == set(names[:2])
    (mine,) = await second.database.rows(text("SELECT pg_backend_pid() AS id"))
    with psycopg.connect(schema, autocommit=True) as operator:
        operator.execute("SELECT pg_terminate_backend(%s)", (mine["id"],))
        for _ in range(500):
            if await first.runs.connected(names) == {names[0]}:
                break
            await asyncio.sleep(0.01)
    assert await first.runs.connected(names) == {names[0]}
    with pytest.raises(Exception, match="terminat|closed"):
        await second.folders.of(LOCAL_USER)
    await second.folders.of(LOCAL_USER)
    assert await first.runs.connected(names) == set(names[:2])


async def test_a_server_is_lost_where_both_signs_of_life_are_gone(stores: list[Store], redis: RedisServer) -> None:
    async with joined(stores[0], redis) as first:
        both = [first.name, "server_gone"]

        async def nobody(names: Any) -> set[str]:
            return set()

        async def all_of_them(names: Any) -> set[str]:
            return set(names)

        assert await first.lost(both, nobody) == ["server_gone"]  # the first has a lease
        assert await first.lost(both, all_of_them) == []
    async with joined(stores[1], redis) as second:
        assert await second.lost([first.name], nobody) == [first.name], "a lease is given back"


async def test_without_redis_nobody_is_lost(stores: list[Store]) -> None:
    async def nobody(names: Any) -> set[str]:
        return set()

    with redis_server() as redis:
        async with joined(stores[0], redis) as first:
            assert await first.lost(["server_gone"], nobody) == ["server_gone"]
            redis.stop()
            assert await first.lost(["server_gone"], nobody) == []


async def test_a_lease_ends_and_is_renewed(stores: list[Store], redis: RedisServer) -> None:
    async with joined(stores[0], redis) as first:
        client = redis_client(redis.address)
        key = f"{first.namespace}:lease:{first.name}"
        assert 0 < await client.pttl(key) <= LEASE_S * 1000
        await client.pexpire(key, 100)
        await first.leases.renew()
        assert await client.pttl(key) > LEASE_S * 900
        await client.aclose()


# -- a run of one of them


async def test_a_chat_answers_one_question_at_all_servers(stores: list[Store]) -> None:
    first, second = stores
    chat = await begun(first)
    with pytest.raises(ChatBusy):
        await second.runs.begin(LOCAL_USER, chat, "run_2", Place("another", at_leaf=True), {})
    question = (await first.chats.whole(LOCAL_USER, chat))[1][0]["id"]
    await second.runs.begin(LOCAL_USER, chat, "run_2", Place(None, regenerate=question, compare=True), {})
    assert [run.id for run in (await first.runs.elsewhere([chat]))[chat]] == ["run_2"]
    assert sorted(await second.runs.unfinished_of(LOCAL_USER)) == ["run_1", "run_2"]
    assert await second.runs.unfinished_of("somebody else") == []


async def test_of_servers_that_ask_at_the_same_time_one_begins(stores: list[Store]) -> None:
    for number in range(8):
        chat = str((await stores[0].chats.create(LOCAL_USER))["id"])
        tries = (
            store.runs.begin(LOCAL_USER, chat, f"run_{number}_{at}", Place("?", at_leaf=True), {})
            for at, store in enumerate(stores)
        )
        outcomes = await asyncio.gather(*tries, return_exceptions=True)
        assert [type(each).__name__ for each in outcomes if isinstance(each, BaseException)] == ["ChatBusy"]


async def test_a_key_begins_one_run_at_all_servers(stores: list[Store]) -> None:
    first, second = stores
    key = RunKey("key", "body")
    chat = str((await first.chats.create(LOCAL_USER))["id"])
    await first.runs.begin(LOCAL_USER, chat, "run_1", Place("?", at_leaf=True), {}, key)
    with pytest.raises(KeyTaken):
        await second.runs.begin(LOCAL_USER, chat, "run_2", Place("?", at_leaf=True), {}, key)
    found = await second.run_keys.run_of(LOCAL_USER, key)
    assert found is not None and found.run_id == "run_1"


async def test_a_run_that_was_taken_over_gets_nothing_more(stores: list[Store]) -> None:
    first, second = stores
    chat = await begun(first)
    lost = list[str]()
    log = RunLog("run_1", first.runs, on_taken=lambda: lost.append("run_1"))
    log.append(RunQueued(position=0))
    log.append(AnswerDelta(text="half an "))
    log.append(AnswerDelta(text="answer"))
    await log.settled()
    (ending,) = (await taken(second, first.database.member)).values()
    assert ending.seq == 3 + RESTART_GAP
    log.append(AnswerDelta(text=" and too late"))
    await log.settled()
    assert lost == ["run_1"] and log.taken and log.last_seq == 3, "what could not be written is shown to nobody"
    assert [event.seq async for event in log.follow()] == [1, 2, 3]
    ended = first.runs.write_events("run_1", [], RunAnswer("completed", "another", ""))
    with pytest.raises(RunTaken):
        await asyncio.wrap_future(ended)
    assert [event.seq for event in await first.runs.events("run_1")] == [1, 2, 3, 3 + RESTART_GAP]
    answer = (await second.chats.whole(LOCAL_USER, chat))[1][1]
    assert (answer["status"], answer["content"], answer["error"]) == ("failed", "half an answer", LOST.message)


async def test_one_alone_takes_a_run_over(tmp_path: Path, schema: str, stores: list[Store]) -> None:
    gone = await Store.open(tmp_path / "gone", schema, shared=True)
    for number in range(6):
        await begun(gone, f"run_{number}")
    await gone.close()
    both = await asyncio.gather(*(taken(store, gone.database.member) for store in stores))
    assert sorted([*both[0], *both[1]]) == [f"run_{number}" for number in range(6)]
    for number in range(6):
        assert [each.type for each in await stores[0].runs.events(f"run_{number}")] == ["run.failed"]
    assert await taken(stores[0], gone.database.member) == {}


async def test_runs_of_servers_that_live_are_nobody_elses(stores: list[Store]) -> None:
    first, second = stores
    await begun(first)
    assert await second.runs.owners() == {first.database.member}
    assert await first.runs.owners() == set()
    assert await taken(second, None) == {}
    assert (await second.runs.get(LOCAL_USER, "run_1"))["status"] == "running"


async def test_what_a_run_elsewhere_waits_for(stores: list[Store]) -> None:
    first, second = stores
    chat = await begun(first)
    for seq, (kind, waits) in enumerate(
        [("approval.requested", "approval"), ("approval.resolved", None), ("question.asked", "answer")], 1
    ):
        await asyncio.wrap_future(first.runs.write_events("run_1", [LoggedEvent(seq, kind, "{}")]))
        assert await second.runs.elsewhere([chat]) == {chat: [("run_1", first.database.member, waits)]}


async def test_writers_that_come_together_are_tried_again(stores: list[Store]) -> None:
    """Both read how many folders there are, and name theirs by it: with one snapshot each they would take one name."""
    store = stores[0]

    async def create(store: Store) -> None:
        for number in range(30):
            await store.folders.create(LOCAL_USER, f"{store.database.member} {number}")

    chat = str((await store.chats.create(LOCAL_USER))["id"])

    async def rename(store: Store) -> None:
        for number in range(30):
            await store.chats.change(LOCAL_USER, chat, {"title": f"{number}"})

    await asyncio.gather(*(work(store) for store in stores for work in (create, rename)))
    assert len(await store.folders.of(LOCAL_USER)) == 60


# -- what they tell each other


def remote_log(store: Store, cluster: Cluster, user: str = LOCAL_USER, run: str = "run_1") -> RemoteRunLog:
    return RemoteRunLog(user, run, store.runs, cluster.streams, [], CUT)


async def test_readers_elsewhere_lose_and_double_nothing(stores: list[Store], redis: RedisServer) -> None:
    first, second = stores
    async with joined(first, redis) as mine, joined(second, redis) as theirs:
        chat = await begun(first)
        log = RunLog("run_1", first.runs, publish=mine.streams.publish)

        async def read(each: int) -> list[int]:
            """Follows, and breaks off after `each` events, again and again."""
            seen: list[int] = []
            while True:
                count = 0
                async for event in remote_log(second, theirs).follow(seen[-1] if seen else 0):
                    seen.append(event.seq)
                    count += 1
                    if event.type == "run.cancelled":
                        return seen
                    if count == each:
                        break

        readers = [asyncio.create_task(read(each)) for each in (1, 7, 10_000)]
        for number in range(300):
            log.append(AnswerDelta(text=str(number)))
            if number % 10 == 0:
                await asyncio.sleep(0.002)
        log.append(RunCancelled(usage=NO_USAGE), RunAnswer("cancelled", "all of it", ""))
        for reader in readers:
            assert await asyncio.wait_for(reader, 30) == list(range(1, 302))
        answer = (await second.chats.whole(LOCAL_USER, chat))[1][1]
        assert (answer["status"], answer["content"]) == ("cancelled", "all of it")
        assert await second.runs.unfinished_of(LOCAL_USER) == []


async def test_what_the_stream_lacks_comes_from_the_database(stores: list[Store], redis: RedisServer) -> None:
    """Trimmed, never sent, or sent twice: the numbers tell."""
    first, second = stores
    async with joined(first, redis) as mine, joined(second, redis) as theirs:
        await begun(first)
        events = [LoggedEvent(seq, "answer.delta", json.dumps({"text": str(seq)})) for seq in range(1, 8)]
        events.append(LoggedEvent(8, "run.completed", "{}"))

        async def write(*numbers: int, published: bool) -> None:
            made = [events[number - 1] for number in numbers]
            await asyncio.wrap_future(first.runs.write_events("run_1", made))
            if published:
                mine.streams.publish("run_1", made)

        seen = list[int]()

        async def read() -> None:
            async for event in remote_log(second, theirs).follow():
                seen.append(event.seq)

        reading = asyncio.create_task(read())
        await write(1, 2, published=True)
        await write(3, 4, published=False)
        mine.streams.publish("run_1", events[:2])  # once more
        await write(5, 6, published=True)
        await asyncio.sleep(0.1)
        await write(7, 8, published=False)
        await asyncio.wait_for(reading, 20)
        assert seen == list(range(1, 9))
        assert [event.seq async for event in remote_log(second, theirs).follow(6)] == [7, 8]
        assert [event.seq async for event in remote_log(second, theirs, user="bob").follow(8)] == []


async def test_readers_elsewhere_go_on_without_redis(stores: list[Store]) -> None:
    first, second = stores
    with redis_server() as redis:
        async with joined(first, redis) as mine, joined(second, redis) as theirs:
            await begun(first)
            log = RunLog("run_1", first.runs, publish=mine.streams.publish)
            log.append(AnswerDelta(text="with"))
            follow = remote_log(second, theirs).follow()
            assert (await anext(follow)).seq == 1
            redis.stop()
            log.append(AnswerDelta(text="without"))
            assert (await asyncio.wait_for(anext(follow), 10)).seq == 2
            redis.start()  # it is empty
            await asyncio.sleep(0.2)
            log.append(AnswerDelta(text="with again"))
            log.append(RunCancelled(usage=NO_USAGE), RunAnswer("cancelled", "", ""))
            assert [event.seq async for event in follow] == [3, 4]


async def test_readers_elsewhere_leave_a_server_that_stops(stores: list[Store], redis: RedisServer) -> None:
    first, second = stores
    async with joined(first, redis) as mine, joined(second, redis) as theirs:
        await begun(first)
        runs = RemoteRuns(theirs, second.runs, LOST)
        log = RunLog("run_1", first.runs, publish=mine.streams.publish)
        log.append(AnswerDelta(text="a"))
        await log.settled()
        follow = runs.log(LOCAL_USER, "run_1", []).follow()
        assert (await anext(follow)).seq == 1
        runs.closing = True
        assert await asyncio.wait_for(anext(follow, None), 10) is None


async def test_a_server_leaves_at_any_moment_of_its_calls(
    stores: list[Store], redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis's client loses a cancellation that comes just as something was sent, before Python 3.12."""
    monkeypatch.setattr("app.cluster.cluster.RENEW_S", 0.0)
    for turns in range(10):
        cluster = await Cluster.join(redis.address, stores[0].database)
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await cluster.leave()
        assert all(task.done() for task in cluster._tasks)


async def test_a_stream_keeps_the_newest_for_a_while(redis: RedisServer) -> None:
    client = redis_client(redis.address)
    streams = RunStreams(client, "bounded")
    sending = asyncio.create_task(streams.send_all())
    for at in range(0, 5 * MAX_ENTRIES, 100):
        streams.publish("run", [LoggedEvent(seq, "answer.delta", "{}") for seq in range(at + 1, at + 101)])
    key, last = "bounded:events:run", f"{5 * MAX_ENTRIES}-0"
    async with asyncio.timeout(10):
        while not (found := await client.xrevrange(key, count=1)) or found[0][0] != last:
            await asyncio.sleep(0.01)
    assert MAX_ENTRIES <= await client.xlen(key) < 2 * MAX_ENTRIES and await client.pttl(key) > 0
    sending.cancel()
    await client.aclose()


async def test_a_command_is_carried_out_once_and_answered(redis: RedisServer) -> None:
    client, heard = redis_client(redis.address), list[str]()

    async def obey(command: str) -> str:
        heard.append(command)
        return command.upper()

    mine, theirs = CommandChannel(client, "commands", "a"), CommandChannel(client, "commands", "b")
    serving = asyncio.create_task(theirs.serve(obey))
    assert await asyncio.gather(*(mine.call("b", text) for text in "xyz")) == ["X", "Y", "Z"]
    assert sorted(heard) == ["x", "y", "z"]
    serving.cancel()
    await client.aclose()


async def test_a_server_that_is_silent_is_told(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.cluster.commands.REPLY_S", 0.2)
    client = redis_client(redis.address)
    with pytest.raises(ServerSilent):
        await CommandChannel(client, "silent", "a").call("nobody", "hello")
    await client.aclose()
