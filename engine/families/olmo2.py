"""OLMo 2: norms after attention and MLP instead of before, and over whole query and key projections."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.reading import activation, flag, rope, shape
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, WeightNames


def spec(config: Json) -> ModelSpec:
    """ModelSpec of an OLMo 2 config.json. Raises CheckpointError."""
    sizes = shape({"rms_norm_eps": 1e-5, **config})
    bias = flag(config, "attention_bias")
    return ModelSpec(
        **sizes,
        ropes=(rope(config, sizes["head_dim"]),) * sizes["layers"],
        activation=activation(config, "hidden_act"),
        pre_norm=False,
        post_norm=True,
        qk_norm="projection",
        qkv_bias=bias,
        o_bias=bias,
        tied_embeddings=flag(config, "tie_word_embeddings"),
    )


def names(config: Json) -> WeightNames:
    """Two norms a layer, both after."""
    return WeightNames(
        attention_pre_norm="",
        attention_post_norm="post_attention_layernorm",
        mlp_pre_norm="",
        mlp_post_norm="post_feedforward_layernorm",
    )


FAMILY = Family("olmo2", ("Olmo2ForCausalLM",), spec, names)
