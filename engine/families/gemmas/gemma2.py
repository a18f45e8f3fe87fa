"""Gemma 2: norms on both sides, softcapped scores and logits, every other layer slides.

Its norm weights are stored less 1, and embeddings are scaled by the root of the hidden size.
"""

from __future__ import annotations

from engine.families.family import Family
from engine.families.reading import activation, flag, integer, must_be, number, optional_number, rope, shape, windows
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, WeightNames


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Gemma 2 config.json. Raises CheckpointError."""
    must_be(config, "use_bidirectional_attention", False)
    sizes = shape(config, head_dim=256)
    layers = sizes["layers"]
    sizes["windows"] = windows(
        config, layers, tuple(i % 2 == 0 for i in range(layers)), integer(config, "sliding_window", 4096)
    )
    sizes["attention_scale"] = number(config, "query_pre_attn_scalar", 256) ** -0.5
    bias = flag(config, "attention_bias")
    return ModelSpec(
        **sizes,
        ropes=(rope(config, sizes["head_dim"]),) * layers,
        activation=activation(config, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        norm_offset=1.0,
        post_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        attention_softcap=optional_number(config, "attn_logit_softcapping", 50.0),
        logit_softcap=optional_number(config, "final_logit_softcapping", 30.0),
        embedding_multiplier=sizes["hidden_size"] ** 0.5,
        tied_embeddings=flag(config, "tie_word_embeddings", True),
    )


def names(config: Json) -> WeightNames:
    """Four norms a layer."""
    return WeightNames(
        attention_post_norm="post_attention_layernorm",
        mlp_pre_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    )


FAMILY = Family("gemma2", ("Gemma2ForCausalLM",), spec, names)
