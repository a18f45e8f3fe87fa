"""Small GGUF files, made with the `gguf` package from Hugging Face checkpoints.

Names of tensors and keys are the package's own. It has no converter of checkpoints: the changes of values (rows of
queries and keys, norms of Gemma) are written here from the description in llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

INTERLEAVED = {"llama", "granite", "smollm3"}


def written(path: Path, fill: Callable[[Any], object], architecture: str = "llama") -> Path:
    """Write a file with what `fill` adds to a `gguf.GGUFWriter` (Any: the package is untyped)."""
    writer = gguf.GGUFWriter(path, architecture)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(
    checkpoint: Path, path: Path, architecture: str, extra: Callable[[Any], object] = lambda writer: None
) -> Path:
    """Write a float32 checkpoint's configuration and weights as GGUF."""
    config = json.loads((checkpoint / "config.json").read_text())

    def fill(writer: Any) -> None:
        add_config(writer, config)
        add_weights(writer, config, load_file(checkpoint / "model.safetensors"), architecture)
        extra(writer)

    return written(path, fill, architecture)


def add_config(writer: Any, config: Mapping[str, Any]) -> None:
    """Add the keys that every converter writes."""
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta = rope.get("full_attention", rope).get("rope_theta", config.get("rope_theta"))
    writer.add_rope_freq_base(theta)
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if rope.get("rope_type") in ("linear", "yarn"):
        kinds = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
        writer.add_rope_scaling_type(kinds[rope["rope_type"]])
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def add_weights(writer: Any, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], architecture: str) -> None:
    """Add all tensors in float32 under the package's names."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    for name, tensor in weights.items():
        found = names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        values = tensor.float()
        if architecture in INTERLEAVED and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        writer.add_tensor(found, np.ascontiguousarray(values.numpy()))
