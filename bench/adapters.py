"""`python -m bench.adapters [MODEL]`: tokens/s of 16 streams of 16 adapters, beside 16 streams of the model alone.

The two take turns in one engine, so that their ratio is the cost of adapters: of one for all streams, and of one for
each. Prompts are read before the clock starts. Prints JSON.

With `--adapters N` so many are known and `--resident` of them resident, and requests ask for them by Zipf's law:
tokens/s beside the same requests without any, and beside an estimate of a server that has one merged model at a time;
and the gaps between tokens of other streams while adapters are loaded, beside the same requests without adapters. With
`--picture FILE` the requests run once more in a pool of `--kv-blocks`, in which not all of the resident have room
beside prompts, and the picture shows over time what its blocks are used for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
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


async def answered(engine: Engine, names: Sequence[str | None]) -> float:
    """Returns the tokens/s of requests with these adapters, `STREAMS` of them open at a time."""
    gate = asyncio.Semaphore(STREAMS)

    async def one(at: int, name: str | None) -> None:
        prompt = [3 + (at * 31 + i) % 300 for i in range(PROMPT)]
        async with gate, await engine.open(prompt, adapter=name, tenant="bench") as seq:
            await seq.generate_all(Span(GREEDY, max_tokens=TOKENS, ignore_eos=True))

    began = time.perf_counter()
    await asyncio.gather(*(one(at, name) for at, name in enumerate(names)))
    return len(names) * TOKENS / (time.perf_counter() - began)


async def gaps_ms(engine: Engine, beside: Callable[[], Awaitable[None]]) -> list[float]:
    """Returns the milliseconds between the tokens of four streams, from when `beside` begins until it ends."""
    gaps: list[float] = []
    over = asyncio.Event()

    async def stream(at: int) -> None:
        while not over.is_set():
            async with await engine.open([3 + at, 5, 7], tenant="bench") as seq:
                with seq.generate(Span(GREEDY, max_tokens=500, ignore_eos=True)) as pieces:
                    last = None
                    async for _ in pieces:
                        now = time.perf_counter()
                        if last is not None:
                            gaps.append(1e3 * (now - last))
                        last = now
                        if over.is_set():
                            break

    streams = [asyncio.create_task(stream(at)) for at in range(4)]
    await asyncio.sleep(0.2)
    gaps.clear()
    await beside()
    over.set()
    await asyncio.gather(*streams)
    return sorted(gaps)


async def by_zipf(model: str, path: Path, options: argparse.Namespace) -> Json:
    """Returns the measures of many known adapters."""
    count, resident, loads = options.adapters, options.resident, min(100, options.adapters)
    names = [f"a{at}" for at in range(count)]
    paths = [str(write_adapter(path / name, Path(model), rank=options.rank, seed=at, targets=ATTENTION, spread=0.02))
             for at, name in enumerate(names)]  # fmt: skip
    known = tuple(zip(names, paths, strict=True))
    config = EngineConfig(model, adapters=known, max_adapters=resident, max_host_adapters=count, prefix_cache=False)
    weights = [1 / (at + 1) ** options.zipf for at in range(count)]
    asked = random.Random(1).choices(names, weights, k=options.requests)
    began = time.perf_counter()
    async with await Engine.start(config) as engine:
        started_s = time.perf_counter() - began
        await answered(engine, [None] * STREAMS)
        speeds: dict[str, list[float]] = {"base": [], "zipf": []}
        for _ in range(options.rounds):
            speeds["base"].append(await answered(engine, [None] * len(asked)))
            speeds["zipf"].append(await answered(engine, asked))
        before = {each.name: each for each in (await engine.stats()).adapters}

        async def requests(prefix: str | None) -> None:
            for at in range(loads):
                name = None if prefix is None else f"{prefix}{at}"
                if name is not None:
                    await engine.load_adapter(name, paths[at])
                async with await engine.open([9, 8, 7], adapter=name, tenant="bench") as seq:
                    await seq.generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True))

        without = await gaps_ms(engine, lambda: requests(None))
        beside = await gaps_ms(engine, lambda: requests("late"))
    began = time.perf_counter()
    async with await Engine.start(EngineConfig(model)):
        swap_s = time.perf_counter() - began
    base, zipf = (statistics.median(speeds[of]) for of in ("base", "zipf"))
    swaps = sum(a != b for a, b in pairwise(asked))
    swapping = len(asked) * TOKENS / (len(asked) * TOKENS / base + swaps * swap_s)
    p99 = [each[int(0.99 * (len(each) - 1))] if each else 0.0 for each in (without, beside)]
    return {
        "known": count, "resident": resident, "requests": len(asked), "start_s": round(started_s, 2),
        "tokens_per_s": {"base": round(base, 1), "zipf": round(zipf, 1), "swapping": round(swapping, 1)},
        "ratio": round(zipf / base, 3), "swap_s": round(swap_s, 2), "swaps": swaps,
        "loads": sum(each.loads for each in before.values()),
        "evictions": sum(each.evictions for each in before.values()),
        "gap_ms": {"p99 without": round(p99[0], 2), f"p99 of {loads} loads": round(p99[1], 2)},
        "gap_ratio": round(p99[1] / p99[0], 3) if p99[0] else None,
    }  # fmt: skip


USES = {  # of the pool's blocks, from the bottom up: the field of `Stats`, and the colour
    "pinned adapters": ("adapter_blocks_pinned", "#1f3f36"),
    "adapters in use": ("adapter_blocks_used", "#2f5d50"),
    "idle adapters": ("adapter_blocks_idle", "#8fb5a8"),
    "K/V in use": ("blocks_used", "#b4552d"),
    "cached K/V": ("blocks_cached", "#e3b79f"),
    "free": ("blocks_free", "#eeeeee"),
}


async def blocks_over_time(model: str, path: Path, options: argparse.Namespace) -> Json:
    """Returns the seconds of samples, and the blocks by use at each, while requests ask for adapters by Zipf's law."""
    names = [f"a{at}" for at in range(options.adapters)]
    known = tuple((name, str(path / name)) for name in names)  # that `by_zipf` wrote
    config = EngineConfig(
        model, adapters=known, max_adapters=options.resident, kv_blocks=options.kv_blocks, pinned_adapters=("a0",)
    )
    weights = [1 / (at + 1) ** options.zipf for at in range(options.adapters)]
    asked = random.Random(2).choices(names, weights, k=options.requests)
    seen: Json = {"s": [], **{use: [] for use in USES}}
    async with await Engine.start(config) as engine:
        began = time.perf_counter()
        running = asyncio.create_task(answered(engine, asked))
        while not running.done():
            stats = await engine.stats()
            seen["s"].append(round(time.perf_counter() - began, 3))
            for use, (field, _) in USES.items():
                seen[use].append(getattr(stats, field))
            await asyncio.sleep(0.02)
        await running
    return seen


def draw(seen: Json, file: Path) -> None:
    """Draws the blocks by use over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 3.6))
    colours = [colour for _, colour in USES.values()]
    axis.stackplot(seen["s"], *(seen[use] for use in USES), labels=list(USES), colors=colours, step="post")
    axis.set(xlabel="s", ylabel="blocks of the pool", xlim=(0, seen["s"][-1]))
    axis.margins(y=0)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)
    figure.savefig(file, bbox_inches="tight")
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.adapters")
    parser.add_argument("model", nargs="?", default="models/pebble")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--adapters", type=int, help="that are known; 100 of them are loaded beside other streams")
    parser.add_argument("--resident", type=int, default=16)
    parser.add_argument("--zipf", type=float, default=1.0, help="the exponent of the law that requests ask by")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--picture", type=Path, help="an .svg or .png of the pool's blocks over time")
    parser.add_argument("--kv-blocks", type=int, default=300, help="of that run")
    options = parser.parse_args(argv)
    if options.picture is not None and (options.adapters is None or options.picture.suffix not in (".svg", ".png")):
        parser.error(f"--picture is {options.picture}; accepted: with --adapters, a file that ends in .svg or .png.")
    made: Json = {"hardware": hardware.describe(), "model": options.model, "streams": STREAMS}
    if options.adapters is not None:
        with tempfile.TemporaryDirectory() as path:
            made["zipf"] = asyncio.run(by_zipf(options.model, Path(path), options))
            if options.picture is not None:
                draw(asyncio.run(blocks_over_time(options.model, Path(path), options)), options.picture)
        print(json.dumps(made, indent=1))
        return
    for name, targets in (("attention", ATTENTION), ("all", ALL)):
        with tempfile.TemporaryDirectory() as path:
            made[name] = asyncio.run(measured(options.model, Path(path), options.rank, targets, options.rounds))
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
