"""The recipes: shape, steps and device. Knows nothing of data.

The CPU's plans take two cores some six hours. The GPU's have the largest size whose bfloat16 weights stay under 35 MB;
an H100 with 16 cores does eight steps of the first a second.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from training import export
from training.torch_model import ModelConfig
from training.trainer import Plan

Name = Literal["pebble", "pebble-draft"]

_SHAPES = {
    ("pebble", "cpu"): ModelConfig(),
    ("pebble", "cuda"): ModelConfig(
        hidden_size=384,
        intermediate_size=832,
        num_attention_heads=6,
        num_key_value_heads=3,
    ),
    ("pebble-draft", "cpu"): ModelConfig(
        hidden_size=128,
        intermediate_size=384,
        layer_types=("full_attention",) * 4,  # goes out as a Qwen3
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
}
# Few launches, and data twice: sixteen cores write half of the tokens that an H100 reads.
_ON_GPU = Plan(batch_tokens=81_920, largest_batch=49_152, spread=2.0, together=True, repeat_after=200)
_PLANS = {
    ("pebble", "cpu"): Plan(steps=10_000, ramp_steps=2000, fall=0.35, matrix_lr=0.01, adam_lr=2e-3),
    ("pebble", "cuda"): replace(_ON_GPU, steps=4011, ramp_steps=1350, fall=0.4),
    ("pebble-draft", "cpu"): Plan(steps=930, ramp_steps=800, matrix_lr=0.008, adam_lr=1.2e-3),
    ("pebble-draft", "cuda"): replace(_ON_GPU, steps=2000, ramp_steps=1000),
}


def plan(
    name: Name,
    device: str,
    *,
    steps: int | None = None,
    seed: int = 1,
    compiled: bool = True,
    processes: int = 1,
    start: Path | None = None,
) -> Plan:
    """The recipe for a model on a device. Fewer steps shorten the curriculum; more leave it as it is.

    A run that begins with the weights of a published model (`start`) has its shape and is past the curriculum; it
    takes half the peak rates, and they fall over half of the run.

    Raises:
        ValueError: `start` is a model of another family.
    """
    kind = "cuda" if device == "cuda" else "cpu"
    shape = _SHAPES.get((name, kind), _SHAPES[name, "cpu"])
    made = _PLANS[name, kind]
    if start is not None:
        shape = export.model_config(start)
        made = replace(made, ramp_steps=1, fall=0.5, matrix_lr=made.matrix_lr / 2, adam_lr=made.adam_lr / 2)
    shortened = min(1.0, (steps or made.steps) / made.steps)
    return replace(
        made,
        model=shape,
        steps=steps or made.steps,
        ramp_steps=max(1, int(made.ramp_steps * shortened)),
        seed=seed,
        device=device,
        start=None if start is None else str(start),
        bfloat16=computes_bfloat16(device),
        compile=compiled,
        workers=max(1, (os.cpu_count() or 1) - 2) if kind == "cuda" else 0,
        members=1 if kind == "cuda" else processes,
    )


def computes_bfloat16(device: str) -> bool:
    """Returns whether products in bfloat16 are faster there: on a CPU that takes AMX or AVX-512's own instruction."""
    return device == "cuda" or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
