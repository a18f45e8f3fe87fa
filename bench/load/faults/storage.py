"""Fills or damages storage: the data's disk, the pool of K/V, its blocks on disk, snapshots."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

import httpx

from bench.load.drive import PEBBLE
from bench.load.faults.streams import EXACT, TIMES, chat, metrics, under_load
from bench.load.load_server import BenchServer
from bench.parts import Json
from bench.serve.asks import text
from bench.serve.measured import percentiles
from engine import GREEDY, BadSnapshot, Engine, EngineConfig, Span

DISK = 48 << 20  # bytes of the disk that gets full


def disk_full() -> Json:
    """The data's disk is full for a while: chats say so, streams do not care, and it works again with space."""
    with tempfile.TemporaryDirectory() as scratch:
        disk = Path(scratch) / "disk"
        disk.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", disk], capture_output=True)
        if mounted.returncode:
            return {"not_measured": f"no small disk can be mounted here: {mounted.stderr.decode()[:200]}"}
        answers = Counter[str]()

        async def fault(server: BenchServer, rng: Random) -> float:
            filler = disk / "filler"
            with filler.open("wb") as file:
                try:
                    while True:
                        file.write(bytes(1 << 20))
                        file.flush()
                except OSError:
                    pass
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
                for _ in range(4):
                    answers[f"full: {await chat(http, rng)}"] += 1
                filler.unlink()
                began = time.monotonic()
                while (how := await chat(http, rng)) != "202":
                    answers[f"room again: {how}"] += 1
                    if time.monotonic() - began > 30:
                        raise TimeoutError(f"chats do not come back: {how}")
                    await asyncio.sleep(0.1)
                answers["room again: 202"] += 1
            return time.monotonic() - began

        try:
            return {**under_load(fault, EXACT, data=disk), "chats": dict(answers)}
        finally:
            subprocess.run(["umount", "-l", disk], check=False)


def pool_full() -> Json:
    """Answers grow to several times the K/V there is: some lose theirs and read it again, and everyone is answered.

    The time is that until all of them are answered.
    """
    answers, evicted = Counter[str](), list[float]()

    async def fault(server: BenchServer, rng: Random) -> float:
        before = metrics(server)["ponder_preemptions_total"]
        began = time.monotonic()

        async def hog() -> None:
            body = {"model": "default", "prompt": text(100, rng), "max_tokens": 600, "ignore_eos": True}
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
                reply = await http.post("/v1/completions", json=body)
                told = reply.json()
                whole = reply.status_code == 200 and told["usage"]["completion_tokens"] == 600
                answers["whole" if whole else str(told)[:160]] += 1

        await asyncio.gather(*(hog() for _ in range(8)))
        evicted.append(metrics(server)["ponder_preemptions_total"] - before)
        return time.monotonic() - began

    made = under_load(fault, (*EXACT, "--kv-blocks", "160"))
    return {**made, "prompts": dict(answers), "preemptions": percentiles(evicted)}


def blocks_damaged() -> Json:
    """Some offloaded K/V files lose a byte, their end, or all: their tokens are prefilled again.

    The pool has blocks for a quarter of the tokens that the streams come back to.
    """
    with tempfile.TemporaryDirectory() as scratch:
        data, ways, bad = Path(scratch), Counter[str](), list[float]()

        async def fault(server: BenchServer, rng: Random) -> None:
            files = [
                path for path in (data / "kv").rglob("*") if path.is_file() and path.name not in ("secret", "lock")
            ]
            for path in rng.sample(files, min(len(files), 20)):
                way = rng.choice(("a byte", "the end", "all"))
                try:
                    size = path.stat().st_size
                    if way == "all":
                        path.unlink()
                    elif way == "the end":
                        os.truncate(path, rng.randrange(size))
                    else:
                        with path.open("r+b") as file:
                            file.seek(rng.randrange(size))
                            byte = file.read(1)
                            file.seek(-1, os.SEEK_CUR)
                            file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
                except FileNotFoundError:
                    continue  # it was given up meanwhile
                ways[way] += 1
            bad[:] = [metrics(server)["ponder_kv_tier_bad_blocks_total"]]

        options = ("--kv-blocks", "130", "--kv-disk-bytes", "200MiB", "--max-running", "8")
        made = under_load(fault, (*EXACT, *options), data=data, words=200)
        return {**made, "damaged": dict(ways), "bad_blocks_found": bad[0]}


def snapshots_damaged() -> Json:
    """Snapshots lose a byte or their end, while others write: none is taken, and each whole one goes on as it would."""
    return asyncio.run(_snapshots())


async def _snapshots() -> Json:
    rng, told = Random(14), Counter[str]()
    span = Span(GREEDY, max_tokens=24, ignore_eos=True)
    config = EngineConfig(str(PEBBLE), dtype="float32", kv_blocks=600, runs_in="process")
    async with await Engine.start(config) as engine:

        async def others() -> None:
            while True:
                async with await engine.open(_tokens(rng, 40)) as seq:
                    await seq.generate_all(span)

        busy = [asyncio.create_task(others()) for _ in range(4)]
        for _ in range(TIMES):
            async with await engine.open(_tokens(rng, rng.randrange(20, 200))) as seq:
                await seq.generate_all(span)
                kept = await seq.snapshot()
                expected = (await seq.generate_all(span)).token_ids
            at = rng.randrange(len(kept))
            for damaged in (kept[:at], kept[:at] + bytes([kept[at] ^ 1 << rng.randrange(8)]) + kept[at + 1 :]):
                try:
                    (await engine.resume(damaged)).close()
                    told["damaged and taken"] += 1
                except BadSnapshot:
                    told["damaged and refused"] += 1
            async with await engine.resume(kept) as seq:
                same = (await seq.generate_all(span)).token_ids == expected
                told["whole and the same" if same else "whole and wrong"] += 1
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        stats = await engine.stats()
    return {"times": TIMES, "told": dict(told), "sequences_after": stats.sequences, "blocks_after": stats.blocks_used}


def _tokens(rng: Random, count: int) -> list[int]:
    return [rng.randrange(300, 1000) for _ in range(count)]
