"""Hit rates of the prefix cache on a recorded trace, by its size, against the order that knows the future.

The engine's own core runs, one request after the other, on a device that computes nothing; so only eviction is
measured. A block of the trace is a block of 16 tokens here. The ideal is the clairvoyant order (Belady 1966): after
each request, of all blocks seen, those are kept that are wanted again soonest. No order that does not know the future
can reach it at every size. A hit is a block with its whole prefix cached too.
"""

from __future__ import annotations

import heapq
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.core.step import Step
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.disk_tier import DiskTier
from engine.kv_cache.eviction import Tier, TransferRates
from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.offload import OffloadTiers
from engine.kv_cache.transfers import InlineWorker, at_once
from engine.params import GREEDY, Span

SIZE = 16
NBYTES = 64  # of a block's K/V: nothing is computed here
Prompts = list[list[int]]  # the blocks of each prompt


class Nothing:
    """A device that computes nothing and keeps nothing."""

    vocab_size = 4
    queues = False

    def run(self, step: Step) -> Tensor:
        return torch.zeros(sum(max(0, row.end - max(row.start, row.logits_from)) for row in step.rows), 4)

    def save(self, pairs: list[tuple[int, Tensor]]) -> None:
        pass

    def saved(self) -> None:
        pass

    def queued(self) -> Callable[[], None]:
        return at_once

    def load(self, block: int, payload: Tensor | memoryview) -> None:
        pass


class Free(TransferRates):
    """Copying costs nothing, as computing does here."""

    def seconds(self, tier: Tier, nbytes: int) -> float:
        return -1.0


class SilentDecoder:
    """A detokeniser that writes nothing."""

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def read(path: Path) -> Prompts:
    return [json.loads(line)["hash_ids"] for line in path.read_text("utf-8").splitlines()]


def ask(core: EngineCore, number: int, blocks: Sequence[int], stepped: Callable[[], None] = lambda: None) -> int:
    """Has the core answer one prompt with a token, each of its blocks full of one number; `stepped` is called after
    each step. Returns the steps."""
    steps = 0
    tokens = [block for block in blocks for _ in range(SIZE)]
    core.handle(m.Open(number, (*tokens, -1 - number), "", 0, None))
    core.handle(m.Generate(number, number, Span(GREEDY, max_tokens=1), 0, 1))
    while not any(isinstance(reply, m.OutputPiece) for reply in core.take_replies()):
        core.step()
        stepped()
        steps += 1
    core.handle(m.Close(number))
    return steps


def engine_hits(prompts: Prompts, pool_blocks: int, host: int = 0, disk: int = 0) -> float:
    """The share of all blocks that were found, with a pool and tiers of so many blocks."""
    with tempfile.TemporaryDirectory() as directory:
        pool, device = BlockPool(pool_blocks), Nothing()
        tiers = None
        if host:
            files = DiskTier(Path(directory), b"a trace's blocks", NBYTES) if disk else None
            tiers = OffloadTiers(pool, device, HostTier(host, NBYTES), InlineWorker(), disk=files, files=disk)
            tiers.rates = Free()
        config = EngineConfig("none", block_size=SIZE, max_batch_tokens=1 << 20)
        core = EngineCore(config, device, pool, SilentDecoder, (), b"secret", tiers=tiers)
        for number, blocks in enumerate(prompts):
            ask(core, number, blocks, lambda: core.handle(m.TransferDone()))
        hits = core.stats().prefix_hit_tokens // SIZE
        core.close()
    return hits / sum(map(len, prompts))


def recent_hits(prompts: Prompts, blocks: int) -> float:
    """The same with LRU eviction."""
    kept: dict[int, None] = {}
    hits = 0
    for prompt in prompts:
        hits += _found(prompt, kept)
        for block in reversed(prompt):
            kept.pop(block, None)
            kept[block] = None
        while len(kept) > blocks:
            del kept[next(iter(kept))]
    return hits / sum(map(len, prompts))


def ideal_hits(prompts: Prompts, blocks: int) -> float:
    """The same with the future known."""
    uses = defaultdict[int, list[int]](list)
    for number, prompt in reversed(list(enumerate(prompts))):
        for block in prompt:
            uses[block].append(number)
    kept: dict[int, int] = {}  # block -> the request that wants it next
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for prompt in prompts:
        hits += _found(prompt, kept)
        for depth, block in enumerate(prompt):
            uses[block].pop()
            kept[block] = uses[block][-1] if uses[block] else len(prompts)
            heapq.heappush(heap, (-kept[block], -depth, block))
        while len(kept) > blocks:
            wanted, _, block = heapq.heappop(heap)
            if kept.get(block) == -wanted:
                del kept[block]
    return hits / sum(map(len, prompts))


def _found(prompt: list[int], kept: dict[int, Any]) -> int:  # Any: only its keys matter
    return next((at for at, block in enumerate(prompt) if block not in kept), len(prompt))


def measure(trace: Path, sizes: Sequence[int]) -> dict[str, Any]:  # Any: plain JSON
    prompts = read(trace)
    distinct = len({block for prompt in prompts for block in prompt})
    rows = []
    for size in sizes:
        eighth = size // 8
        row: dict[str, float | int | None] = {
            "blocks": size,
            "share_of_distinct": size / distinct,
            "ideal": ideal_hits(prompts, size),
            "least_recent_first": recent_hits(prompts, size),
            "engine": engine_hits(prompts, size),
            # tiers are inclusive: the disk's size is the whole cache's
            "engine_with_tiers": engine_hits(prompts, eighth, eighth, size) if eighth >= 512 else None,
        }
        rows.append(row)
        print(row, flush=True)
    return {"trace": trace.name, "requests": len(prompts), "distinct_blocks": distinct, "rows": rows}
