"""Measures what rounding the weights costs: a model reads texts of its own in each form, every token given."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch

from bench.kv.cache_quality import WINDOW, own_texts, read_window
from engine.kv_cache.quality_gate import cache_for
from engine.model.decoder import Decoder, load_decoder

FORMS: dict[str, dict[str, Any]] = {  # Any: arguments of load_decoder
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.bfloat16, "quantization": "int8"},
    "int8 on torch": {"dtype": torch.float32, "quantization": "int8"},
    "int4": {"dtype": torch.bfloat16, "quantization": "int4"},
}


def measure(model: Path, windows: int = 10) -> dict[str, dict[str, float]]:
    """Each form's distance from the distributions in float32, and the share of the same likeliest token."""
    texts = asyncio.run(own_texts(model, windows))
    exact = _read(load_decoder(model, dtype=torch.float32), texts)
    made = {}
    for name, how in FORMS.items():
        decoder = load_decoder(model, **how)
        found = _read(decoder, texts)
        made[name] = {
            "kl_nats": float((exact.exp() * (exact - found)).sum(-1).mean()),
            "same_likeliest": float((exact.argmax(-1) == found.argmax(-1)).float().mean()),
        }
    return made


def _read(decoder: Decoder, texts: list[list[int]]) -> torch.Tensor:
    return torch.cat([read_window(decoder, text, cache_for(decoder, 1, WINDOW)) for text in texts])
