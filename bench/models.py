"""Checkpoints to measure on: one that we ship, and random ones in the shape of well-known models, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# Llama-shaped, 134.5M parameters: the published sizes of SmolLM2-135M.
SMOLLM2_135M: dict[str, Any] = {  # Any: arguments of an untyped configuration class
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "rope_theta": 100000.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def random_checkpoint(path: Path, tokenizer: Path) -> Path:
    """A random checkpoint of SmolLM2-135M's shape in `path`, made unless it is there; its tokenizer is borrowed."""
    if not (path / "model.safetensors").exists():
        import transformers  # a development dependency: only the benchmark against it needs it

        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SMOLLM2_135M)
        model: Any = transformers.LlamaForCausalLM(config)
        model.to(torch.bfloat16).save_pretrained(path)
        (path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    return path


def weight_bytes(path: Path, itemsize: int) -> int:
    """Bytes of weights that a decode step reads, `itemsize` a number; an untied embedding is only looked up."""
    import json

    from safetensors import safe_open

    config = json.loads((path / "config.json").read_text())
    total = 0
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a dict
                if "embed_tokens" in name and not config.get("tie_word_embeddings"):
                    continue
                size = 1
                for extent in tensors.get_slice(name).get_shape():
                    size *= extent
                total += size * itemsize
    return total
