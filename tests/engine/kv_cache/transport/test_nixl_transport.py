"""Disaggregated prefill with payloads moved by NIXL, where it is installed; and what is refused where it is not."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from dataclasses import replace

import pytest

from engine import Engine, EngineConfig, InvalidParameter
from engine.config import KVTransferConfig
from engine.kv_cache import kv_connector
from engine.kv_cache.transport.nixl_transport import NixlTransport
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

installed = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="the package nixl is not installed: pip install nixl"
)


@pytest.fixture
def by_nixl(transfer: KVTransferConfig) -> KVTransferConfig:
    return replace(transfer, kv_connector="NixlConnector")


@installed
async def test_a_prompt_that_another_engine_read_comes_by_nixl(plain: EngineConfig, by_nixl: KVTransferConfig) -> None:
    expected = await together(plain, prompt())
    async with apart(plain, by_nixl) as (prefill, decode, remote):
        await answer(prefill, prompt(), FIRST)
        assert isinstance(connector(prefill)._transport, NixlTransport)
        assert await answer(decode, prompt(), remote_prefill=remote) == expected
        received = await exchanged(decode)
        assert (received.received_blocks, received.failed_loads) == (150 // SIZE, 0)
        assert await answer(decode, prompt(text=1), remote_prefill=remote) == await together(plain, prompt(text=1))


@installed
async def test_blocks_come_by_nixl_while_later_chunks_are_computed(
    plain: EngineConfig, by_nixl: KVTransferConfig
) -> None:
    expected = await together(plain, prompt(600))
    async with apart(plain, by_nixl) as (prefill, decode, remote):
        answering = asyncio.create_task(answer(decode, prompt(600), remote_prefill=remote))
        await until(lambda: bool(connector(prefill)._requests))
        await answer(prefill, prompt(600), FIRST)
        assert await answering == expected
        assert (await exchanged(decode)).received_blocks == 600 // SIZE


@installed
async def test_a_few_staging_rows_serve_several_loads_at_once(plain: EngineConfig, by_nixl: KVTransferConfig) -> None:
    """A row is given to another block once the peer has read it: too early, and checksums would differ."""
    expected = [await together(plain, prompt(text=text)) for text in range(4)]
    async with apart(plain, replace(by_nixl, kv_buffer_size=3 * 3072)) as (prefill, decode, remote):
        assert len(connector(prefill)._rows) == 3
        for text in range(4):
            await answer(prefill, prompt(text=text), FIRST)
        asked = (answer(decode, prompt(text=text), remote_prefill=remote) for text in range(4))
        assert await asyncio.gather(*asked) == expected
        received = await exchanged(decode)
        assert (received.received_blocks, received.failed_loads) == (4 * (150 // SIZE), 0)


@installed
async def test_an_image_that_is_damaged_on_its_way_by_nixl_is_refused(
    plain: EngineConfig, by_nixl: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, kept, count = await together(plain, prompt()), NixlTransport._read, [0]

    def damaged(self: NixlTransport, session: object, address: int, nbytes: int) -> None:
        kept(self, session, address, nbytes)  # type: ignore[arg-type]  # passed on
        count[0] += 1
        if count[0] == 3:
            session.buffer[7] ^= 1  # type: ignore[attr-defined]  # the same

    monkeypatch.setattr(NixlTransport, "_read", damaged)
    async with apart(plain, by_nixl) as (prefill, decode, remote):
        await answer(prefill, prompt(), FIRST)
        assert await answer(decode, prompt(), remote_prefill=remote) == expected
        received = await exchanged(decode)
    assert (received.received_blocks, received.failed_loads) == (2, 1)


@installed
@pytest.mark.slow
async def test_a_killed_process_that_sends_by_nixl_is_computed_for(
    plain: EngineConfig, by_nixl: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await killed_while_it_sends(replace(plain, max_batch_tokens=SIZE), by_nixl)).received_blocks > 20


@installed
async def test_ends_of_different_connectors_are_no_peers(
    plain: EngineConfig, transfer: KVTransferConfig, by_nixl: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_connector, "GRACE_S", 0.1)
    expected = await together(plain, prompt())
    producer = replace(plain, kv_transfer=transfer)
    consumer = replace(plain, kv_transfer=replace(by_nixl, kv_role="kv_consumer"))
    async with await Engine.start(producer) as first, await Engine.start(consumer) as second:
        await answer(first, prompt(), FIRST)
        assert await answer(second, prompt(), remote_prefill=RemotePrefill("127.0.0.1", transfer.kv_port)) == expected
        assert (await exchanged(second)).failed_loads == 1


async def test_without_the_package_it_is_refused_by_name(
    plain: EngineConfig, by_nixl: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(InvalidParameter, match="nixl cannot be imported .* accepted: the package nixl"):
        await Engine.start(replace(plain, kv_transfer=by_nixl))
