"""Cost of publishing K/V events: seconds of the core on a recorded trace, with and without a publisher.

The engine's core runs the trace's prompts on a device that computes nothing, so a step is the scheduler's work alone
and the share is an upper bound. With a publisher, its thread encodes and sends to one subscriber on the same machine.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import zmq

from bench.kv.hits import SIZE, Nothing, Prompts, SilentDecoder, ask, read
from engine.config import EngineConfig, KVEventsConfig
from engine.core.engine_core import EngineCore
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.kv_event_publisher import event_log

BLOCKS = 12_000
ENDPOINT = "ipc:///tmp/ponder-bench-kv-events"
ROUNDS = 7


def run(prompts: Prompts, events: KVEventsConfig | None) -> tuple[float, int]:
    """Returns the seconds in which the core's thread ran all prompts, and the steps."""
    pool = BlockPool(BLOCKS)
    config = EngineConfig("none", block_size=SIZE, max_batch_tokens=2048, kv_events=events)
    if events is not None:
        pool.events = event_log(events, SIZE, lambda _: None)
    core = EngineCore(config, Nothing(), pool, SilentDecoder, (), b"secret")
    began = time.thread_time()
    steps = sum(ask(core, number, blocks) for number, blocks in enumerate(prompts))
    seconds = time.thread_time() - began
    core.close()
    return seconds, steps


def measure(trace: Path) -> dict[str, Any]:  # Any: plain JSON
    prompts = read(trace)[:1000]
    blocks = sum(map(len, prompts))
    off, on = list[float](), list[float]()
    with zmq.Context() as context, context.socket(zmq.SUB) as hearing:
        hearing.subscribe(b"")
        hearing.connect(ENDPOINT)
        for _ in range(ROUNDS):
            seconds, steps = run(prompts, None)
            off.append(seconds)
            on.append(run(prompts, KVEventsConfig(ENDPOINT))[0])
    without, with_events = min(off), min(on)  # other work on the machine only adds
    return {
        "trace": trace.name, "prompts": len(prompts), "blocks": blocks, "steps": steps,
        "step_us": without / steps * 1e6, "step_with_events_us": with_events / steps * 1e6,
    }  # fmt: skip
