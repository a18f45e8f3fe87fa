"""Several clients of one core: each gets its own replies, and goes on where the core is started again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from engine import GREEDY, Engine, EngineConfig, EngineStopped, SequenceClosed, Span
from engine.errors import EngineError
from tests.engine.ipc.test_supervised_engine import PROMPT, answers, config, engine, link_of, same, until

pytestmark = pytest.mark.slow

__all__ = ["config", "engine"]  # fixtures
FOREVER = Span(GREEDY, max_tokens=400, ignore_eos=True)


class Places:
    """Tells every client where the core of an engine is, as a process that keeps it would."""

    def __init__(self, engine: Engine) -> None:
        self._queues: list[asyncio.Queue[str | EngineError | None]] = []
        self._last: str | EngineError | None = engine.share(self._tell, self._tell)

    def _tell(self, place: str | EngineError | None) -> None:
        self._last = place
        for queue in self._queues:
            queue.put_nowait(place)

    async def __call__(self) -> AsyncIterator[str | None]:
        queue: asyncio.Queue[str | EngineError | None] = asyncio.Queue()
        self._queues.append(queue)
        queue.put_nowait(self._last)
        while not isinstance(place := await queue.get(), EngineError):
            yield place
        raise place

    @asynccontextmanager
    async def joined(self, config: EngineConfig, client: int) -> AsyncIterator[Engine]:
        async with await Engine.join(config, client, self()) as engine:
            yield engine


async def until_all_closed(engine: Engine) -> None:
    """Waits until no client has a sequence open: each one's closing reaches the core by a connection of its own."""
    async with asyncio.timeout(30):
        while (await engine.stats()).sequences:
            await asyncio.sleep(0.01)


async def test_clients_get_their_own_answers_side_by_side(config: EngineConfig, engine: Engine) -> None:
    expected, places = await answers(engine), Places(engine)
    async with places.joined(config, 1) as one, places.joined(config, 2) as other:
        assert (one.max_model_len, one.vocab_size, one.dtype) == (engine.max_model_len, engine.vocab_size, engine.dtype)
        for found in await asyncio.gather(*(answers(each) for each in (one, engine, other))):
            same(found, expected)
        await until_all_closed(one)


async def test_all_clients_go_on_where_a_killed_core_is_started_again(config: EngineConfig, engine: Engine) -> None:
    expected, places = await answers(engine), Places(engine)
    async with places.joined(config, 1) as one, places.joined(config, 2) as other:
        progress: asyncio.Queue[int] = asyncio.Queue()
        asked = asyncio.gather(answers(one, progress), answers(other))
        for pieces in (20, 300):
            for _ in range(pieces):
                await progress.get()
            os.kill(link_of(engine).pid, signal.SIGKILL)
            await until(engine, "restarting")
            assert one.state == "restarting"
            await until(engine, "running")
            await until(one, "running")
        for found in await asked:
            same(found, expected)
        await until_all_closed(other)


async def test_what_a_client_that_is_gone_had_open_closes_and_nobody_elses(
    config: EngineConfig, engine: Engine
) -> None:
    places = Places(engine)
    async with places.joined(config, 1) as one:
        kept = await one.open(PROMPT)
        async with places.joined(config, 2) as gone:
            seqs = [await gone.open(PROMPT) for _ in range(3)]
            streams = [seq.generate(FOREVER) for seq in seqs]
            await asyncio.gather(*(anext(aiter(stream)) for stream in streams))
            assert (await engine.stats()).sequences == 4
        engine.forget_client(2)
        assert (await engine.stats()).sequences == 1
        assert len((await kept.generate_all(replace(FOREVER, max_tokens=3))).token_ids) == 3
        kept.close()


async def test_clients_hear_that_a_core_is_gone_for_good(config: EngineConfig, engine: Engine) -> None:
    async with Places(engine).joined(config, 1) as one:
        seq = await one.open(PROMPT)
        stream = aiter(seq.generate(FOREVER))
        await anext(stream)
        await engine.stop()
        with pytest.raises((EngineStopped, SequenceClosed)):
            while True:
                await anext(stream)
        await asyncio.sleep(0)
        assert one.state == "stopped"
        with pytest.raises(EngineStopped):
            await one.stats()


async def test_nobody_joins_a_core_that_is_gone(config: EngineConfig, engine: Engine) -> None:
    places = Places(engine)
    await engine.stop()
    with pytest.raises(EngineStopped):
        await Engine.join(config, 1, places())
