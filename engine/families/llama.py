"""Llama 2 and 3, and the many checkpoints of the same shape (SmolLM, TinyLlama, Yi)."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.reading import activation, flag, rope, shape
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Llama config.json. Raises CheckpointError."""
    sizes = shape(config)
    bias = flag(config, "attention_bias")
    return ModelSpec(
        **sizes,
        ropes=(rope(config, sizes["head_dim"]),) * sizes["layers"],
        activation=activation(config, "hidden_act"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
        tied_embeddings=flag(config, "tie_word_embeddings"),
    )


FAMILY = Family("llama", ("LlamaForCausalLM",), spec)
