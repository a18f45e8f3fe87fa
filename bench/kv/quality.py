"""What a cache in 8 bits costs in quality: a model reads our own pages over both caches, each token given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.report import ROOT
from engine.batch import Batch, KVCache
from engine.kv.int8 import Int8Cache
from engine.linear import default_dtype
from engine.models.decoder import Decoder, load_decoder
from engine.tokenizer import Tokenizer

WINDOW = 512  # tokens read at once
CHUNK = 64
BLOCK = 16


@torch.inference_mode()
def measure(model: Path, windows: int = 20) -> dict[str, Any]:  # Any: plain JSON
    """Perplexity over each cache; how far their distributions are apart, and how often they agree on the likeliest."""
    tokens = _text(Tokenizer.load(model), windows * WINDOW)
    rows = []
    for dtype in dict.fromkeys((torch.float32, default_dtype(torch.device("cpu")))):
        decoder = load_decoder(model, dtype=dtype)
        losses, divergence, same, count = [0.0, 0.0], 0.0, 0, 0
        for start in range(0, len(tokens) - WINDOW + 1, WINDOW):
            window = tokens[start : start + WINDOW]
            plain, quantised = (_read(decoder, window, kind) for kind in (KVCache, Int8Cache))
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
                "bytes_ratio": _bytes(decoder, Int8Cache) / _bytes(decoder, KVCache),
            }
        )
    return {"model": model.name, "tokens": windows * WINDOW, "rows": rows}


def _read(decoder: Decoder, window: list[int], kind: type[KVCache] | type[Int8Cache]) -> Tensor:
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


def _cache(decoder: Decoder, kind: type[KVCache] | type[Int8Cache], blocks: int) -> KVCache | Int8Cache:
    spec = decoder.spec
    return kind(spec.layers, blocks, BLOCK, spec.kv_heads, spec.head_dim, decoder.dtype, decoder.device)


def _bytes(decoder: Decoder, kind: type[KVCache] | type[Int8Cache]) -> int:
    return _cache(decoder, kind, 1).block_nbytes


def _text(tokenizer: Tokenizer, count: int) -> list[int]:
    pages = sorted((ROOT / "docs").glob("*.md"))
    tokens = [token for page in pages for token in tokenizer.encode(page.read_text("utf-8"))]
    if len(tokens) < count:
        raise ValueError(f"our pages have {len(tokens)} tokens, and {count} are wanted")
    step = len(tokens) // (count // WINDOW)  # windows from all over
    return [token for at in range(count // WINDOW) for token in tokens[at * step : at * step + WINDOW]]
