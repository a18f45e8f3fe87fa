"""Steps of one model on our own CPU kernels, on torch, and on torch a tile at a time, as ratios of one run.

The three take turns, each step a few times a turn, so that a noisy neighbour troubles all of them; the results are the
minimum of each (the machine's best), and the ratios of the minima and of the medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.model.batch import Batch, KVCache
from engine.model.decoder import Decoder, load_decoder
from engine.model.runner import tilewise

BLOCK = 16  # tokens
STEPS = ((1, 64, 1), (1, 512, 1), (1, 3000, 1), (4, 300, 1), (16, 300, 1), (64, 300, 1), (1, 512, 512), (8, 128, 64))

Step = Callable[[], Tensor]


def compared(model: Path, threads: int, *, turns: int, tiles: bool) -> dict[str, Any]:  # Any: plain JSON
    """For each of `STEPS` (rows, context, tokens of each row): milliseconds and ratios to torch. With `tiles`, the
    deterministic way of torch is measured, too."""
    torch.set_num_threads(threads)
    decoders = {
        "own": load_decoder(model, dtype=torch.bfloat16),
        "torch": load_decoder(model, dtype=torch.bfloat16, kernels="torch"),
    }
    assert decoders["own"].native, "our own kernels do not run it here"
    found: dict[str, Any] = {}
    for rows, context, queries in STEPS:
        batch, kv = laid_step(decoders["own"], rows, context, queries)
        ways: dict[str, Step] = {name: _forward(decoder, batch, kv) for name, decoder in decoders.items()}
        if tiles and rows * queries <= 64:
            ways["torch, tile by tile"] = _tilewise(decoders["torch"], batch, kv)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(turns):
            for name, way in ways.items():
                start = time.perf_counter()
                for _ in range(count := 6 if rows * queries <= 4 else 2):
                    way()
                taken[name].append((time.perf_counter() - start) / count)
        base, least = statistics.median(taken["torch"]), min(taken["torch"])
        found[f"{rows} rows, {context} of context, {queries} new"] = {
            name: {
                "least_ms": 1e3 * min(each),
                "least_to_torch": min(each) / least,
                "median_to_torch": statistics.median(each) / base,
            }
            for name, each in taken.items()
        }
    return found


def _forward(decoder: Decoder, batch: Batch, kv: KVCache) -> Step:
    return lambda: decoder.forward(batch, kv)


def _tilewise(decoder: Decoder, batch: Batch, kv: KVCache) -> Step:
    return lambda: tilewise(decoder.forward, batch, kv)


def laid_step(decoder: Decoder, rows: int, context: int, queries: int) -> tuple[Batch, KVCache]:
    """`rows` sequences of `context` tokens, of which the last `queries` are new, and a cache of noise."""
    spec, each = decoder.spec, -(-context // BLOCK)
    kv = KVCache(spec.layers, rows * each + 1, BLOCK, spec.kv_heads, spec.head_dim, decoder.dtype, torch.device("cpu"))
    kv.data.normal_()
    table = torch.arange(1, rows * each + 1).view(rows, each)
    positions = torch.arange(context - queries, context).repeat(rows)
    slots = table[torch.arange(rows).repeat_interleave(queries), positions // BLOCK] * BLOCK + positions % BLOCK
    starts = tuple(range(0, rows * queries + 1, queries))
    tokens = torch.randint(3, spec.vocab_size, (rows * queries,))
    return Batch(
        tokens, positions, slots, starts, (context,) * rows, table, torch.tensor(starts[1:]) - 1, in_place=True
    ), kv
