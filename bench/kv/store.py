"""Measures the first token of prompts whose K/V a store has, against computing them, and what a lookup in vain costs.

Three engines and the store are processes on this machine's CPU: one computes each prompt first and saves it, the others
then answer it in turn, one from the store and one by computing it. Every prompt is new to all of them.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine import GREEDY, Engine, EngineConfig, Span
from engine.config import KVTransferConfig

LENGTHS = (256, 1000, 2000, 4000)  # tokens
ROUNDS = 7
SPAN = Span(GREEDY, max_tokens=8, ignore_eos=True)


async def measure(model: Path) -> dict[str, Any]:  # Any: plain JSON
    with tempfile.TemporaryDirectory() as directory:
        (secret := Path(directory) / "secret").write_text(random.randbytes(16).hex())
        command = [sys.executable, "-m", "app.cli", "kv-store", "--secret-file", str(secret)]
        command += ["--port", "0", "--metrics-port", "0", "--memory", "1GiB"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as store:
            try:
                assert store.stdout is not None
                found = re.search(r" at (\S+:\d+),", store.stdout.readline())
                assert found, "the store did not start"
                return await _measure(model, secret, found[1])
            finally:
                store.terminate()


async def _measure(model: Path, secret: Path, address: str) -> dict[str, Any]:
    transfer = KVTransferConfig("kv_both", str(secret), kv_connector="KVStoreConnector", stores=(address,))
    plain = EngineConfig(str(model), kv_blocks=4000, runs_in="process", threads=1)
    configs = (
        replace(plain, kv_transfer=transfer),
        replace(plain, kv_transfer=replace(transfer, kv_role="kv_consumer")),
        plain,
    )
    rows, same = [], True
    async with AsyncExitStack() as stack:
        first, second, alone = [await stack.enter_async_context(await Engine.start(each)) for each in configs]
        for length in LENGTHS:
            hits, computed, misses = list[float](), list[float](), list[float]()
            for number in range(ROUNDS):
                prompt = _prompt(length, number)
                saved = (await first.stats()).kv_transfer.sent_blocks
                _, expected = await _first_token(first, prompt)
                while (await first.stats()).kv_transfer.sent_blocks < saved + length // plain.block_size:
                    await asyncio.sleep(0.01)
                for engine, times in ((second, hits), (alone, computed))[:: 1 if number % 2 else -1]:
                    seconds, tokens = await _first_token(engine, prompt)
                    times.append(seconds)
                    same &= tokens == expected
                misses.append((await _first_token(second, _prompt(length, 1000 + number)))[0])
            rows.append(
                {
                    "prompt_tokens": length, "store_ttft_s": statistics.median(hits),
                    "computed_ttft_s": statistics.median(computed), "missed_ttft_s": statistics.median(misses),
                    "ratios": [round(c / h, 2) for c, h in zip(computed, hits, strict=True)],
                }
            )  # fmt: skip
        told = (await second.stats()).kv_transfer
    return {
        "model": model.name, "rounds": ROUNDS, "rows": rows, "same_answers": same,
        "received_bytes": told.received_bytes, "failed_loads": told.failed_loads,
        "lookup_ms": 1000 * told.lookup_seconds / max(1, told.lookups), "passed_over_blocks": told.passed_over_blocks,
    }  # fmt: skip


def _prompt(length: int, number: int) -> list[int]:
    chance = random.Random(length * 10_000 + number)
    return [chance.randrange(20, 4000) for _ in range(length)]


async def _first_token(engine: Engine, prompt: list[int]) -> tuple[float, tuple[int, ...]]:
    """Returns the seconds to the first token, and the answer."""
    began, first, tokens = time.perf_counter(), 0.0, list[int]()
    async with await engine.open(prompt) as seq:
        async for out in seq.generate(SPAN):
            first = first or time.perf_counter() - began
            tokens += out.token_ids
    return first, tuple(tokens)
