"""Qwen3, dense: a norm over each query and key head, heads wider than hidden_size / heads."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.qwen2 import sliding_windows
from engine.families.reading import activation, flag, rope, shape
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Qwen3 config.json. Raises CheckpointError."""
    sizes = shape(config, head_dim=128)
    sizes["windows"] = sliding_windows(config, sizes["layers"])
    bias = flag(config, "attention_bias")
    return ModelSpec(
        **sizes,
        ropes=(rope(config, sizes["head_dim"]),) * sizes["layers"],
        activation=activation(config, "hidden_act"),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        tied_embeddings=flag(config, "tie_word_embeddings"),
    )


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), spec)
