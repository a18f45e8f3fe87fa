"""Servers and K/V stores as processes: one is killed, and requests go on, with hits where a store has the prefix."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from engine import GREEDY, Engine, EngineConfig, Span
from engine.config import KVTransferConfig
from engine.ipc.supervisor import SupervisedLink
from tests.engine.kv_apart import answer, exchanged, free_port, prompt, until

pytestmark = pytest.mark.slow  # processes that load a model, or the command

COMMAND = [sys.executable, "-m", "app.cli", "kv-store"]
SPAN = Span(GREEDY, max_tokens=12, ignore_eos=True)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("sixteen bytes or more")
    return tmp_path / "secret"


@contextmanager
def running(secret: Path, *options: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """A store, the port of its K/V and the address of its metrics."""
    command = [*COMMAND, "--secret-file", str(secret), "--port", str(port), "--metrics-port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words, process.communicate(timeout=10)[1]
        yield process, int(words[4].strip(",").rpartition(":")[2]), words[-1]
    finally:
        process.kill()
        process.communicate(timeout=10)


def metrics(address: str) -> dict[str, float]:
    text = httpx.get(f"{address}/metrics", timeout=10).text
    lines = [each.rpartition(" ") for each in text.splitlines() if not each.startswith("#")]
    return {name.removeprefix("ponder_kv_store_"): float(value) for name, _, value in lines}


def config_of(model: Path, secret: Path, *ports: int, **more: object) -> EngineConfig:
    stores = tuple(f"127.0.0.1:{each}" for each in ports)
    transfer = KVTransferConfig(
        "kv_both", str(secret), kv_connector="KVStoreConnector", stores=stores, lookup_timeout_s=5.0
    )
    plain = EngineConfig(str(model), dtype="float32", block_size=4, kv_blocks=400, max_batch_tokens=16)
    return replace(plain, kv_transfer=transfer, **more)  # type: ignore[arg-type]  # fields by name


async def test_a_killed_servers_prefix_is_a_hit_and_a_store_that_stops_keeps_it(
    random_model: Path, secret: Path
) -> None:
    """Servers as processes: the first is killed, then the store stops and starts again from its disk."""
    kept = ["--memory", "8MiB", "--disk", "8MiB", "--dir", str(secret.parent / "kept")]
    with running(secret, *kept) as (store, port, address):
        assert httpx.get(f"{address}/health", timeout=10).text == "ok\n"
        async with await Engine.start(config_of(random_model, secret, port, runs_in="process")) as first:
            expected = await answer(first, prompt(200), SPAN)
            await until(lambda: metrics(address)["put_blocks_total"] >= 50)
            assert isinstance(first._link, SupervisedLink)
            os.kill(first._link.pid, signal.SIGKILL)
            async with await Engine.start(config_of(random_model, secret, port)) as second:
                assert await answer(second, prompt(200), SPAN) == expected
                assert (await exchanged(second)).received_blocks == 50
        told = metrics(address)
        assert told['hit_blocks_total{tier="memory"}'] == 50 and told['blocks{tier="memory"}'] >= 50
        store.send_signal(signal.SIGTERM)
        _, err = store.communicate(timeout=20)
        assert store.returncode == 0 and "Traceback" not in err
    with running(secret, *kept) as (_, port, address):
        assert metrics(address)['blocks{tier="disk"}'] >= 50
        async with await Engine.start(config_of(random_model, secret, port)) as third:
            assert await answer(third, prompt(200), SPAN) == expected
            assert (await exchanged(third)).received_blocks == 50
        assert metrics(address)['hit_blocks_total{tier="disk"}'] == 50


async def test_requests_go_on_when_the_store_is_killed_among_them(random_model: Path, secret: Path) -> None:
    """Eight prompts are answered while two stores are used, of which one is killed; later it is started again."""
    alone = replace(config_of(random_model, secret, 1), kv_transfer=None)
    async with await Engine.start(alone) as engine:
        expected = [await answer(engine, prompt(120, text), SPAN) for text in range(8)]
    port = free_port()
    with running(secret, port=port) as (store, _, _), running(secret) as (_, other, address):
        async with (
            await Engine.start(config_of(random_model, secret, port, other)) as first,
            await Engine.start(config_of(random_model, secret, port, other)) as second,
        ):
            assert [await answer(first, prompt(120, text), SPAN) for text in range(8)] == expected
            asked = [asyncio.create_task(answer(second, prompt(120, text), SPAN)) for text in range(8)]
            await until(lambda: any(each.done() for each in asked))
            store.kill()
            began = time.monotonic()
            assert await asyncio.gather(*asked) == expected
            assert [await answer(second, prompt(120, text), SPAN) for text in range(8)] == expected
            assert time.monotonic() - began < 20
            assert metrics(address)["put_blocks_total"] > 0
            for each in (first, second):
                assert each.healthy
                each._core.check()
