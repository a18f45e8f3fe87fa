"""Random LoRA adapters on disk, as PEFT writes them, for any checkpoint that the engine runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.families import family_of
from engine.model.adapters.peft_checkpoint import CONFIG, WEIGHTS, projections
from engine.model.quantization.checkpoint import read_config

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_adapter(
    path: Path,
    model: Path,
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    targets: Sequence[str] = ATTENTION,
    spread: float = 0.3,
    **config: Any,
) -> Path:
    """Writes an adapter of the checkpoint in `model` into `path`, with matrices that move its logits. Any: further
    fields of the configuration."""
    read = read_config(model)
    family = family_of(read)
    spec, names = family.spec(read), family.names(read)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, place in projections(spec, names).items():
        if name.endswith(tuple(f".{each}" for each in targets)):
            prefix = f"base_model.model.{names.root}{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, place.columns, generator=draw) * spread
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(len(place.rows), rank, generator=draw) * spread
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    fields = {
        "peft_type": "LORA", "base_model_name_or_path": str(model), "r": rank, "lora_alpha": alpha, "bias": "none",
        "target_modules": list(targets), "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (path / CONFIG).write_text(json.dumps({**fields, **config}), encoding="utf-8")
    return path
