"""A subscriber of K/V events: it learns what came before it, what it missed, and that a replica began anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from app.routing.event_subscriber import EventSubscriber
from app.routing.prefix_index import PrefixIndex, prefix_keys
from engine.config import KVEventsConfig
from engine.kv_cache.kv_event_publisher import KVEventPublisher
from tests.engine.kv_cache.test_kv_events import free_endpoint

TOKENS = list(range(8))
KEYS = prefix_keys(TOKENS, 2)
FIRST, SECOND, THIRD = (
    (b"%d" % at, b"%d" % (at - 1) if at else None, TOKENS[2 * at : 2 * at + 2], None) for at in range(3)
)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def following(
    config: KVEventsConfig, *, replays: bool = True
) -> AsyncIterator[tuple[EventSubscriber, PrefixIndex]]:
    index = PrefixIndex()
    subscriber = EventSubscriber("a", index, config.endpoint, config.replay_endpoint if replays else None)
    task = asyncio.create_task(subscriber.run())
    yield subscriber, index
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def known(index: PrefixIndex) -> int:
    return index.matches(KEYS, ["a"])["a"]


async def test_it_learns_what_was_published_before_it_came_and_after() -> None:
    config = KVEventsConfig(free_endpoint(), free_endpoint())
    publisher = KVEventPublisher(config, 2)
    publisher.publish([None])
    publisher.publish([FIRST])
    async with following(config) as (subscriber, index):
        await until(lambda: known(index) == 1)
        publisher.publish([SECOND])
        await until(lambda: known(index) == 2)
        assert subscriber.missed == 0
    await asyncio.to_thread(publisher.close)


async def test_a_replica_that_begins_anew_has_what_it_tells_then() -> None:
    config = KVEventsConfig(free_endpoint(), free_endpoint())
    publisher = KVEventPublisher(config, 2)
    for change in (None, FIRST, SECOND, THIRD):
        publisher.publish([change])
    async with following(config) as (_, index):
        await until(lambda: known(index) == 3)
        await asyncio.to_thread(publisher.close)
        again = KVEventPublisher(config, 2)
        again.publish([None])
        again.publish([FIRST])
        while known(index) != 1:  # until the subscription has reached the new publisher
            again.publish([(b"other", None, [50, 51], None)])
            await asyncio.sleep(0.05)
        assert index.blocks("a") == 2
    await asyncio.to_thread(again.close)


async def test_what_cannot_be_replayed_is_counted_and_what_was_known_before_forgotten() -> None:
    config = KVEventsConfig(free_endpoint(), free_endpoint(), buffer_steps=1)
    publisher = KVEventPublisher(config, 2)
    publisher.publish([None, FIRST])
    async with following(config) as (subscriber, index):
        await until(lambda: known(index) == 1)
        subscriber.forget()  # as where the replica could not be reached
        for change in (SECOND, THIRD):
            publisher.publish([change])
        await until(lambda: subscriber.missed > 0)
        assert known(index) == 0  # the parent of what came is unknown
        publisher.publish([None, FIRST, SECOND])
        await until(lambda: known(index) == 2)
    await asyncio.to_thread(publisher.close)


async def test_a_gap_without_a_replay_socket_begins_from_nothing() -> None:
    config = KVEventsConfig(free_endpoint())
    publisher = KVEventPublisher(config, 2)
    publisher._number = 3  # of batches that were sent before anybody subscribed
    async with asyncio.timeout(60), following(config) as (subscriber, index):
        while not subscriber.missed:
            publisher.publish([SECOND])
            await asyncio.sleep(0.02)
        assert subscriber.missed >= 3
        assert known(index) == 0 and index.blocks("a") == 0
        publisher.publish([None, FIRST])
        await until(lambda: known(index) == 1)
    await asyncio.to_thread(publisher.close)
