"""Gemma 1: Llama with norm weights stored less 1, embeddings scaled by the root of the hidden size, and GeGLU."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.reading import activation, flag, must_be, rope, shape
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Gemma config.json. Raises CheckpointError."""
    must_be(config, "use_bidirectional_attention", False)
    sizes = shape(config, head_dim=256)
    bias = flag(config, "attention_bias")
    return ModelSpec(
        **sizes,
        ropes=(rope(config, sizes["head_dim"]),) * sizes["layers"],
        activation=activation(config, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        norm_offset=1.0,
        qkv_bias=bias,
        o_bias=bias,
        embedding_multiplier=sizes["hidden_size"] ** 0.5,
        tied_embeddings=flag(config, "tie_word_embeddings", True),
    )


FAMILY = Family("gemma", ("GemmaForCausalLM",), spec)
