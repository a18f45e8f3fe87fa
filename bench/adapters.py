"""`python -m bench.adapters [MODEL]`: tokens/s of 16 streams of 16 adapters, beside 16 streams of the model alone.

The two take turns in one engine, so that their ratio is the cost of adapters: of one for all streams, and of one for
each. Prompts are read before the clock starts. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import hardware
from engine import GREEDY, Engine, EngineConfig, Span
from tests.lora import ALL, ATTENTION, write_adapter

STREAMS = 16
PROMPT, TOKENS = 64, 64
Json = dict[str, Any]  # Any: plain JSON


async def tokens_per_s(engine: Engine, names: Sequence[str | None]) -> float:
    """Returns the tokens/s of a stream for each name, after all prompts were read."""
    prompts = [[3 + (at * 31 + i) % 300 for i in range(PROMPT)] for at in range(len(names))]
    opened = [
        await engine.open(prompt, adapter=name, tenant="bench") for prompt, name in zip(prompts, names, strict=True)
    ]
    try:
        await asyncio.gather(*(seq.generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True)) for seq in opened))
        began = time.perf_counter()
        span = Span(GREEDY, max_tokens=TOKENS, ignore_eos=True)
        await asyncio.gather(*(seq.generate_all(span) for seq in opened))
        return len(names) * TOKENS / (time.perf_counter() - began)
    finally:
        for seq in opened:
            seq.close()


async def measured(model: str, path: Path, rank: int, targets: Sequence[str], rounds: int) -> Json:
    """Returns the medians of `rounds` turns, and their ratios to the model alone."""
    names = [f"a{at}" for at in range(STREAMS)]
    paths = [write_adapter(path / name, Path(model), rank=rank, seed=at, targets=targets, spread=0.02)
             for at, name in enumerate(names)]  # fmt: skip
    adapters = tuple(zip(names, map(str, paths), strict=True))
    config = EngineConfig(model, adapters=adapters, max_adapters=STREAMS, prefix_cache=False)
    mixes: dict[str, list[str | None]] = {"none": [None] * STREAMS, "one": ["a0"] * STREAMS, "each": [*names]}
    found: dict[str, list[float]] = {mix: [] for mix in mixes}
    async with await Engine.start(config) as engine:
        for turn in range(rounds + 1):  # the first warms up
            for mix, of in mixes.items():
                speed = await tokens_per_s(engine, of)
                if turn:
                    found[mix].append(speed)
        numerics = {"dtype": engine.dtype, "kernels": engine.numerics.kernels, "threads": engine.threads}
    medians = {mix: statistics.median(speeds) for mix, speeds in found.items()}
    ratios = {mix: round(medians[mix] / medians["none"], 3) for mix in ("one", "each")}
    return {**numerics, "rank": rank, "tokens_per_s": {k: round(v, 1) for k, v in medians.items()}, "ratio": ratios}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.adapters")
    parser.add_argument("model", nargs="?", default="models/pebble")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    made: Json = {"hardware": hardware.describe(), "model": options.model, "streams": STREAMS}
    for name, targets in (("attention", ATTENTION), ("all", ALL)):
        with tempfile.TemporaryDirectory() as path:
            made[name] = asyncio.run(measured(options.model, Path(path), options.rank, targets, options.rounds))
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
