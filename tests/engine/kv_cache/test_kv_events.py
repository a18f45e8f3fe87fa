"""Events of the prefix cache: they tell what can be found, in vLLM's wire form, and again after a gap."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import GREEDY, Engine, Span
from engine.config import EngineConfig, KVEventsConfig, RunsIn
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.errors import InvalidParameter
from engine.kv_cache.block_pool import BlockPool, root_digest
from engine.kv_cache.kv_event_publisher import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventPublisher,
    block_hash,
    events_of,
)
from engine.kv_cache.kv_events import Change, KVEventLog
from tests.engine.core.test_scheduler import SIZE, Bench
from tests.engine.fake import FakeRunner, Letters
from tests.engine.kv_apart import free_port
from tests.engine.kv_below import Told, tiers_below


class Listened(Bench):
    """A core whose changes a test keeps."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.changes: list[Change] = []
        self.pool.events = KVEventLog(self.changes.extend, lambda _: None)

    def held(self) -> set[bytes]:
        """Replays the changes: returns the digests that a subscriber knows."""
        known: set[bytes] = set()
        for change in self.changes:
            if change is None:
                known.clear()
            elif isinstance(change, bytes):
                known.remove(change)
            else:
                assert change[0] not in known and (change[1] is None or len(change[1]) == 16)
                known.add(change[0])
        return known

    def full_blocks(self) -> set[bytes]:
        """Returns the digests of the pool's blocks that are full ones of an open or closed sequence."""
        return {content.digest for _, content in self.pool.contents()} & self.chains

    chains: set[bytes]


def run(bench: Listened, id: int, length: int, first: int, tenant: str = "") -> None:
    bench.open(id, length, first=first, tenant=tenant)
    bench.generate(id, 2)
    bench.drain()
    seq = bench.core._sequences[id]
    bench.chains = getattr(bench, "chains", set()) | {seq.digest(at, SIZE) for at in range(len(seq) // SIZE)}
    bench.core.handle(m.Close(id))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40), st.sampled_from(["", "a"])), min_size=1, max_size=25))
def test_a_subscriber_knows_exactly_the_full_blocks_that_can_be_found(prompts: list[tuple[int, int, str]]) -> None:
    bench = Listened(blocks=12, budget=64)
    for id, (length, first, tenant) in enumerate(prompts, 1):
        run(bench, id, length, first, tenant)
        bench.pool.flush_events()
        assert bench.held() == bench.full_blocks()


def test_blocks_that_come_back_from_a_tier_are_stored_again() -> None:
    pool, changes = BlockPool(6), list[Change]()
    runner, worker = FakeRunner(pool, SIZE), Told()
    tiers, _ = tiers_below(pool, runner, worker, rows=20)
    config = EngineConfig("fake", block_size=SIZE, max_batch_tokens=8)
    core = EngineCore(config, runner, pool, Letters, (0,), b"secret", tiers=tiers)
    pool.events = KVEventLog(changes.extend, lambda _: None)
    prompts = ((1, 2) * 10, (2, 2, 1) * 7, (1, 2) * 10)  # the second takes the place of the first, which comes back
    for id, prompt in enumerate(prompts, 1):
        core.handle(m.Open(id, prompt, "", 0, None))
        core.handle(m.Generate(id, id, Span(GREEDY, max_tokens=1, ignore_eos=True), 0, 1))
        for _ in range(20):
            core.step()
            worker.work()
            core.handle(m.TransferDone())
        core.handle(m.Close(id))
    pool.flush_events()
    assert core.stats().tiers.host_hit_blocks > 0
    stored = [tuple(change[2]) for change in changes if isinstance(change, tuple)]
    assert stored.count((1, 2, 1, 2)) > 5  # the first prompt's five blocks, and some of them again
    known: set[bytes] = set()
    for change in changes:
        if isinstance(change, tuple):
            known.add(change[0])
        elif change is not None:
            known.remove(change)
    assert known <= {content.digest for _, content in pool.contents()}
    first_block = next(change[0] for change in changes if isinstance(change, tuple))
    assert first_block in known
    core.close()


def test_a_chain_is_one_event_and_names_its_parent() -> None:
    bench = Listened(budget=64)
    run(bench, 1, 9, first=1)
    bench.pool.flush_events()
    cleared, stored = events_of(bench.changes, SIZE)
    assert cleared == AllBlocksCleared()
    assert isinstance(stored, BlockStored)
    seq_tokens = stored.token_ids
    assert len(stored.block_hashes) == 2 and len(seq_tokens) == 2 * SIZE and stored.parent_block_hash is None
    bench.changes.clear()
    bench.core.handle(m.Open(2, (*seq_tokens, 1, 2, 3, 1, 2), "", 0, None))
    bench.generate(2, 1)
    bench.drain()
    (more,) = events_of(bench.changes, SIZE)
    assert isinstance(more, BlockStored)
    assert more.parent_block_hash == stored.block_hashes[-1] and more.token_ids == [1, 2, 3, 1]


def test_nothing_of_a_tenant_is_published_but_hashes_and_tokens() -> None:
    bench = Listened(budget=64)
    run(bench, 1, 9, first=1, tenant="alice")
    bench.pool.flush_events()
    payload = msgspec.msgpack.encode(KVEventBatch(0.0, events_of(bench.changes, SIZE)))
    root = root_digest(b"secret", "fake", "", "alice")
    stored = [each for each in bench.changes if isinstance(each, tuple)]
    for hidden in (b"alice", b"secret", root, *(digest for digest, *_ in stored)):
        assert hidden not in payload and hidden[:8] not in payload
    assert block_hash(stored[0][0]).to_bytes(8, "big") in payload


def test_the_wire_is_vllms() -> None:
    """A batch is an array, an event a map with its kind, in the fields that vLLM's own subscribers decode."""
    changes: list[Change] = [None, (b"a", None, [1, 2], "sql"), (b"b", b"a", [3, 4], "sql"), b"a"]
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(1.5, events_of(changes, 2))))
    a, b = block_hash(b"a"), block_hash(b"b")
    stored = {
        "type": "BlockStored", "block_hashes": [a, b], "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
        "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": "sql",
    }  # fmt: skip
    removed = {"type": "BlockRemoved", "block_hashes": [a], "medium": "GPU"}
    assert raw == [1.5, [{"type": "AllBlocksCleared"}, stored, removed], None]
    assert max(a, b) < 2**64


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def published() -> Iterator[tuple[KVEventPublisher, KVEventsConfig]]:
    config = KVEventsConfig(free_endpoint(), free_endpoint(), buffer_steps=3, topic="kv")
    publisher = KVEventPublisher(config, 2)
    yield publisher, config
    publisher.close()


def replayed(config: KVEventsConfig, start: int) -> list[tuple[int, KVEventBatch]]:
    """Asks for batches again from a number on; returns the numbers that come, and the batches."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:  # a REQ would take one reply
        dealer.connect(config.replay_endpoint or "")
        dealer.send_multipart((b"", start.to_bytes(8, "big")))
        batches = list[tuple[int, KVEventBatch]]()
        while True:
            assert dealer.poll(10_000)
            _, number, payload = dealer.recv_multipart()
            if number == END_OF_REPLAY:
                return batches
            batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=KVEventBatch)))


def numbers(config: KVEventsConfig, start: int) -> list[int]:
    return [number for number, _ in replayed(config, start)]


def test_a_subscriber_hears_numbered_batches_and_replays_a_gap(
    published: tuple[KVEventPublisher, KVEventsConfig],
) -> None:
    publisher, config = published
    with zmq.Context() as context, context.socket(zmq.SUB) as hearing:
        hearing.subscribe(b"kv")
        hearing.connect(config.endpoint)
        heard: list[int] = []
        sent = 0
        while not heard:  # until the subscription has reached the publisher
            publisher.publish([(b"%d" % sent, None, [1, 2], None)])
            sent += 1
            if hearing.poll(20):
                topic, number, payload = hearing.recv_multipart()
                assert topic == b"kv"
                heard.append(int.from_bytes(number, "big"))
                event = msgspec.msgpack.decode(payload, type=KVEventBatch).events[0]
                assert isinstance(event, BlockStored)
        for _ in range(5):
            publisher.publish([b"0"])
            _, number, payload = hearing.recv_multipart()
            heard.append(int.from_bytes(number, "big"))
        assert heard == list(range(heard[0], heard[0] + len(heard)))
        event = msgspec.msgpack.decode(payload, type=KVEventBatch).events[0]
        assert event == BlockRemoved([block_hash(b"0")], "GPU")
        last = heard[-1]
        assert numbers(config, last - 1) == [last - 1, last]
        assert numbers(config, 0) == [last - 2, last - 1, last]  # the buffer's


def test_a_malformed_replay_request_is_dropped_and_the_next_answered(
    published: tuple[KVEventPublisher, KVEventsConfig],
) -> None:
    publisher, config = published
    publisher.publish([None])
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(config.replay_endpoint or "")
        dealer.send_multipart((b"from the start",))
        assert numbers(config, 0) in ([0], [])


def test_an_endpoint_in_use_is_refused_by_name(published: tuple[KVEventPublisher, KVEventsConfig]) -> None:
    with pytest.raises(InvalidParameter, match="in use.*accepted: an address"):
        KVEventPublisher(KVEventsConfig(published[1].endpoint), 2)


def test_events_need_a_prefix_cache_and_positive_numbers() -> None:
    with pytest.raises(InvalidParameter, match="prefix_cache is off"):
        EngineConfig("fake", prefix_cache=False, kv_events=KVEventsConfig())
    with pytest.raises(InvalidParameter, match=r"kv_events\.hwm is 0"):
        KVEventsConfig(hwm=0)


@pytest.mark.parametrize("runs_in", ["thread", pytest.param("process", marks=pytest.mark.slow)])
async def test_an_engine_publishes_the_blocks_of_its_prompts(random_model: Path, runs_in: RunsIn) -> None:
    events = KVEventsConfig(free_endpoint(), free_endpoint())
    config = EngineConfig(str(random_model), dtype="float32", kv_blocks=64, runs_in=runs_in, kv_events=events)
    prompt = list(range(5, 45))
    async with await Engine.start(config) as engine, await engine.open(prompt) as seq:
        await seq.generate(Span(GREEDY, max_tokens=4, ignore_eos=True)).result()
        batches = await asyncio.to_thread(replayed, events, 0)
    told = [event for _, batch in batches for event in batch.events]
    assert told[0] == AllBlocksCleared()
    stored = [each for each in told if isinstance(each, BlockStored)]
    assert [token for each in stored for token in each.token_ids] == prompt[:32]
    assert stored[0].block_size == 16 and stored[0].parent_block_hash is None
