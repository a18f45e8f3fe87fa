"""Disaggregated prefill that sends K/V layer by layer: the same tokens, bytes that leave early, and no half block."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from engine import Engine, EngineConfig
from engine.config import KVTransferConfig
from engine.core.request import SequenceState
from engine.core.step import Row
from engine.kv_cache import kv_connector, tcp_transport
from engine.kv_cache.layer_parts import LAYERS_MAGIC, layers_header
from engine.kv_cache.tcp_transport import TcpTransport
from engine.kv_cache.transport import build, peer_handshake
from engine.kv_cache.transport.kv_transport import BlockRequest, BlockSource, StagedBlocks
from engine.outputs import KVTransferStats
from engine.params import RemotePrefill
from tests.engine.kv_apart import (
    FIRST,
    SIZE,
    answer,
    apart,
    connector,
    exchanged,
    killed_while_it_sends,
    prompt,
    together,
    until,
)

BLOCKS = 150 // SIZE


@pytest.fixture
def chunks(plain: EngineConfig) -> EngineConfig:
    """Chunks of 64, 64 and 22 tokens of a prompt."""
    return replace(plain, max_batch_tokens=64)


@pytest.fixture
def layers(transfer: KVTransferConfig, monkeypatch: pytest.MonkeyPatch) -> KVTransferConfig:
    """Each layer leaves by itself, of chunks of 16 tokens or more."""
    monkeypatch.setattr(kv_connector, "MIN_LAYERS_BYTES", 1)
    monkeypatch.setattr(kv_connector, "GRACE_S", 30.0)
    return replace(transfer, layerwise_min_tokens=16)


async def asked_before(prefill: Engine, decode: Engine, remote: RemotePrefill) -> tuple[int, ...]:
    """Returns the answer for a prompt whose K/V is asked for before it is computed."""
    answering = asyncio.create_task(answer(decode, prompt(), remote_prefill=remote))
    await until(lambda: bool(connector(prefill)._requests))
    await answer(prefill, prompt(), FIRST)
    return await answering


async def transferred(config: EngineConfig, transfer: KVTransferConfig) -> tuple[tuple[int, ...], KVTransferStats, int]:
    """Returns the answer of `asked_before`, the producer's statistics, and the bytes of a block."""
    async with apart(config, transfer) as (prefill, decode, remote):
        tokens = await asked_before(prefill, decode, remote)
        sent, received = await exchanged(prefill), await exchanged(decode)
        assert (received.received_blocks, received.failed_loads) == (BLOCKS, 0)
        assert sorted(connector(prefill)._free) == list(range(len(connector(prefill)._rows))), "no row is lost"
        return tokens, sent, connector(prefill)._nbytes


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("random_model", {}),
        ("random_model", {"kv_dtype": "int8", "max_batch_tokens": 256}),
        ("wide_model", {"dtype": "bfloat16"}),
        pytest.param("random_model", {"loop": "overlapped"}, marks=pytest.mark.slow),
        pytest.param("random_model", {"kv_dtype": "fp8"}, marks=pytest.mark.slow),
        pytest.param(
            "wide_model", {"kv_dtype": "int4", "dtype": "bfloat16", "kv_max_kl": 100.0}, marks=pytest.mark.slow
        ),
        pytest.param("random_mixture", {}, marks=pytest.mark.slow),
        pytest.param("random_latent", {}, marks=pytest.mark.slow),
        pytest.param("random_hybrid", {}, marks=pytest.mark.slow),
        pytest.param("random_hybrid_mixture", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
    ids=[
        "torch", "8 bits, one chunk", "C++", "overlapped loop", "fp8", "C++, 4 bits", "experts", "latents",
        "short convolutions", "short convolutions and experts",
    ],
)  # fmt: skip
async def test_the_answer_is_the_same_together_by_chunk_and_by_layer(
    chunks: EngineConfig, layers: KVTransferConfig, request: pytest.FixtureRequest, model: str, options: dict[str, Any]
) -> None:
    config = replace(chunks, model=str(request.getfixturevalue(model)), **options)
    expected = await together(config, prompt())
    for way, by_layer in ((replace(layers, use_layerwise=False), 0), (layers, BLOCKS)):
        tokens, sent, nbytes = await transferred(config, way)
        assert tokens == expected
        assert (sent.sent_blocks, sent.layerwise_blocks) == (BLOCKS, by_layer)
        assert sent.sent_bytes == BLOCKS * nbytes


@pytest.mark.parametrize(
    ("tokens", "options"),
    [(65, {}), (16, {"deterministic": True})],
    ids=["small chunks", "tile by tile"],
)
async def test_blocks_are_sent_as_a_whole_where_layers_are_not(
    chunks: EngineConfig, layers: KVTransferConfig, tokens: int, options: dict[str, Any]
) -> None:
    config = replace(chunks, **options)
    found, sent, _ = await transferred(config, replace(layers, layerwise_min_tokens=tokens))
    assert found == await together(config, prompt())
    assert (sent.sent_blocks, sent.layerwise_blocks) == (BLOCKS, 0)


async def test_a_few_rows_of_staging_memory_are_enough(
    chunks: EngineConfig, layers: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that found no row while their step ran are sent after it, from the pool."""
    monkeypatch.setattr(tcp_transport, "HEARTBEAT_S", 30.0)  # rows that are free again have more sent at once
    expected = await together(chunks, prompt())
    async with await Engine.start(replace(chunks, kv_transfer=layers)) as engine:
        nbytes = connector(engine)._nbytes
    tokens, sent, _ = await transferred(chunks, replace(layers, kv_buffer_size=2 * nbytes))
    assert tokens == expected and sent.sent_bytes == BLOCKS * nbytes and sent.layerwise_blocks > 0


def hook(engine: Engine, before: Callable[[int], None]) -> None:
    """Has `before` called ahead of each `save_kv_layer`, in the step's thread."""
    made = connector(engine)
    save = made.save_kv_layer

    def called(layer: int) -> None:
        before(layer)
        save(layer)

    made.save_kv_layer = called  # type: ignore[method-assign]  # of this one


def noted(engine: Engine) -> list[range | None]:
    """Returns the layers of each row that the engine sends, as they come."""
    made, staged = connector(engine), list[range | None]()
    sent = made.sent

    def called(request: BlockRequest, each: StagedBlocks, seconds: float) -> None:
        staged.append(each.layers)
        sent(request, each, seconds)

    made.sent = called  # type: ignore[assignment, method-assign]  # of this one
    return staged


async def test_layers_arrive_while_later_ones_of_the_only_chunk_are_not_computed(
    plain: EngineConfig, layers: KVTransferConfig
) -> None:
    """Chunk by chunk nothing of a prompt of one chunk leaves before it is over. No block of some layers is used."""
    config = replace(plain, max_batch_tokens=256)
    expected, reached, goes_on = await together(config, prompt()), threading.Event(), threading.Event()

    def stop_before_the_last(layer: int) -> None:
        if layer == 2:
            reached.set()
            assert goes_on.wait(30)

    async with apart(config, layers) as (prefill, decode, remote):
        hook(prefill, stop_before_the_last)
        answering = asyncio.create_task(answer(decode, prompt(), remote_prefill=remote))
        await until(lambda: bool(connector(prefill)._requests))
        reading = asyncio.create_task(answer(prefill, prompt(), FIRST))
        await until(reached.is_set)
        made, nbytes = connector(prefill), connector(prefill)._store.parts.nbytes
        await until(lambda: made.counters.sent_bytes == BLOCKS * sum(nbytes[:2]))
        assert made.counters.overlapped_seconds == made.counters.send_seconds > 0
        assert made.counters.sent_blocks == connector(decode).counters.received_blocks == 0
        assert not reading.done() and (await decode.stats()).waiting == 1
        goes_on.set()
        assert await answering == expected
        await reading
        stats = await decode.stats()
    assert stats.prompt_tokens == 150 - BLOCKS * SIZE
    assert stats.kv_transfer.loaded_at > made.counters.computed_at > 0


async def test_a_peer_that_asks_while_the_step_runs_gets_its_layers_so_far(
    plain: EngineConfig, layers: KVTransferConfig
) -> None:
    config = replace(plain, max_batch_tokens=256)
    expected, reached = await together(config, prompt()), threading.Event()
    async with apart(config, layers) as (prefill, decode, remote):
        staged = noted(prefill)

        def wait_for_the_peer(layer: int) -> None:
            if layer == 1:
                reached.set()
                waits = threading.Event()
                while not connector(prefill)._asked:
                    waits.wait(0.001)

        hook(prefill, wait_for_the_peer)
        reading = asyncio.create_task(answer(prefill, prompt(), FIRST))
        await until(reached.is_set)
        assert await answer(decode, prompt(), remote_prefill=remote) == expected
        await reading
        assert (await exchanged(prefill)).layerwise_blocks == BLOCKS
    assert set(staged) == {range(1), range(1, 2), range(2), range(2, 3)}, "a row has room for two layers of one block"


@pytest.mark.parametrize(("least", "expected"), [(1, [range(1), range(1, 2), range(2, 3)]), (1 << 16, [range(3)])])
async def test_small_layers_leave_together(
    chunks: EngineConfig, layers: KVTransferConfig, monkeypatch: pytest.MonkeyPatch, least: int, expected: list[range]
) -> None:
    """Of one block, at the end of the last layer."""
    monkeypatch.setattr(kv_connector, "MIN_LAYERS_BYTES", least)
    async with apart(chunks, replace(layers, layerwise_min_tokens=4)) as (prefill, decode, remote):
        staged = noted(prefill)
        answering = asyncio.create_task(answer(decode, prompt(6), remote_prefill=remote))
        await until(lambda: bool(connector(prefill)._requests))
        await answer(prefill, prompt(6), FIRST)
        await answering
    assert staged == expected


async def test_two_peers_that_ask_for_one_prompt_both_get_its_layers(
    chunks: EngineConfig, layers: KVTransferConfig
) -> None:
    expected = await together(chunks, prompt())
    consumer = replace(chunks, kv_transfer=replace(layers, kv_role="kv_consumer"))
    async with apart(chunks, layers) as (prefill, decode, remote), await Engine.start(consumer) as other:
        asked = [asyncio.create_task(answer(each, prompt(), remote_prefill=remote)) for each in (decode, other)]
        await until(lambda: len(connector(prefill)._requests) == 2)
        await answer(prefill, prompt(), FIRST)
        assert await asyncio.gather(*asked) == [expected] * 2
        assert (await exchanged(prefill)).layerwise_blocks == 2 * BLOCKS


async def test_a_block_whose_last_token_is_not_known_yet_is_not_named(
    plain: EngineConfig, layers: KVTransferConfig
) -> None:
    """A step that is launched ahead of the tokens fills it; a digest without its last token would be another's."""
    async with await Engine.start(replace(plain, kv_transfer=replace(layers, layerwise_min_tokens=1))) as engine:
        made, seq = connector(engine), SequenceState(1, prompt(7), b"", 1, table=[3, 9], kv_len=7)
        assert made.bind_connector_metadata([Row(seq, 7, 1, 7, sampled_at=0)]) is None
        assert not seq.digests
        assert made.bind_connector_metadata([Row(seq, 2, 5, 7)]) is None, "it ends within a block"
        seq.tokens.append(5)
        assert made.bind_connector_metadata([Row(seq, 7, 1, 7)]) is not None
        assert made._filled == {seq.digest(1, SIZE): 9}


async def test_sequences_may_end_while_a_step_hands_layers_to_peers(
    plain: EngineConfig, layers: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the overlapped loop the core ends them in its own thread: the step's reads none."""
    monkeypatch.setattr(kv_connector, "GRACE_S", 0.0)

    class Changing(dict[int, SequenceState]):
        def values(self) -> NoReturn:
            raise RuntimeError("dictionary changed size during iteration")

    async with await Engine.start(replace(plain, kv_transfer=layers)) as engine:
        made = connector(engine)
        made.wake, jobs = lambda: None, made.jobs
        made.jobs = (Changing(),)
        request = made.serve(0, (bytes(16),))
        made.save_kv_layer(0)
        assert request.ready.empty(), "it may be computed in the next step"
        made.jobs = jobs
        made.ran()
        assert request.ready.get() is False


# -- what fails


async def assert_it_ends_early(config: EngineConfig, layers: KVTransferConfig, blocks: int) -> None:
    """Asserts that a load ends with so many blocks, the rest is computed to the same tokens, and no row is lost."""
    expected = await together(config, prompt())
    async with apart(config, layers) as (prefill, decode, remote):
        assert await asked_before(prefill, decode, remote) == expected
        received, stats = await exchanged(decode), await decode.stats()
        made = connector(prefill)
        await until(lambda: sorted(made._free) == list(range(len(made._rows))))
    assert (received.received_blocks, received.failed_loads) == (blocks, 1)
    assert stats.prompt_tokens == 150 - SIZE * blocks


class Cut(TcpTransport):
    """Sends some rows, and half of the next one."""

    rows = 0

    def _send_blocks(
        self, sock: socket.socket, source: BlockSource, request: BlockRequest, staged: StagedBlocks
    ) -> None:
        if Cut.rows:
            Cut.rows -= 1
            return super()._send_blocks(sock, source, request, staged)
        payload = source.payload(staged)
        assert staged.layers is not None
        sock.sendall(layers_header(self._layout, staged.digests, staged.layers, payload) + bytes(payload)[:-100])
        source.sent(request, staged, 0.0)
        raise ConnectionError("the peer was killed")


@pytest.mark.parametrize("rows", [0, 17, 29])
async def test_a_peer_killed_in_the_midst_of_a_layer_leaves_no_half_block(
    plain: EngineConfig, layers: KVTransferConfig, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """37 blocks are 13 rows of a layer. Where the last layer is cut, blocks before are whole, and used."""
    monkeypatch.setattr(Cut, "rows", rows)
    monkeypatch.setattr(build, "TcpTransport", Cut)
    await assert_it_ends_early(replace(plain, max_batch_tokens=256), layers, blocks=max(0, 3 * (rows - 26)))


FAULTS: dict[str, Callable[..., bytes]] = {
    "checksum": lambda layout, digests, layers, payload: layers_header(layout, digests, layers, bytes(len(payload))),
    "layout": lambda layout, digests, layers, payload: layers_header(layout[::-1], digests, layers, payload),
    "digest": lambda layout, digests, layers, payload: layers_header(layout, [bytes(16)], layers, payload),
    "later layer": lambda layout, digests, layers, payload: layers_header(layout, digests, range(1, 2), payload),
    "no layer": lambda layout, digests, layers, payload: layers_header(layout, digests, range(0), payload),
    "layers that are not there": lambda layout, digests, layers, payload: layers_header(
        layout, digests, range(9), payload
    ),
    "fewer blocks": lambda layout, digests, layers, payload: layers_header(
        layout, digests[:-1] or digests, layers, payload
    ),
    "more blocks": lambda layout, digests, layers, payload: layers_header(layout, digests * 99, layers, payload),
    "noise": lambda layout, digests, layers, payload: LAYERS_MAGIC + bytes(range(48)),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_layers_of_something_else_are_never_used(
    plain: EngineConfig, layers: KVTransferConfig, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(tcp_transport, "layers_header", FAULTS[fault])
    await assert_it_ends_early(replace(plain, max_batch_tokens=256), layers, blocks=0)


async def test_a_layer_that_comes_twice_is_never_used(
    plain: EngineConfig, layers: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that is whole may be in use, or another's: nothing writes to it again."""
    send = TcpTransport._send_blocks

    def twice(self: TcpTransport, sock: socket.socket, source: BlockSource, *each: Any) -> None:
        request, staged = each
        payload = bytes(source.payload(staged))
        send(self, sock, source, request, staged)
        if staged.whole:  # its row is given back by now, so that an error of the socket loses none
            sock.sendall(layers_header(self._layout, staged.digests, staged.layers, payload) + payload)

    monkeypatch.setattr(TcpTransport, "_send_blocks", twice)
    await assert_it_ends_early(replace(plain, max_batch_tokens=256), layers, blocks=3)


async def test_a_block_that_lacks_a_layer_is_never_used(
    plain: EngineConfig, layers: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = TcpTransport._send_blocks

    def leave_out(self: TcpTransport, sock: socket.socket, source: BlockSource, *each: Any) -> None:
        request, staged = each
        if staged.layers == range(1, 2):
            source.sent(request, staged, 1e-6)
        else:
            send(self, sock, source, request, staged)

    monkeypatch.setattr(TcpTransport, "_send_blocks", leave_out)
    await assert_it_ends_early(replace(plain, max_batch_tokens=256), layers, blocks=0)


async def test_nothing_is_sent_from_where_a_block_was_while_its_step_ran(
    plain: EngineConfig, layers: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is over, and the block belongs to another sequence by now."""
    monkeypatch.setattr(kv_connector, "GRACE_S", 0.1)
    config = replace(plain, max_batch_tokens=256, kv_transfer=layers)
    async with await Engine.start(config) as engine:
        await answer(engine, prompt(), FIRST)
        made = connector(engine)
        digests = tuple(each.digest for _, each in engine._core._pool.contents())
        monkeypatch.setattr(made._pool, "find", lambda digest: None)
        request = made.serve(0, digests)

        def answered() -> bool:
            made.poke()
            return not request.ready.empty()

        await until(answered)
        assert request.ready.get() is False
        monkeypatch.undo()


async def test_a_peer_of_an_older_version_is_refused_by_it(
    plain: EngineConfig, layers: KVTransferConfig, caplog: pytest.LogCaptureFixture
) -> None:
    expected = await together(plain, prompt())
    with socket.create_server(("127.0.0.1", 0)) as older:

        def greet() -> None:
            sock, _ = older.accept()
            sock.sendall(peer_handshake.GREETING.pack(b"PonderT1", bytes(32)))
            sock.recv(1)
            sock.close()

        greeting = threading.Thread(target=greet)
        greeting.start()
        async with await Engine.start(replace(plain, kv_transfer=replace(layers, kv_role="kv_consumer"))) as engine:
            remote = RemotePrefill("127.0.0.1", older.getsockname()[1])
            assert await answer(engine, prompt(), remote_prefill=remote) == expected
            assert (await exchanged(engine)).failed_loads == 1
        greeting.join()
    assert "the peer has version 1 of the protocol; accepted: 2" in caplog.text


async def test_a_client_of_an_older_version_is_named_in_the_log(
    plain: EngineConfig, layers: KVTransferConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads the greeting, which it does not know, and leaves."""
    async with await Engine.start(replace(plain, kv_transfer=layers)):
        with socket.create_connection(("127.0.0.1", layers.kv_port), 5) as sock:
            assert peer_handshake.received(sock, peer_handshake.GREETING.size)[:8] == b"PonderT2"
        with caplog.at_level(logging.WARNING):
            await until(lambda: "left at the greeting: it is no peer, or has another version than 2" in caplog.text)


async def test_rows_of_a_request_that_is_complete_come_back_from_a_peer_that_is_gone(
    plain: EngineConfig, layers: KVTransferConfig
) -> None:
    async with await Engine.start(replace(plain, kv_transfer=layers)) as engine:
        await answer(engine, prompt(), FIRST)
        made = connector(engine)
        digests = tuple(each.digest for _, each in engine._core._pool.contents())
        request = made.serve(0, digests)
        await until(lambda: request.complete and not made._requests)
        assert len(made._rows) - len(made._free) == len(digests)
        made.release(request)
        await until(lambda: len(made._free) == len(made._rows))


async def test_layers_of_a_block_that_left_the_pool_are_not_sent(plain: EngineConfig, layers: KVTransferConfig) -> None:
    """Its first layers were sent while it was computed, and no row was free for the others."""
    async with await Engine.start(replace(plain, kv_transfer=layers)) as engine:
        nbytes = connector(engine)._nbytes
    config = replace(plain, kv_blocks=60, max_batch_tokens=256)
    async with await Engine.start(replace(config, kv_transfer=replace(layers, kv_buffer_size=nbytes))) as engine:
        made = connector(engine)
        async with await engine.open(prompt()) as seq:
            await engine.stats()  # it is there, and its digests are those of a peer's sequence
            known = engine._core._sequences[next(iter(engine._core._sequences))]
            request = made.serve(0, tuple(known.digest(at, SIZE) for at in range(BLOCKS)))
            await seq.generate_all(FIRST)
        staged = request.ready.get(timeout=10)
        assert isinstance(staged, StagedBlocks) and staged.layers == range(1)
        for text in (1, 2):
            await answer(engine, prompt(230, text), FIRST)  # 58 blocks of 60
        made.sent(request, staged, 0.0)
        assert request.ready.get(timeout=10) is False and not request.complete
        await until(lambda: not made._requests)
        made.release(request)
        await until(lambda: len(made._free) == 1)


@pytest.mark.slow
async def test_a_killed_process_that_sends_layers_is_computed_for(
    chunks: EngineConfig, layers: KVTransferConfig
) -> None:
    received = await killed_while_it_sends(chunks, layers)
    assert 20 < received.received_blocks < 600 // SIZE and received.failed_loads == 1
