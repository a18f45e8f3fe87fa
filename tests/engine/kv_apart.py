"""Two engines for tests, of which one prefills for the other. All that passes between them goes over TCP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from engine import GREEDY, Engine, EngineConfig, Span
from engine.config import KVTransferConfig
from engine.kv_cache.kv_connector import KVConnector
from engine.outputs import KVTransferStats
from engine.params import RemotePrefill

SPAN = Span(GREEDY, max_tokens=12, ignore_eos=True)
FIRST = Span(GREEDY, max_tokens=1, ignore_eos=True)  # what a router asks of the engine that prefills
SIZE = 4


def prompt(length: int = 150, text: int = 0) -> list[int]:
    return [(text * 131 + i * i * 7 + i) % 300 + 3 for i in range(length)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def apart(
    config: EngineConfig, transfer: KVTransferConfig, **decode: Any
) -> AsyncIterator[tuple[Engine, Engine, RemotePrefill]]:
    """An engine that prefills, one that decodes, and where the first one's K/V is."""
    producer = replace(config, kv_transfer=replace(transfer, kv_role="kv_producer"))
    consumer = replace(config, kv_transfer=replace(transfer, kv_role="kv_consumer"), **decode)
    async with await Engine.start(producer) as first, await Engine.start(consumer) as second:
        yield first, second, RemotePrefill("127.0.0.1", transfer.kv_port)
        for each in (first, second):
            each._core.check()
            if each.healthy:
                assert (await each.stats()).blocks_used == 0


def connector(engine: Engine) -> KVConnector:
    found = engine._core._connector
    assert found is not None
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


async def answer(engine: Engine, tokens: list[int], span: Span = SPAN, **options: Any) -> tuple[int, ...]:
    async with await engine.open(tokens, **options) as seq:
        return (await seq.generate_all(span)).token_ids


async def together(config: EngineConfig, tokens: list[int], span: Span = SPAN, **options: Any) -> tuple[int, ...]:
    async with await Engine.start(config) as engine:
        return await answer(engine, tokens, span, **options)


async def exchanged(engine: Engine) -> KVTransferStats:
    return (await engine.stats()).kv_transfer


async def killed_while_it_sends(config: EngineConfig, transfer: KVTransferConfig) -> KVTransferStats:
    """Has a producer, in a process of its own, killed while it sends a prompt's blocks. Its peer answers as one engine
    does; returns what the peer received."""
    from engine.ipc.supervisor import SupervisedLink  # needs msgspec, which a GPU's machine may lack

    expected = await together(config, prompt(600))
    producer = replace(config, kv_transfer=replace(transfer, kv_role="kv_producer"), runs_in="process")
    consumer = replace(config, kv_transfer=replace(transfer, kv_role="kv_consumer"))
    async with await Engine.start(producer) as prefill, await Engine.start(consumer) as decode:
        assert isinstance(prefill._link, SupervisedLink)
        first = asyncio.create_task(answer(prefill, prompt(600), FIRST))
        remote = RemotePrefill("127.0.0.1", transfer.kv_port)
        answering = asyncio.create_task(answer(decode, prompt(600), remote_prefill=remote))
        await until(lambda: connector(decode).counters.received_blocks > 20)
        os.kill(prefill._link.pid, signal.SIGKILL)
        assert await answering == expected
        received = await exchanged(decode)
        await first  # the supervisor starts it again, at the same address
        again = await answer(decode, prompt(text=5), remote_prefill=remote)
    assert again == await together(config, prompt(text=5))
    assert received.failed_loads == 1
    return received
