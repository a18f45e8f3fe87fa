"""Measures gaps between tokens while long prompts arrive: in one engine, and with an engine that prefills for another.

All engines are processes of their own on this machine's CPU: one of all cores, or two that share them. The model is run
beyond the positions that it was trained for, which changes no time.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine import GREEDY, Engine, EngineConfig, Span
from engine.config import KVTransferConfig
from engine.params import RemotePrefill

PROMPT = 8192  # tokens
PROMPTS = 3
STREAMS = 4  # that decode meanwhile
ANSWER = 8  # tokens of a long prompt's answer
PAUSE_S = 0.5  # between an answer and the next long prompt
CORES = 2


@dataclass
class Measured:
    """Times and answers of one way."""

    gaps_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)


async def measure(model: Path) -> dict[str, Any]:  # Any: plain JSON
    with tempfile.TemporaryDirectory() as directory:
        longer = _with_positions(model, Path(directory) / model.name, 2 * PROMPT)
        (secret := Path(directory) / "secret").write_text(random.randbytes(16).hex())
        config = EngineConfig(str(longer), max_model_len=2 * PROMPT, kv_blocks=4000, runs_in="process", threads=CORES)
        rows = [
            {"way": "together", **await _together(config)},
            {"way": "together, chunks of a fixed size", **await _together(replace(config, fixed_chunks=True))},
        ]
        apart, exchanged = await _apart(replace(config, threads=CORES // 2), secret)
        rows.append({"way": "apart", **apart})
    answers = [row.pop("answers") for row in rows]
    return {
        "model": model.name, "prompt_tokens": PROMPT, "prompts": PROMPTS, "streams": STREAMS, "rows": rows,
        "same_answers": all(each == answers[0] for each in answers), **exchanged,
    }  # fmt: skip


async def _together(config: EngineConfig) -> dict[str, Any]:
    async with await Engine.start(config) as engine:
        return _row(await _run(engine, None, None))


async def _apart(config: EngineConfig, secret: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    transfer = KVTransferConfig("kv_producer", str(secret), kv_port=free_port())
    consumer = replace(transfer, kv_role="kv_consumer", peers=(transfer.kv_ip,))
    async with AsyncExitStack() as stack:
        prefill, decode = [
            await stack.enter_async_context(await Engine.start(replace(config, kv_transfer=each)))
            for each in (transfer, consumer)
        ]
        made = await _run(decode, prefill, RemotePrefill(transfer.kv_ip, transfer.kv_port))
        sent, received = (await prefill.stats()).kv_transfer, (await decode.stats()).kv_transfer
        expected = PROMPTS * (PROMPT // config.block_size) * block_bytes(config)
    return _row(made), {
        "bytes_moved": received.received_bytes,
        "bytes_expected": expected,
        "failed_loads": received.failed_loads,
        "send_s": sent.send_seconds,
        "overlapped": sent.overlapped_seconds / sent.send_seconds,
    }


async def _run(engine: Engine, prefill: Engine | None, remote: RemotePrefill | None) -> Measured:
    """Streams beside long prompts, which come one after another."""
    made, over = Measured(), asyncio.Event()
    streams = [asyncio.create_task(_stream(engine, at, made, over)) for at in range(STREAMS)]
    await asyncio.sleep(1.0)
    made.gaps_s.clear()
    for at in range(PROMPTS):
        prompt = [random.Random(at).randrange(20, 4000) for _ in range(PROMPT)]
        reading = None if prefill is None else asyncio.create_task(read(prefill, prompt))
        first, tokens = await answer(engine, prompt, remote)
        if reading is not None:
            await reading
        made.ttft_s.append(first)
        made.answers.append(tokens)
        await asyncio.sleep(PAUSE_S)
    over.set()
    await asyncio.gather(*streams)
    return made


async def answer(
    engine: Engine, prompt: list[int], remote: RemotePrefill | None, tenant: str = ""
) -> tuple[float, tuple[int, ...]]:
    """Returns the seconds to the first token, and all tokens."""
    began, first, tokens = time.perf_counter(), None, list[int]()
    async with await engine.open(prompt, remote_prefill=remote, tenant=tenant) as seq:
        async for out in seq.generate(Span(GREEDY, max_tokens=ANSWER, ignore_eos=True)):
            first = first or time.perf_counter() - began
            tokens += out.token_ids
    assert first is not None
    return first, tuple(tokens)


async def read(engine: Engine, prompt: list[int], tenant: str = "") -> None:
    """Has an engine prefill a prompt."""
    async with await engine.open(prompt, tenant=tenant) as seq:
        await seq.generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True))


async def _stream(engine: Engine, at: int, made: Measured, over: asyncio.Event) -> None:
    """Writes answer after answer, and notes the seconds between pieces of each."""
    while not over.is_set():
        async with await engine.open([30 + at] * 40) as seq:
            before = None
            async for _ in seq.generate(Span(GREEDY, max_tokens=1000, ignore_eos=True)):
                now = time.perf_counter()
                if before is not None:
                    made.gaps_s.append(now - before)
                before = now
                if over.is_set():
                    break


def _row(made: Measured) -> dict[str, Any]:
    cuts = statistics.quantiles(made.gaps_s, n=100)
    return {
        "gaps": len(made.gaps_s), "gap_p50_s": cuts[49], "gap_p99_s": cuts[98], "gap_max_s": max(made.gaps_s),
        "ttft_s": statistics.median(made.ttft_s), "answers": made.answers,
    }  # fmt: skip


def block_bytes(config: EngineConfig) -> int:
    """Returns the bytes of a block, by the layers of the checkpoint: keys and values, or a short convolution's inputs,
    of each token in 16 bits."""
    spec = json.loads((Path(config.model) / "config.json").read_text("utf-8"))
    kinds = spec.get("layer_types") or ["full_attention"] * spec["num_hidden_layers"]
    attention = 2 * spec["num_key_value_heads"] * spec["head_dim"]
    numbers = sum(attention if kind == "full_attention" else spec["hidden_size"] for kind in kinds)
    return 2 * config.block_size * numbers


def _with_positions(model: Path, copy: Path, positions: int) -> Path:
    """Returns a copy of a model that takes so many tokens."""
    copy.mkdir()
    for file in model.iterdir():
        if file.name != "config.json":
            (copy / file.name).symlink_to(file.resolve())
    changed = {**json.loads((model / "config.json").read_text("utf-8")), "max_position_embeddings": positions}
    (copy / "config.json").write_text(json.dumps(changed))
    return copy


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
