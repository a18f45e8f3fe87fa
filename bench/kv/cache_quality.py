"""Measures the quality cost of a cache in 8 or 4 bits: a model reads texts over both caches, each token given.

The texts are the model's own, written at temperature 1 after the beginnings of our pages, so they fit any training
data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.report import ROOT
from engine import Engine, EngineConfig, Sampling, Span
from engine.kv_cache.quality_gate import BLOCK, cache_for
from engine.kv_cache.quantized_cache import Coding, QuantizedCache
from engine.model.batch import Batch, KVCache
from engine.model.decoder import Decoder, load_decoder
from engine.model.linear import default_dtype

WINDOW = 512  # tokens of a text
BEGINNING = 32
CHUNK = 64
CODINGS: tuple[Coding, ...] = ("int8", "int4")
Cache = KVCache | QuantizedCache


def measure(model: Path, windows: int = 10) -> dict[str, Any]:  # Any: plain JSON
    """Perplexity over each cache; how far their distributions are apart, and how often they agree on the likeliest."""
    texts = asyncio.run(own_texts(model, windows))
    rows = []
    for dtype in dict.fromkeys((torch.float32, default_dtype(torch.device("cpu")))):
        for coding in CODINGS:  # our own kernels read no K/V of 8 bits
            decoder = load_decoder(model, dtype=dtype, kernels="auto" if coding == "int4" else "torch")
            found = compare(decoder, texts, partial(cache_for, decoder, 1, WINDOW, coding))
            bytes_ratio = _bytes(decoder, coding) / _bytes(decoder, None)
            name = str(dtype).removeprefix("torch.")
            rows.append({"dtype": name, "kv_dtype": coding, **found, "bytes_ratio": bytes_ratio})
    return {"model": model.name, "tokens": windows * WINDOW, "rows": rows}


def compare(decoder: Decoder, texts: list[list[int]], other: Callable[[], Cache]) -> dict[str, float]:
    """Means over the tokens of `texts`, read over the model's own cache and over those that `other` makes."""
    losses, divergences, same = [0.0, 0.0], [], 0
    for window in texts:
        plain = read_window(decoder, window, cache_for(decoder, 1, WINDOW))
        quantized = read_window(decoder, window, other())
        wanted = torch.tensor(window[1:])
        for at, found in enumerate((plain, quantized)):
            losses[at] -= found[:-1].gather(1, wanted[:, None]).sum().item()
        divergences.append((plain.exp() * (plain - quantized)).sum(-1))
        same += int((plain.argmax(-1) == quantized.argmax(-1)).sum())
    all_kl = torch.cat(divergences)
    before, after = (float(torch.tensor(loss / (len(all_kl) - len(texts))).exp()) for loss in losses)
    return {
        "perplexity": before,
        "perplexity_quantized": after,
        "kl_nats": float(all_kl.mean()),
        "kl_p99": float(all_kl.quantile(0.99)),
        "same_likeliest": same / len(all_kl),
    }


@torch.inference_mode()
def read_window(decoder: Decoder, window: list[int], kv: Cache) -> Tensor:
    """Log-probabilities after each token, (tokens, vocabulary) float32."""
    table = torch.arange(1, WINDOW // BLOCK + 1)[None]
    found = []
    for start in range(0, len(window), CHUNK):
        positions = torch.arange(start, start + CHUNK)
        ids, wanted = torch.tensor(window[start : start + CHUNK]), torch.arange(CHUNK)
        batch = Batch(ids, positions, positions + BLOCK, (0, CHUNK), (start + CHUNK,), table, wanted)
        found.append(decoder.forward(batch, kv).log_softmax(-1))
    return torch.cat(found)


def _bytes(decoder: Decoder, coding: Coding | None) -> int:
    return cache_for(decoder, 1, BLOCK, coding).block_nbytes


async def own_texts(model: Path, count: int) -> list[list[int]]:
    """Windows that the model wrote, each after the beginning of a page of ours."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    async with await Engine.start(EngineConfig(str(model), dtype="float32", max_running=count)) as engine:

        async def write(at: int) -> list[int]:
            begin = engine.tokenizer.encode(pages[at % len(pages)].read_text("utf-8")[:400])[:BEGINNING]
            sampling = Sampling(temperature=1.0, seed=at)
            async with await engine.open(begin) as seq:
                await seq.generate_all(Span(sampling, max_tokens=WINDOW - len(begin), ignore_eos=True))
                return seq.tokens

        return await asyncio.gather(*(write(at) for at in range(count)))
