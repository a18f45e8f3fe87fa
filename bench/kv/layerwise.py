"""Measures the K/V of prompts of one chunk that leaves chunk by chunk or layer by layer, in interleaved pairs.

Two engines prefill, one of each way, and one decodes: processes of one thread each, on this machine's CPU. Both ways
get the same prompt in turn, as two tenants: nothing of the other is found. By chunk, the time at which a prompt is
computed is that of its step's end, later than its last layer: its wait seems shorter by that.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.kv import disaggregation
from engine import Engine, EngineConfig
from engine.config import KVTransferConfig
from engine.params import RemotePrefill

LENGTHS = (256, 1024)  # tokens of a prompt
PAIRS = 12
WAYS = {"by chunk": False, "by layer": True}


@dataclass
class Transfers:
    """Times of one way, in seconds, of each prompt."""

    waited_s: list[float] = field(default_factory=list)  # from the end of computing to the first decode step
    ttft_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)  # of the engine that prefills
    send_s: float = 0.0
    overlapped_s: float = 0.0
    nbytes: int = 0
    answers: list[tuple[int, ...]] = field(default_factory=list)


async def measure(model: Path) -> dict[str, Any]:  # Any: plain JSON
    with tempfile.TemporaryDirectory() as directory:
        (secret := Path(directory) / "secret").write_text(random.randbytes(16).hex())
        tokens = 2 * max(LENGTHS)
        config = EngineConfig(
            str(model), max_model_len=tokens, max_batch_tokens=tokens, kv_blocks=4000, runs_in="process", threads=1
        )
        return {"pairs": PAIRS, "rows": await _ways(config, secret)}


async def _ways(config: EngineConfig, secret: Path) -> list[dict[str, Any]]:
    transfers = {
        way: KVTransferConfig(
            "kv_producer",
            str(secret),
            kv_port=disaggregation.free_port(),
            use_layerwise=by_layer,
            layerwise_min_tokens=1,
        )
        for way, by_layer in WAYS.items()
    }
    async with AsyncExitStack() as stack:
        prefill = {
            way: await stack.enter_async_context(await Engine.start(replace(config, kv_transfer=each)))
            for way, each in transfers.items()
        }
        any_of = next(iter(transfers.values()))
        consumer = replace(any_of, kv_role="kv_consumer", peers=(any_of.kv_ip,))
        decode = await stack.enter_async_context(await Engine.start(replace(config, kv_transfer=consumer)))
        return [row for length in LENGTHS for row in await _pairs(prefill, decode, transfers, length)]


async def _pairs(
    prefill: Mapping[str, Engine], decode: Engine, transfers: Mapping[str, KVTransferConfig], length: int
) -> list[dict[str, Any]]:
    found = {way: Transfers() for way in WAYS}
    for at in range(-1, PAIRS):  # the first is not counted
        draw = random.Random(length + at)
        prompt = [draw.randrange(20, 4000) for _ in range(length)]
        for way in list(WAYS)[:: 1 if at % 2 else -1]:
            remote = RemotePrefill(transfers[way].kv_ip, transfers[way].kv_port)
            await _one(prefill[way], decode, remote, prompt, way, found[way] if at >= 0 else Transfers())
    block_nbytes = disaggregation.block_bytes(decode.config) * (length // decode.config.block_size)
    same = found["by chunk"].answers == found["by layer"].answers
    return [
        {
            "way": way, "prompt_tokens": length, "waited_s": statistics.median(each.waited_s),
            "waited_max_s": max(each.waited_s), "ttft_s": statistics.median(each.ttft_s),
            "step_s": statistics.median(each.step_s), "overlapped": each.overlapped_s / each.send_s,
            "bytes_moved": each.nbytes, "bytes_expected": PAIRS * block_nbytes, "same_answers": same,
            "waited_less": sum(
                layer < chunk
                for chunk, layer in zip(found["by chunk"].waited_s, found["by layer"].waited_s, strict=True)
            ),
        }
        for way, each in found.items()
    ]  # fmt: skip


async def _one(
    prefill: Engine, decode: Engine, remote: RemotePrefill, prompt: list[int], tenant: str, into: Transfers
) -> None:
    before, received = await prefill.stats(), (await decode.stats()).kv_transfer
    reading = asyncio.create_task(disaggregation.read(prefill, prompt, tenant))
    ttft_s, tokens = await disaggregation.answer(decode, prompt, remote, tenant)
    await reading
    after, loaded = await prefill.stats(), (await decode.stats()).kv_transfer
    into.waited_s.append(loaded.loaded_at - after.kv_transfer.computed_at)
    into.ttft_s.append(ttft_s)
    into.step_s.append(after.step_seconds - before.step_seconds)
    into.send_s += after.kv_transfer.send_seconds - before.kv_transfer.send_seconds
    into.overlapped_s += after.kv_transfer.overlapped_seconds - before.kv_transfer.overlapped_seconds
    into.nbytes += loaded.received_bytes - received.received_bytes
    into.answers.append(tokens)
