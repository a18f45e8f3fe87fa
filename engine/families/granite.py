"""Granite 3, dense: Llama with multipliers on embeddings, scores, residuals and logits."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.reading import activation, flag, number, rope, shape
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Granite config.json. Raises CheckpointError."""
    sizes = shape(config)
    sizes["attention_scale"] = number(config, "attention_multiplier", 1.0)
    bias = flag(config, "attention_bias")
    return ModelSpec(
        **sizes,
        ropes=(rope(config, sizes["head_dim"]),) * sizes["layers"],
        activation=activation(config, "hidden_act"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        residual_multiplier=number(config, "residual_multiplier", 1.0),
        logits_scaling=number(config, "logits_scaling", 1.0),
        tied_embeddings=flag(config, "tie_word_embeddings"),
    )


FAMILY = Family("granite", ("GraniteForCausalLM",), spec)
