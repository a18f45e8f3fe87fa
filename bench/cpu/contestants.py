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

import torch

from bench import hardware
from bench.cpu.steps import laid_step
from engine import GREEDY, Engine, EngineConfig, Span
from engine.model.decoder import load_decoder

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


def run_llama(python: Path, model: Path, batches: list[int], steps: int, *, one_thread: bool = False) -> Part:
    """The same of llama.cpp, with its version; `one_thread` counts processor time."""
    clock = "process_time" if one_thread else "perf_counter"
    plan = json.dumps({"batches": batches, "prompt": PROMPT, "steps": steps, "prefill": PREFILL, "clock": clock})
    threads = "1" if one_thread else str(os.cpu_count())
    command = [str(python), str(Path(__file__).parent / "llama.py"), str(model), threads, plan]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: Part = json.loads(done.stdout.strip().splitlines()[-1])
    ask = [str(python), "-c", "import llama_cpp; print(llama_cpp.__version__)"]
    found["version"] = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    return found


def on_one_thread(model: Path, options: dict[str, Any], steps: int, batches: list[int]) -> Part:
    """Tokens of our decoder a second of processor time, which others on the machine trouble less."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    decoder = load_decoder(model, dtype=torch.bfloat16, **options)

    def rate(rows: int, context: int, new: int, repeats: int) -> float:
        batch, kv = laid_step(decoder, rows, context, new)
        decoder.forward(batch, kv)
        start = time.process_time()
        for _ in range(repeats):
            decoder.forward(batch, kv)
        return rows * new * repeats / (time.process_time() - start)

    decode = {str(n): rate(n, PROMPT + steps // 2, 1, steps) for n in batches}
    found = {"decode": decode, "prefill": rate(1, PREFILL, PREFILL, 2)}
    torch.set_num_threads(before)
    return found


def in_turns(
    model: Path, python: Path, files: dict[str, Path], rounds: int, *, one_thread: bool = False
) -> dict[str, Part]:
    """For each of our kinds of weights, whose llama.cpp's file is given: every round of both, and their medians."""
    steps = 6 if one_thread else 24
    made: dict[str, Part] = {}
    for quantization, file in files.items():
        turns: dict[str, list[Part]] = {"ours": [], "llama.cpp": []}
        for _ in range(rounds):
            options = {"quantization": quantization}
            if one_thread:
                turns["ours"].append(on_one_thread(model, options, steps, BATCHES))
            else:
                turns["ours"].append(asyncio.run(measured(model, options, steps, BATCHES)))
            turns["llama.cpp"].append(run_llama(python, file, BATCHES, steps, one_thread=one_thread))
            turns["ours"][-1]["load"] = os.getloadavg()
            turns["ours"][-1]["read_gb_per_s"] = hardware.read_bandwidth(1.0) / 1e9
        medians = {who: _medians(each) for who, each in turns.items()}
        made[quantization] = {"medians": medians, "file_bytes": file.stat().st_size, "turns": turns}
        print(quantization, medians, flush=True)
    return made


def _medians(turns: list[Part]) -> Part:
    decode = {n: statistics.median(turn["decode"][n] for turn in turns) for n in turns[0]["decode"]}
    return {"decode": decode, "prefill": statistics.median(turn["prefill"] for turn in turns)}
