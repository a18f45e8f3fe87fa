"""Measures the quality cost of a cache in 8 bits: a model reads texts over both caches, each token given.

The texts are the model's own, written at temperature 1 after the beginnings of our pages, so they fit any training
data.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.report import ROOT
from engine import Engine, EngineConfig, Sampling, Span
from engine.kv_cache.quantized_cache import QuantizedCache
from engine.model.batch import Batch, KVCache
from engine.model.decoder import Decoder, load_decoder
from engine.model.linear import default_dtype

WINDOW = 512  # tokens of a text
BEGINNING = 32
CHUNK = 64
BLOCK = 16


def measure(model: Path, windows: int = 10) -> dict[str, Any]:  # Any: plain JSON
    """Perplexity over each cache; how far their distributions are apart, and how often they agree on the likeliest."""
    texts = asyncio.run(own_texts(model, windows))
    rows = []
    for dtype in dict.fromkeys((torch.float32, default_dtype(torch.device("cpu")))):
        decoder = load_decoder(model, dtype=dtype)
        losses, divergence, same, count = [0.0, 0.0], 0.0, 0, 0
        for window in texts:
            plain, quantised = (read_window(decoder, window, kind) for kind in (KVCache, QuantizedCache))
            wanted = torch.tensor(window[1:])
            for at, found in enumerate((plain, quantised)):
                losses[at] -= found[:-1].gather(1, wanted[:, None]).sum().item()
            divergence += (plain.exp() * (plain - quantised)).sum().item()
            same += int((plain.argmax(-1) == quantised.argmax(-1)).sum())
            count += WINDOW
        predicted = count * (WINDOW - 1) / WINDOW
        before, after = (float(torch.tensor(loss / predicted).exp()) for loss in losses)
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "perplexity": before,
                "perplexity_int8": after,
                "kl_nats": divergence / count,
                "same_likeliest": same / count,
                "bytes_ratio": _bytes(decoder, QuantizedCache) / _bytes(decoder, KVCache),
            }
        )
    return {"model": model.name, "tokens": windows * WINDOW, "rows": rows}


@torch.inference_mode()
def read_window(decoder: Decoder, window: list[int], kind: type[KVCache] | type[QuantizedCache]) -> Tensor:
    """Log-probabilities after each token, (tokens, vocabulary) float32."""
    blocks = WINDOW // BLOCK
    kv = _cache(decoder, kind, blocks + 1)
    table = torch.arange(1, blocks + 1)[None]
    found = []
    for start in range(0, len(window), CHUNK):
        positions = torch.arange(start, start + CHUNK)
        ids, wanted = torch.tensor(window[start : start + CHUNK]), torch.arange(CHUNK)
        batch = Batch(ids, positions, positions + BLOCK, (0, CHUNK), (start + CHUNK,), table, wanted)
        found.append(decoder.forward(batch, kv).log_softmax(-1))
    return torch.cat(found)


def _cache(decoder: Decoder, kind: type[KVCache] | type[QuantizedCache], blocks: int) -> KVCache | QuantizedCache:
    spec = decoder.spec
    return kind(spec.layers, blocks, BLOCK, spec.kv_heads, spec.head_dim, decoder.dtype, decoder.device)


def _bytes(decoder: Decoder, kind: type[KVCache] | type[QuantizedCache]) -> int:
    return _cache(decoder, kind, 1).block_nbytes


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
