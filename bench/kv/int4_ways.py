"""Compares ways of rounding K/V to 4 bits on a real model, as it is and with channels of large keys planted.

A planted channel of the keys is larger by a factor and that of the queries smaller, so that the model computes the
same: what changes is how hard its keys are to round. Numbers are rounded as they are stored, in the model's own format.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.kv.cache_quality import WINDOW, compare, own_texts
from engine.kv_cache.quality_gate import cache_for
from engine.kv_cache.quantized_cache import (
    QuantizedCache,
    QuantizedLayer,
    decode_int4,
    encode,
    encode_int4,
    rotate_head,
)
from engine.model.batch import KVCache
from engine.model.decoder import Decoder, load_decoder

OUTLIERS = (1, 4, 16)  # times as large
CHANNELS = slice(6, 8)  # of each head: a pair that rotates together
Round = Callable[[Tensor], Tensor]  # float32 (tokens, kv_heads, head_dim) -> the numbers that are read back


def by_token(x: Tensor) -> Tensor:
    return decode_int4(*encode_int4(x))


def rotated(x: Tensor) -> Tensor:
    return rotate_head(by_token(rotate_head(x)))


def by_channel(x: Tensor) -> Tensor:
    """KIVI's keys (Liu et al. 2024), a scale and a minimum for each channel of 16 tokens: of whole blocks, without the
    newest tokens in full precision."""
    blocks = x.unflatten(0, (-1, 16))
    least, most = blocks.aminmax(dim=1, keepdim=True)
    scales = ((most - least) / 15).clamp(min=1e-30)
    return ((blocks - least) / scales).round_().mul_(scales).add_(least).flatten(0, 1)


def eight_bits(x: Tensor) -> Tensor:
    codes, scales = encode(x, "int8")
    return codes * scales.unsqueeze(-1)


def unrounded(x: Tensor) -> Tensor:
    return x


WAYS: tuple[tuple[str, str, Round, Round], ...] = (  # name, bits a number with scales, of keys, of values
    ("int8, a scale a token", "8.5", eight_bits, eight_bits),
    ("keys by token, groups of 32", "5", by_token, unrounded),
    ("keys by token, rotated", "5", rotated, unrounded),
    ("keys by channel of 16 tokens (KIVI)", "6", by_channel, unrounded),
    ("values by token, groups of 32", "5", unrounded, by_token),
    ("values by token, rotated", "5", unrounded, rotated),
    ("keys by token, rotated; values by token", "5", rotated, by_token),
    ("keys by channel; values by token (KIVI)", "5.5", by_channel, by_token),
)


@dataclass(frozen=True, slots=True)
class _RoundedLayer(QuantizedLayer):
    """A layer of an unquantized cache, `codes`, that is written rounded."""

    ways: tuple[Round, Round]

    def of_queries(self, queries: Tensor) -> Tensor:
        return queries

    def store(self, slots: Tensor, new: Tensor) -> None:
        rounded = torch.stack([way(part.float()) for way, part in zip(self.ways, new, strict=True)])
        self.codes.view(2, -1, *new.shape[2:]).index_copy_(1, slots, rounded.to(self.codes.dtype))

    def gather(self, blocks: Tensor, out: Tensor) -> None:
        torch.index_select(self.codes.flatten(0, 1).flatten(1), 0, blocks, out=out)


class _RoundedCache(QuantizedCache):
    def __init__(self, kv: KVCache, ways: tuple[Round, Round]) -> None:
        self._kv, self._ways = kv, ways
        self._codes, self.block_size, self.like = kv.data, kv.block_size, kv.like

    def layers(self) -> list[QuantizedLayer]:
        return [_RoundedLayer(each, each, self._ways) for each in self._kv.layers()]


def measure(model: Path, windows: int = 3) -> dict[str, Any]:  # Any: plain JSON
    """Divergences of every way, with every factor, on texts of 512 tokens that the model wrote."""
    texts = asyncio.run(own_texts(model, windows))
    rows: list[dict[str, Any]] = [{"way": name, "bits": bits, "found": []} for name, bits, _, _ in WAYS]
    for times in OUTLIERS:
        decoder = load_decoder(model, dtype=torch.float32, kernels="torch")
        plant(decoder, times)
        for row, (_, _, keys, values) in zip(rows, WAYS, strict=True):
            row["found"].append(compare(decoder, texts, partial(_cache, decoder, keys, values)))
    return {"model": model.name, "tokens": windows * WINDOW, "outliers": OUTLIERS, "rows": rows}


def plant(decoder: Decoder, times: float) -> None:
    """Makes the keys of two channels `times` as large and the queries as much smaller, by the norms of heads."""
    heads = decoder.spec.heads
    for layer in decoder._layers:
        assert layer.qk_norm is not None, "a model that norms each head"
        for weight in (layer.qk_norm.weight, layer.qk_norm._scaled):
            weight[:heads, CHANNELS] /= times
            weight[heads:, CHANNELS] *= times


def _cache(decoder: Decoder, keys: Round, values: Round) -> _RoundedCache:
    kv = cache_for(decoder, 1, WINDOW)
    assert isinstance(kv, KVCache)
    return _RoundedCache(kv, (keys, values))
