"""Our engine and llama.cpp on the same model and tokens, each by itself or in turns."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from bench import hardware
from engine import GREEDY, Engine, EngineConfig, Span

PROMPT, PREFILL = 32, 512
BATCHES = [1, 4, 16, 32]  # of the contest in turns
PEERS = {"none": "bf16", "int8": "q8_0", "int4": "q4_0"}  # our weights -> llama.cpp's
Part = dict[str, Any]  # Any: plain JSON


async def measured(model: Path, options: dict[str, Any], steps: int, batches: list[int]) -> Part:
    """Tokens a second of our engine: `decode` of so many at once, `prefill` of one prompt."""
    config = EngineConfig(
        str(model),
        dtype="bfloat16",
        max_running=128,
        max_batch_tokens=8192,
        fixed_chunks=True,
        **{"kv_blocks": 1200, "prefix_cache": False, **options},
    )
    found: Part = {"decode": {}}
    async with await Engine.start(config) as engine:

        async def one(seed: int, prompt: int, tokens: int) -> list[float]:
            at = []
            async with await engine.open([(seed * 31 + i * 7919) % 150_000 for i in range(prompt)]) as seq:
                async for out in seq.generate(Span(GREEDY, max_tokens=tokens, ignore_eos=True)):
                    at += [time.perf_counter()] * len(out.token_ids)
            return at

        for n in batches:
            every = await asyncio.gather(*(one(i, PROMPT, steps + 8) for i in range(n)))
            began, ended = max(at[0] for at in every), min(at[-1] for at in every)
            count = sum(began < when <= ended for at in every for when in at)
            found["decode"][str(n)] = count / (ended - began)
        times = []
        for seed in range(5):
            start = time.perf_counter()
            await one(1000 + seed, PREFILL, 1)
            times.append(time.perf_counter() - start)
        found["prefill"] = PREFILL / statistics.median(times)
        found["threads"] = engine.threads
    gc.collect()  # the next engine wants the weights' memory
    return found


def run_llama(python: Path, model: Path, batches: list[int], steps: int) -> Part:
    """The same of llama.cpp, with its version."""
    plan = json.dumps({"batches": batches, "prompt": PROMPT, "steps": steps, "prefill": PREFILL})
    command = [str(python), str(Path(__file__).parent / "llama.py"), str(model), str(os.cpu_count()), plan]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: Part = json.loads(done.stdout.strip().splitlines()[-1])
    ask = [str(python), "-c", "import llama_cpp; print(llama_cpp.__version__)"]
    found["version"] = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    return found


def in_turns(model: Path, python: Path, files: dict[str, Path], rounds: int) -> dict[str, Part]:
    """For each of our kinds of weights, whose llama.cpp's file is given: every round of both, and their medians."""
    made: dict[str, Part] = {}
    for quantization, file in files.items():
        turns: dict[str, list[Part]] = {"ours": [], "llama.cpp": []}
        for _ in range(rounds):
            turns["ours"].append(asyncio.run(measured(model, {"quantization": quantization}, 24, BATCHES)))
            turns["llama.cpp"].append(run_llama(python, file, BATCHES, 24))
            turns["ours"][-1]["load"] = os.getloadavg()
            turns["ours"][-1]["read_gb_per_s"] = hardware.read_bandwidth(1.0) / 1e9
        medians = {who: _medians(each) for who, each in turns.items()}
        made[quantization] = {"medians": medians, "file_bytes": file.stat().st_size, "turns": turns}
        print(quantization, medians, flush=True)
    return made


def _medians(turns: list[Part]) -> Part:
    decode = {n: statistics.median(turn["decode"][n] for turn in turns) for n in turns[0]["decode"]}
    return {"decode": decode, "prefill": statistics.median(turn["prefill"] for turn in turns)}
