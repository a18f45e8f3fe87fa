"""Measures growth with requests at once, with tokens of context, and with streams written beside each other."""

from __future__ import annotations

import asyncio
import itertools
from random import Random

from bench.load.drive import drive, running
from bench.load.workload import TraceRequest
from bench.parts import Json
from bench.serve.measured import percentiles

VOCAB = 6144


def requests() -> Json:
    """Conversations that come all at once, up to the queue's limit: the cost of one, and the wait of the last."""

    async def measure() -> Json:
        rows = []
        async with running() as engine:
            rng = Random(7)
            for count in (1, 4, 16, 64, 256, 1024):
                asks = [TraceRequest(0.0, _prompt(rng, 100), 24) for _ in range(count)]
                driven = await drive(engine, asks, at_once=True)
                ttft = percentiles([each.ttft for each in driven.outcomes])
                rows.append(
                    {
                        "requests": count,
                        "seconds": driven.seconds,
                        "ms_each": driven.seconds / count * 1e3,
                        "ttft_p50_s": ttft["p50"],
                        "ttft_max_s": ttft["max"],
                    }
                )
        return {"rows": rows, "prompt_tokens": 100, "new_tokens": 24}

    return asyncio.run(measure())


def context() -> Json:
    """A prompt up to the model's last position: the time to read it, and of each token after it."""

    async def measure() -> Json:
        rows = []
        async with running(prefix_cache=False) as engine:
            rng = Random(8)
            for length in (64, 256, 512, 1024, 2048, 3072, engine.max_model_len - 32):
                runs = [
                    await drive(engine, [TraceRequest(0.0, _prompt(rng, length), 32)], at_once=True) for _ in range(3)
                ]
                best = min((run.outcomes[0] for run in runs), key=lambda outcome: outcome.ended)
                rows.append(
                    {
                        "tokens": length,
                        "ttft_s": best.ttft,
                        "prefill_tokens_per_s": length / best.ttft,
                        "itl_ms": best.itl * 1e3,
                    }
                )
        return {"rows": rows}

    return asyncio.run(measure())


def streams() -> Json:
    """Answers that are written beside each other, at a short and a long context."""

    async def measure() -> Json:
        rows = []
        for length in (64, 1024):
            for count in (1, 2, 4, 8, 16, 32, 64, 128):
                blocks = count * ((length + 160) // 16 + 1) + 64
                options = {
                    "max_running": 128,
                    "kv_blocks": blocks,
                    "policy": "prefill-first",
                }  # all read, then all write
                async with running(**options) as engine:
                    rng = Random(9)
                    driven = await drive(engine, [TraceRequest(0.0, _prompt(rng, length), 128) for _ in range(count)])
                began = max(each.pieces[0] for each in driven.outcomes)
                ended = min(each.ended for each in driven.outcomes)  # in between all are being written
                times = [[at for at in each.pieces if began <= at <= ended] for each in driven.outcomes]
                gaps = percentiles([b - a for each in times for a, b in itertools.pairwise(each)])
                rows.append(
                    {
                        "context": length,
                        "streams": count,
                        "tokens_per_s": sum(map(len, times)) / (ended - began),
                        "gap_p50_ms": gaps["p50"] * 1e3,
                        "gap_p99_ms": gaps["p99"] * 1e3,
                    }
                )
        return {"rows": rows}

    return asyncio.run(measure())


def _prompt(rng: Random, length: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(10, VOCAB), k=length))
