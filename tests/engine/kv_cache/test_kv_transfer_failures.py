"""Disaggregated prefill where K/V does not come, or is of something else: it is computed, to the same tokens."""

from __future__ import annotations

import asyncio
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig
from engine.config import KVTransferConfig
from engine.kv_cache import kv_connector, tcp_transport
from engine.kv_cache.snapshot import header
from engine.kv_cache.tcp_transport import TcpTransport
from engine.kv_cache.transport import peer_handshake
from engine.kv_cache.transport.kv_transport import BlockRequest, StagedBlocks
from engine.params import RemotePrefill
from tests.engine.kv_apart import (
    FIRST,
    SIZE,
    SPAN,
    answer,
    apart,
    connector,
    exchanged,
    free_port,
    killed_while_it_sends,
    prompt,
    together,
    until,
)


async def test_nothing_is_found_of_another_tenant(plain: EngineConfig, transfer: KVTransferConfig) -> None:
    expected = await together(plain, prompt())
    async with apart(plain, transfer) as (prefill, decode, remote):
        await answer(prefill, prompt(), FIRST, tenant="alice")
        assert await answer(decode, prompt(), tenant="bob", remote_prefill=remote) == expected
        received = await exchanged(decode)
        assert (received.received_blocks, received.failed_loads) == (0, 1)
        assert await answer(decode, prompt(), tenant="alice", remote_prefill=remote) == expected
        assert (await exchanged(decode)).received_blocks == 150 // SIZE


@pytest.mark.parametrize(
    ("decode", "secret"),
    [
        ({"block_size": 8}, ""),
        ({"max_model_len": 400}, ""),
        ({"kv_dtype": "int8"}, ""),
        ({}, "another secret, as long"),
    ],
    ids=["block_size", "max_model_len", "kv_dtype", "secret"],
)
async def test_a_peer_with_other_blocks_or_another_secret_is_not_used(
    plain: EngineConfig, transfer: KVTransferConfig, decode: dict[str, Any], secret: str, tmp_path: Path
) -> None:
    (tmp_path / "other").write_text(secret)
    theirs = replace(transfer, secret_file=str(tmp_path / "other")) if secret else transfer
    expected = await together(replace(plain, **decode), prompt())
    producer = replace(plain, kv_transfer=transfer)
    consumer = replace(plain, kv_transfer=replace(theirs, kv_role="kv_consumer"), **decode)
    async with await Engine.start(producer) as first, await Engine.start(consumer) as second:
        await answer(first, prompt(), FIRST)
        remote = RemotePrefill("127.0.0.1", transfer.kv_port)
        assert await answer(second, prompt(), remote_prefill=remote) == expected
        received = await exchanged(second)
    assert (received.received_blocks, received.failed_loads) == (0, 1)


@pytest.mark.parametrize("knows", [False, True], ids=["no secret", "another layout"])
async def test_a_client_that_is_no_peer_gets_nothing(
    plain: EngineConfig, transfer: KVTransferConfig, knows: bool
) -> None:
    """It asks as a peer does, and looks at nothing that it is told."""
    async with await Engine.start(replace(plain, kv_transfer=transfer)) as engine:
        await answer(engine, prompt(), FIRST)
        ours = connector(engine)._transport
        assert isinstance(ours, TcpTransport)
        secret, layout = (ours._secret, b"another layout..") if knows else (b"a guess of the secret", ours._layout)
        (digest,) = [each.digest for _, each in engine._core._pool.contents()][:1]

        def asked() -> bytes:
            with socket.create_connection(("127.0.0.1", transfer.kv_port), 5) as sock:
                nonce = peer_handshake.received(sock, peer_handshake.GREETING.size)[8:]
                mine = bytes(32)
                code = peer_handshake.code(secret, b"client", bytes(nonce), mine, layout)
                sock.sendall(peer_handshake.PROOF.pack(mine, layout, code) + tcp_transport._REQUEST.pack(0, 1) + digest)
                data = b""
                with suppress(ConnectionError):
                    while more := sock.recv(1 << 16):
                        data += more
                return data

        told = await asyncio.to_thread(asked)
        assert len(told) == (peer_handshake.VERDICT.size if knows else 0) and not any(told[:1])
        assert (await exchanged(engine)).sent_blocks == 0


async def test_nobody_at_the_peers_address_costs_nothing_but_the_load(
    plain: EngineConfig, transfer: KVTransferConfig
) -> None:
    expected = await together(plain, prompt())
    async with await Engine.start(replace(plain, kv_transfer=replace(transfer, kv_role="kv_consumer"))) as engine:
        remote = RemotePrefill("127.0.0.1", free_port())
        assert await answer(engine, prompt(), remote_prefill=remote) == expected
        assert (await exchanged(engine)).failed_loads == 1


class Images:
    """Serves the images that a test changes, of another engine's blocks."""

    def __init__(self, engine: Engine, count: int, changed: Callable[[bytes], bytes]) -> None:
        self._engine, self._count, self._changed = engine, count, changed

    def serve(self, first: int, digests: tuple[bytes, ...]) -> BlockRequest:
        request = BlockRequest(first, digests, 0.0)
        for digest in digests[: self._count]:
            block = self._engine._core._pool.find(digest)
            assert block is not None
            request.ready.put(StagedBlocks((digest,), block, connector(self._engine)._nbytes))
        return request

    def payload(self, staged: StagedBlocks) -> memoryview:
        made = connector(self._engine)
        image = bytearray(made._nbytes)
        into = torch.frombuffer(image, dtype=torch.uint8)
        made._store.save([(staged.row, into)])
        return memoryview(self._changed(bytes(image)))

    def sent(self, request: BlockRequest, staged: StagedBlocks, seconds: float) -> None:
        pass

    def release(self, request: BlockRequest) -> None:
        pass

    def poke(self) -> None:
        pass

    @property
    def memory(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)


@contextmanager
def peer(engine: Engine, count: int, changed: Callable[[bytes], bytes] = bytes) -> Iterator[TcpTransport]:
    """A peer that has `count` of the engine's blocks, then neither sends nor ends."""
    made = connector(engine)
    assert isinstance(made._transport, TcpTransport)
    ours = made._transport
    transport = TcpTransport(ours._secret, ours._layout, ours._layers, address=("127.0.0.1", 0), timeout_s=5.0)
    transport.listen(Images(engine, count, changed))
    try:
        yield transport
    finally:
        transport.close()


def damaged(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


async def test_a_peer_that_dies_in_the_midst_leaves_what_came(plain: EngineConfig, transfer: KVTransferConfig) -> None:
    expected = await together(plain, prompt())
    async with apart(plain, transfer) as (prefill, decode, _):
        await answer(prefill, prompt(), FIRST)
        with peer(prefill, 5) as dying:
            answering = asyncio.create_task(
                answer(decode, prompt(), remote_prefill=RemotePrefill("127.0.0.1", dying.port))
            )
            await until(lambda: connector(decode).counters.received_blocks == 5)
            assert not answering.done()
        assert await answering == expected
        received = await exchanged(decode)
        assert (received.received_blocks, received.failed_loads) == (5, 1)
        assert (await decode.stats()).prompt_tokens == 150 - 5 * SIZE


async def test_a_peer_that_is_silent_is_given_up(
    plain: EngineConfig, transfer: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_transport, "STALL_S", 0.3)
    expected = await together(plain, prompt())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with await Engine.start(replace(plain, kv_transfer=replace(transfer, kv_role="kv_consumer"))) as engine:
            remote = RemotePrefill("127.0.0.1", silent.getsockname()[1])
            assert await answer(engine, prompt(), remote_prefill=remote) == expected
            assert (await exchanged(engine)).failed_loads == 1


async def test_a_load_ends_with_its_time(plain: EngineConfig, transfer: KVTransferConfig) -> None:
    expected = await together(plain, prompt())
    async with apart(plain, replace(transfer, timeout_s=0.3)) as (prefill, decode, _):
        await answer(prefill, prompt(), FIRST)
        with peer(prefill, 5) as waiting:
            remote = RemotePrefill("127.0.0.1", waiting.port)
            assert await answer(decode, prompt(), remote_prefill=remote) == expected
            assert (await exchanged(decode)).failed_loads == 1


def test_a_header_names_its_block() -> None:
    """The checks below mean what they say: a damaged payload has another checksum."""
    assert zlib.crc32(b"ab") != zlib.crc32(damaged(b"ab"))
    assert header(b"l" * 16, b"d" * 16, b"ab") != header(b"l" * 16, b"e" * 16, b"ab")


@pytest.mark.parametrize("fault", ["digest", "checksum", "layout", "noise"])
async def test_an_image_of_something_else_is_never_used(
    plain: EngineConfig, transfer: KVTransferConfig, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The second block is wrong: one block is used, and the rest computed."""
    expected, sent = await together(plain, prompt()), [0]

    def wrong(layout: bytes, digest: bytes, payload: memoryview) -> bytes:
        sent[0] += 1
        if sent[0] != 2:
            return header(layout, digest, payload)
        if fault == "noise":
            return b"HTTP/1.1 200 OK".ljust(len(header(layout, digest, payload)))
        if fault == "checksum":
            return header(layout, digest, damaged(bytes(payload)))
        return header(layout[::-1], digest, payload) if fault == "layout" else header(layout, digest[::-1], payload)

    monkeypatch.setattr(tcp_transport, "header", wrong)
    async with apart(plain, transfer) as (prefill, decode, remote):
        await answer(prefill, prompt(), FIRST)
        assert await answer(decode, prompt(), remote_prefill=remote) == expected
        received = await exchanged(decode)
    assert (received.received_blocks, received.failed_loads) == (1, 1)


async def test_closing_a_sequence_that_waits_ends_its_load(
    plain: EngineConfig, transfer: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_connector, "GRACE_S", 30.0)
    async with apart(plain, transfer) as (prefill, decode, remote):
        seq = await decode.open(prompt(), remote_prefill=remote)
        running = asyncio.create_task(seq.generate_all(SPAN))
        await until(lambda: bool(connector(prefill)._requests))
        seq.close()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: not connector(decode)._loads and not connector(prefill)._requests)
        assert (await exchanged(decode)).failed_loads == 0


async def test_an_engine_stops_while_it_sends_and_receives(
    plain: EngineConfig, transfer: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_connector, "GRACE_S", 30.0)
    async with apart(plain, transfer) as (prefill, decode, remote):
        seq = await decode.open(prompt(), remote_prefill=remote)
        running = asyncio.create_task(seq.generate_all(SPAN))
        await until(lambda: bool(connector(prefill)._requests))
        await prefill.stop()
        assert len((await running).token_ids) == 12
        seq.close()
        await decode.stop()
        assert not [each for each in threading.enumerate() if each.name.startswith("kv-")]


@pytest.mark.slow
async def test_a_killed_process_that_prefills_is_computed_for(plain: EngineConfig, transfer: KVTransferConfig) -> None:
    received = await killed_while_it_sends(replace(plain, max_batch_tokens=SIZE), transfer)
    assert 20 < received.received_blocks < 600 // SIZE and received.failed_loads == 1


async def test_two_engines_that_wait_for_each_other_both_compute(
    plain: EngineConfig, transfer: KVTransferConfig
) -> None:
    expected = await together(plain, prompt())
    other = replace(transfer, kv_port=free_port())
    engines = [await Engine.start(replace(plain, kv_transfer=each)) for each in (transfer, other)]
    try:
        remotes = [RemotePrefill("127.0.0.1", each.kv_port) for each in (other, transfer)]
        asked = [answer(each, prompt(), remote_prefill=at) for each, at in zip(engines, remotes, strict=True)]
        async with asyncio.timeout(20):  # a load's own time is 60 s
            assert await asyncio.gather(*asked) == [expected] * 2
    finally:
        for each in engines:
            await each.stop()
