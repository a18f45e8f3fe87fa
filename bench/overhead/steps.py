"""The core alone, stepped directly: tokens a second and how long a step takes when the model takes no time."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import torch

from bench.overhead.null import core_of
from engine import GREEDY, EngineConfig, Sampling, Span
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.core.loop import calm_collector

PROMPT = 120  # tokens of each sequence
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=1)


def decode(rows: int, steps: int, sampling: Sampling = GREEDY, **config: Any) -> dict[str, Any]:
    """`rows` sequences that decode: seconds of a step by the clock and of its thread's CPU, which other work on the
    machine does not add to, and tokens for each second of CPU.
    """
    core = filled(rows, sampling, **config)
    while core.stats().last_batch < rows or core.stats().waiting:
        core.step()
        core.take_replies()
    for _ in range(20):
        core.step()
        core.take_replies()
    calm_collector()
    seconds: list[float] = []
    computing: list[float] = []
    before, cpu = core.stats().step_tokens, time.process_time()
    for _ in range(steps):
        start, busy = time.perf_counter(), time.thread_time()
        core.step()
        core.take_replies()
        seconds.append(time.perf_counter() - start)
        computing.append(time.thread_time() - busy)
    cpu = time.process_time() - cpu
    tokens = core.stats().step_tokens - before
    return {
        "rows": rows, "steps": steps, "tokens_per_cpu_s": tokens / cpu, "tokens_per_s": tokens / sum(seconds),
        "step_s": _spread(seconds), "step_cpu_s": _spread(computing),
    }  # fmt: skip


def prefill(tokens: int, **config: Any) -> dict[str, Any]:
    """Prompts that are read, without any that share a prefix."""
    core = _core(64, **config)
    for at in range(tokens // 1024):
        _start(core, 2 * at + 1, [at % 4000 + 5, *range(10, 1033)], 1, GREEDY)
    start, cpu = time.perf_counter(), time.process_time()
    while core.has_work:
        core.step()
        core.take_replies()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    done = core.stats().step_tokens
    return {"tokens": done, "tokens_per_cpu_s": done / cpu, "tokens_per_s": done / seconds}


def _spread(values: list[float]) -> dict[str, float]:
    return {name: float(np.percentile(values, at)) for name, at in (("p50", 50), ("p99", 99), ("max", 100))}


def _core(rows: int, **config: Any) -> EngineCore:
    torch.set_num_threads(1)
    return core_of(EngineConfig("null", max_running=rows, kv_blocks=1 << 15, **config))


def filled(rows: int, sampling: Sampling, **config: Any) -> EngineCore:
    """A core with `rows` sequences that are to decode, none of them begun."""
    core = _core(rows, **config)
    for id in itertools.islice(itertools.count(1, 2), rows):
        _start(core, id, [id % 4000 + 5, *range(10, 9 + PROMPT)], 3000, sampling)
    return core


def _start(core: EngineCore, id: int, tokens: list[int], most: int, sampling: Sampling) -> None:
    core.handle(m.Open(id, tuple(tokens), "", 0, None))
    core.handle(m.Generate(id, id + 1, Span(sampling, max_tokens=most, ignore_eos=True), id, most))
