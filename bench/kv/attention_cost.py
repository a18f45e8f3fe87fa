"""Measures attention of one row over a long context, for each number format of K/V: the bytes that a layer must read,
and its time.

The time of attention is that of a step over the long context less that of one over a short context, so what else a step
does is left out. It is one thread's time on the processor, the formats take turns, and the least of their times counts:
others may use the machine.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.cpu.checkpoint import Shape, write
from engine.kv_cache.quality_gate import BLOCK, cache_for
from engine.kv_cache.quantized_cache import Coding, QuantizedCache
from engine.model.batch import Batch, KVCache
from engine.model.decoder import Decoder, load_decoder

SHAPE = Shape(layers=4, hidden=1024, heads=16, intermediate=3072)  # layers of Qwen3-0.6B
CONTEXT, SHORT = 8192, 16
ROUNDS = 15
WAYS: tuple[tuple[Coding | None, str], ...] = ((None, "auto"), ("int4", "auto"), (None, "torch"), ("int8", "torch"))


def measure(model: Path) -> dict[str, Any]:  # Any: plain JSON
    """Times each way, beside the bytes of K/V that a layer reads at `CONTEXT` tokens. `model` lends its tokenizer."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "random", model, SHAPE)
        decoders = {name: load_decoder(path, dtype=torch.bfloat16, kernels=name) for name in ("auto", "torch")}
    caches = [_filled(decoders[kernels], coding) for coding, kernels in WAYS]
    times = [{CONTEXT: float("inf"), SHORT: float("inf")} for _ in WAYS]
    for _ in range(ROUNDS):
        for least, kv, (_, kernels) in zip(times, caches, WAYS, strict=True):
            for context in least:
                least[context] = min(least[context], _step(decoders[kernels], kv, context))
    alone = [1000 * (each[CONTEXT] - each[SHORT]) / SHAPE.layers for each in times]
    rows = [
        {
            "kv_dtype": coding or "bfloat16",
            "kernels": "C++" if decoders[kernels].native else "torch",
            "bytes": kv.block_nbytes * CONTEXT // BLOCK // SHAPE.layers,
            "ms": ms,
            "ratio": ms / alone[0],
        }
        for kv, ms, (coding, kernels) in zip(caches, alone, WAYS, strict=True)
    ]
    return {"context": CONTEXT, "shape": SHAPE.config, "threads": 1, "rows": rows}


def _filled(decoder: Decoder, coding: Coding | None) -> KVCache | QuantizedCache:
    """Returns a cache of `CONTEXT` tokens of random keys and values."""
    kv = cache_for(decoder, 1, CONTEXT, coding)
    if isinstance(kv, KVCache):
        kv.data.normal_()
        return kv
    slots = torch.arange(BLOCK, BLOCK + CONTEXT)
    for layer in kv.layers():
        layer.store(slots, torch.randn(2, CONTEXT, *layer.shape[3:]))
    return kv


def _step(decoder: Decoder, kv: KVCache | QuantizedCache, context: int) -> float:
    """Returns the seconds of a decode of one row, on the processor."""
    position, table = torch.tensor([context - 1]), torch.arange(1, context // BLOCK + 1)[None]
    batch = Batch(torch.tensor([5]), position, position + BLOCK, (0, 1), (context,), table, torch.arange(0))
    began = time.thread_time()
    decoder.hidden(batch, kv)
    return time.thread_time() - began
