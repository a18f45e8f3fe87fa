"""Engines that share a K/V store: the same tokens with what another one computed, whatever happens to the store."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, InvalidParameter, Sampling, Span
from engine.config import KVTransferConfig
from engine.kv_cache.kv_store import client as client_module
from engine.kv_cache.kv_store.block_images import BlockImages
from engine.kv_cache.kv_store.connector import KVStoreConnector
from engine.kv_cache.kv_store.server import KVStoreServer
from engine.kv_cache.snapshot import Bytes
from tests.engine.kv_apart import SIZE, SPAN, answer, exchanged, free_port, prompt, together, until
from tests.engine.kv_cache.kv_store.conftest import SECRET

BLOCKS = 150 // SIZE
PEBBLE = Path(__file__).resolve().parents[4] / "models" / "pebble"


def stored(config: EngineConfig, transfer: KVTransferConfig, *servers: KVStoreServer, **options: Any) -> EngineConfig:
    """Configuration of an engine that uses these stores."""
    stores = tuple(f"127.0.0.1:{each.port}" for each in servers)
    using = replace(transfer, kv_connector="KVStoreConnector", stores=stores, peers=(), lookup_timeout_s=5.0)
    return replace(config, kv_transfer=replace(using, **options))


def connector(engine: Engine) -> KVStoreConnector:
    found = engine._core._connector
    assert isinstance(found, KVStoreConnector)
    return found


async def saved(engine: Engine) -> None:
    """Waits until nothing is on its way to a store."""
    made = connector(engine)
    await until(lambda: not made._queued and not made._in_flight)


async def computed(engine: Engine) -> int:
    return (await engine.stats()).prompt_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "span",
    [SPAN, Span(Sampling(temperature=1.0, seed=5), max_tokens=12, ignore_eos=True)],
    ids=["greedy", "seeded"],
)
async def test_a_prefix_of_2000_tokens_is_a_hit_at_another_engine(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer, span: Span
) -> None:
    long = replace(plain, model=str(PEBBLE), dtype="auto", block_size=16, max_batch_tokens=256)
    expected = await together(long, prompt(2010), span)
    config = stored(long, transfer, store)
    async with await Engine.start(config) as first, await Engine.start(config) as second:
        assert await answer(first, prompt(2010), span) == expected
        await saved(first)
        assert await answer(second, prompt(2010), span) == expected
        received = await exchanged(second)
        assert received.received_blocks == 2010 // 16 and received.failed_loads == 0
        assert await computed(second) <= 0.05 * 2010
        for each in (first, second):
            each._core.check()
            assert (await each.stats()).blocks_used == 0


async def test_a_hit_outlives_the_engine_that_computed_it(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer
) -> None:
    expected = await together(plain, prompt())
    config = stored(plain, transfer, store)
    async with await Engine.start(config) as first:
        assert await answer(first, prompt()) == expected
        await saved(first)
    async with await Engine.start(config) as second:
        assert await answer(second, prompt()) == expected
        assert (await exchanged(second)).received_blocks == BLOCKS
        await saved(second)
        assert (await exchanged(second)).sent_blocks == 0  # all of it is there
    assert store.images.stats().put == BLOCKS + 3


async def test_answers_are_saved_too_so_that_a_chat_goes_on_elsewhere(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer
) -> None:
    config = stored(plain, transfer, store)
    async with await Engine.start(config) as first, await Engine.start(config) as second:
        reply = await answer(first, prompt(), replace(SPAN, max_tokens=40))
        await saved(first)
        chat = [*prompt(), *reply, *prompt(10, text=3)]
        assert await answer(second, chat) == await together(plain, chat)
        assert (await exchanged(second)).received_blocks >= (150 + 39) // SIZE


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
async def test_a_producer_saves_alone_and_a_consumer_loads_alone(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer, role: str
) -> None:
    both, one = stored(plain, transfer, store), stored(plain, transfer, store, kv_role=role)
    async with await Engine.start(both) as first, await Engine.start(one) as second:
        await answer(first, prompt())
        await saved(first)
        put = store.images.stats().put
        await answer(second, prompt())
        await answer(second, prompt(text=1))
        await saved(second)
        loads = role == "kv_consumer"
        assert ((await exchanged(second)).received_blocks > 0) == loads
        assert (store.images.stats().put > put) == (not loads)


async def test_tenants_and_other_models_numbers_share_a_store_and_no_block(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer
) -> None:
    config = stored(plain, transfer, store)
    async with await Engine.start(config) as first, await Engine.start(config) as second:
        await answer(first, prompt(), tenant="alice")
        await saved(first)
        assert await answer(second, prompt(), tenant="bob") == await together(plain, prompt())
        assert (await exchanged(second)).received_blocks == 0
        await answer(second, prompt(), tenant="alice")
        assert (await exchanged(second)).received_blocks == BLOCKS
    for changed in ({"block_size": 8}, {"dtype": "bfloat16"}, {"kv_dtype": "int8"}, {"max_model_len": 400}):
        other = replace(plain, **changed)
        async with await Engine.start(stored(other, transfer, store)) as engine:
            assert await answer(engine, prompt(), tenant="alice") == await together(other, prompt()), changed
            assert (await exchanged(engine)).received_blocks == 0, changed


async def test_blocks_that_left_the_pool_come_back_from_the_store(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer
) -> None:
    """A tier below a pool that is too small, with one engine alone."""
    expected = await together(plain, prompt())
    async with await Engine.start(stored(replace(plain, kv_blocks=64), transfer, store)) as engine:
        for text in (0, 1, 2, 3):  # 37 blocks each
            await answer(engine, prompt(text=text))
            await saved(engine)
        assert await answer(engine, prompt()) == expected
        assert (await exchanged(engine)).received_blocks > BLOCKS // 2
        engine._core.check()


async def test_a_short_staging_buffer_delays_blocks_and_loses_none(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer
) -> None:
    async with await Engine.start(stored(plain, transfer, store)) as engine:
        nbytes = connector(engine)._nbytes
    config = stored(plain, transfer, store, kv_buffer_size=2 * nbytes)
    async with await Engine.start(config) as engine:
        await answer(engine, prompt())
        await saved(engine)
        assert store.images.stats().put == BLOCKS + 3
        assert sorted(connector(engine)._free_rows) == [0, 1]


async def test_an_engine_that_stops_saves_what_waits(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, slow = store.images.put, threading.Event()

    def put(layout: bytes, digest: bytes, image: Bytes) -> bool:
        slow.wait(0.005)
        return kept(layout, digest, image)

    monkeypatch.setattr(store.images, "put", put)
    engine = await Engine.start(stored(plain, transfer, store, kv_buffer_size=1 << 14))  # five blocks
    await answer(engine, prompt())
    assert connector(engine)._queued
    await engine.stop()
    assert store.images.stats().put == BLOCKS + 3
    threads = [each.name for each in threading.enumerate() if each.name.startswith("kv-store")]
    assert threads == ["kv-store-listen"]  # the store's own


async def test_what_came_from_a_store_is_not_saved_to_it(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer
) -> None:
    config = stored(plain, transfer, store)
    async with await Engine.start(config) as first, await Engine.start(config) as second:
        await answer(first, prompt())
        await saved(first)
        rows = connector(second)._free_rows.copy()
        await answer(second, prompt())
        await saved(second)
        moved = sum(now != before for now, before in zip(connector(second)._free_rows, rows, strict=True))
        assert (await exchanged(second)).received_blocks == BLOCKS
        assert connector(second)._free_rows[0] == rows[3] and moved  # three rows were used, for the answer


async def test_a_store_that_starts_again_empty_is_given_what_is_used_again(
    plain: EngineConfig, transfer: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "RETRY_S", 0.05)
    server = KVStoreServer(BlockImages(64 << 20), SECRET, "127.0.0.1", 0)
    async with await Engine.start(stored(plain, transfer, server)) as engine:
        await answer(engine, prompt())
        await saved(engine)
        await asyncio.to_thread(server.close)
        await answer(engine, prompt(text=1))  # finds out that it is gone
        await until(lambda: connector(engine)._client.up == 0)
        again = KVStoreServer(BlockImages(64 << 20), SECRET, "127.0.0.1", server.port)
        await until(lambda: connector(engine)._client.up == 1)
        await answer(engine, prompt())
        await saved(engine)
        assert again.images.stats().put >= BLOCKS + 3
        again.close()


async def test_twins_wait_for_one_load(plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer) -> None:
    expected = await together(plain, prompt())
    config = stored(plain, transfer, store)
    async with await Engine.start(config) as first, await Engine.start(config) as second:
        await answer(first, prompt())
        await saved(first)
        assert await asyncio.gather(*(answer(second, prompt()) for _ in range(3))) == [expected] * 3
        received = await exchanged(second)
        assert received.received_blocks == BLOCKS and received.lookups <= 3
        second._core.check()


# -- a store that is slow, wrong or gone


def gate(
    monkeypatch: pytest.MonkeyPatch, images: BlockImages, name: str, after: int
) -> tuple[threading.Event, threading.Event]:
    """Has a store stop for an event within its `after`-th block."""
    reached, go_on, count, kept = threading.Event(), threading.Event(), [0], getattr(images, name)

    def slow(layout: bytes, digest: bytes) -> Any:
        count[0] += 1
        if count[0] == after:
            reached.set()
            go_on.wait(30)
        return kept(layout, digest)

    monkeypatch.setattr(images, name, slow)
    return reached, go_on


async def test_others_run_while_a_load_waits(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await together(plain, prompt())
    config = stored(plain, transfer, store, timeout_s=25.0)
    async with await Engine.start(config) as first, await Engine.start(config) as second:
        await answer(first, prompt())
        await saved(first)
        reached, go_on = gate(monkeypatch, store.images, "get", 5)
        waiting = asyncio.create_task(answer(second, prompt()))
        assert await asyncio.to_thread(reached.wait, 20)
        assert len(await answer(second, prompt(20, text=9))) == 12  # it runs from beginning to end
        assert not waiting.done()
        go_on.set()
        assert await waiting == expected
        assert (await exchanged(second)).received_blocks == BLOCKS


async def test_a_store_that_ends_in_the_midst_of_a_load_leaves_what_came(
    plain: EngineConfig, transfer: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await together(plain, prompt())
    server = KVStoreServer(BlockImages(64 << 20), SECRET, "127.0.0.1", 0)
    config = stored(plain, transfer, server)
    async with await Engine.start(config) as first, await Engine.start(config) as second:
        await answer(first, prompt())
        await saved(first)
        reached, go_on = gate(monkeypatch, server.images, "get", 10)
        waiting = asyncio.create_task(answer(second, prompt()))
        assert await asyncio.to_thread(reached.wait, 20)
        monkeypatch.setattr("engine.kv_cache.kv_store.server.END_S", 0.1)
        await asyncio.to_thread(server.close)
        assert await waiting == expected
        go_on.set()
        received = await exchanged(second)
        assert 0 < received.received_blocks < BLOCKS and received.failed_loads == 1
        assert connector(second)._client.up == 0
        assert await answer(second, prompt(text=1)) == await together(plain, prompt(text=1))
        assert (await exchanged(second)).failed_loads == 1  # it was left alone
        second._core.check()


@pytest.mark.parametrize("name", ["exists", "get"])
async def test_a_store_that_is_slow_costs_a_request_its_stated_time(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expected = await together(plain, prompt())
    config = stored(plain, transfer, store)
    bound = {"lookup_timeout_s": 0.2} if name == "exists" else {"timeout_s": 0.2}
    second_config = stored(plain, transfer, store, **bound)
    async with await Engine.start(config) as first, await Engine.start(second_config) as second:
        await answer(first, prompt())
        await saved(first)
        _, go_on = gate(monkeypatch, store.images, name, 3)
        began = time.monotonic()
        assert await answer(second, prompt()) == expected
        took = time.monotonic() - began
        go_on.set()
        received = await exchanged(second)
        assert received.failed_loads == 1 and 0.2 <= took < 10  # the store would have taken 30
        assert connector(second)._client.up == 0


async def test_a_store_that_is_away_at_the_start_is_used_once_it_is_there(
    plain: EngineConfig, transfer: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "RETRY_S", 0.05)
    using = replace(transfer, kv_connector="KVStoreConnector", peers=(), stores=(f"127.0.0.1:{(port := free_port())}",))
    async with await Engine.start(replace(plain, kv_transfer=using)) as engine:
        assert await answer(engine, prompt()) == await together(plain, prompt())
        assert (await exchanged(engine)).lookups == 0
        server = KVStoreServer(BlockImages(64 << 20), SECRET, "127.0.0.1", port)
        await until(lambda: connector(engine)._client.up == 1)
        await answer(engine, prompt())  # found in the pool, and saved now
        await saved(engine)
        assert server.images.stats().put == BLOCKS + 3
        server.close()


def _cut(image: bytes) -> bytes:
    return image[:-1] + bytes([image[-1] ^ 1])


@pytest.mark.parametrize(
    "changed",
    [
        _cut,
        lambda image: b"noise" * (len(image) // 5) + bytes(len(image) % 5),
        lambda image: image[:8] + image[9:] + b"!",
    ],
    ids=["payload", "noise", "shifted"],
)
async def test_corrupt_bytes_are_refused_recomputed_and_replaced(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer, changed: Callable[[bytes], bytes]
) -> None:
    expected = await together(plain, prompt())
    config = stored(plain, transfer, store)
    async with (
        await Engine.start(config) as first,
        await Engine.start(config) as second,
        await Engine.start(config) as third,
    ):
        await answer(first, prompt())
        await saved(first)
        images = store.images._memory
        fourth = list(images)[3]
        images[fourth] = changed(images[fourth])
        assert await answer(second, prompt()) == expected
        received = await exchanged(second)
        assert (received.received_blocks, received.failed_loads) == (3, 1)
        await saved(second)
        assert await answer(third, prompt()) == expected  # the block was put anew
        assert (await exchanged(third)).received_blocks == BLOCKS


async def test_closing_a_sequence_that_waits_ends_its_load_and_not_the_store(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stored(plain, transfer, store, timeout_s=25.0)
    async with await Engine.start(config) as first, await Engine.start(config) as second:
        await answer(first, prompt())
        await saved(first)
        reached, go_on = gate(monkeypatch, store.images, "get", 5)
        seq = await second.open(prompt())
        running = asyncio.create_task(seq.generate_all(SPAN))
        assert await asyncio.to_thread(reached.wait, 20)
        seq.close()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: not connector(second)._loads)
        go_on.set()
        assert (await exchanged(second)).failed_loads == 0 and connector(second)._client.up == 1
        second._core.check()


async def test_a_load_that_seems_slower_than_computing_is_passed_over(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer
) -> None:
    config = stored(plain, transfer, store)
    async with await Engine.start(config) as first, await Engine.start(config) as second:
        await answer(first, prompt())
        await saved(first)
        await answer(second, prompt(text=1), replace(SPAN, max_tokens=1))  # it knows a token's time now
        connector(second)._client._lookup_s = 1e6
        before = (await exchanged(second)).lookups
        await answer(second, prompt())
        passed = await exchanged(second)
        assert passed.lookups == before and passed.passed_over_blocks >= BLOCKS
        assert connector(second)._client._lookup_s < 1e6  # it is tried again at some time


async def test_forks_and_adapters_of_a_loaded_prefix_go_on_alike(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer
) -> None:
    async def forked(engine: Engine) -> list[tuple[int, ...]]:
        async with await engine.open(prompt()) as seq:
            kids = seq.fork(3)
            spans = [Span(Sampling(temperature=1.0, seed=n), max_tokens=8, ignore_eos=True) for n in range(3)]
            made = await asyncio.gather(*(kid.generate_all(span) for kid, span in zip(kids, spans, strict=True)))
            return [each.token_ids for each in made]

    async with await Engine.start(plain) as alone:
        expected = await forked(alone)
    config = stored(plain, transfer, store)
    async with await Engine.start(config) as first, await Engine.start(config) as second:
        assert await forked(first) == expected
        await saved(first)
        assert await forked(second) == expected
        assert (await exchanged(second)).received_blocks == BLOCKS
        second._core.check()


async def test_host_memory_is_asked_before_the_store(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer
) -> None:
    expected = await together(plain, prompt())
    small = replace(plain, kv_blocks=64, kv_host_bytes=8 << 20)
    async with await Engine.start(stored(small, transfer, store)) as engine:
        for text in (0, 1, 2):
            await answer(engine, prompt(text=text))
            await saved(engine)
        assert await answer(engine, prompt()) == expected
        stats = await engine.stats()
        assert stats.tiers.host_hit_blocks > 0 and stats.kv_transfer.received_blocks == 0


# -- configuration


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"stores": ()}, "there are no stores; accepted"),
        ({"stores": ("a:0",)}, "accepted: HOST or HOST:PORT"),
        ({"stores": ("a:1:2",)}, "accepted: HOST or HOST:PORT"),
        ({"stores": ("a", "a:14580")}, "has a:14580 twice"),
        ({"peers": ("a",)}, "accepted: TcpConnector, or none"),
        ({"lookup_timeout_s": 0.0}, "lookup_timeout_s is 0.0; accepted: more than 0"),
        ({"timeout_s": -1.0}, "timeout_s is -1.0; accepted: more than 0"),
        ({"kv_connector": "NixlStore"}, "accepted: TcpConnector, NixlConnector, KVStoreConnector"),
        ({"kv_connector": "TcpConnector"}, "stores is set and kv_connector is TcpConnector"),
    ],
)
def test_what_is_no_configuration_of_a_store_is_refused(changed: dict[str, Any], told: str) -> None:
    given = KVTransferConfig("kv_both", "secret", kv_connector="KVStoreConnector", stores=("a",))
    with pytest.raises(InvalidParameter, match=told):
        replace(given, **changed)


def test_addresses_of_stores_have_a_default_port_and_ipv6_in_brackets() -> None:
    given = KVTransferConfig(
        "kv_both", "secret", kv_connector="KVStoreConnector", stores=("a", "b.c:9", "[::1]:7", "[::2]")
    )
    assert given.store_addresses == [("a", 14580), ("b.c", 9), ("::1", 7), ("::2", 14580)]


@pytest.mark.parametrize("changed", [{"prefix_cache": False}, {"data_parallel_size": 2}])
async def test_engines_that_exchange_nothing_refuse_a_store(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer, changed: dict[str, Any]
) -> None:
    with pytest.raises(InvalidParameter, match="kv_transfer is set"):
        replace(stored(plain, transfer, store), **changed)


async def test_a_secret_that_cannot_be_read_is_refused(
    plain: EngineConfig, transfer: KVTransferConfig, store: KVStoreServer, tmp_path: Path
) -> None:
    with pytest.raises(InvalidParameter, match="cannot be read"):
        await Engine.start(stored(plain, transfer, store, secret_file=str(tmp_path / "none")))
