"""GLM-4: norms on both sides of attention and MLP, half of each head rotated, as pairs of neighbours."""

from __future__ import annotations

from dataclasses import replace

from engine.families.family import Family
from engine.families.mixtures import shared_names, with_sigmoid_experts
from engine.families.reading import activation, flag, integer, rope, shape
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, WeightNames


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a GLM-4 config.json. Raises CheckpointError."""
    config = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7, **config}
    sizes = shape(config, head_dim=128)
    rotary = replace(rope(config, sizes["head_dim"], partial=True), neighbours=True)
    return ModelSpec(
        **sizes,
        ropes=(rotary,) * sizes["layers"],
        activation=activation(config, "hidden_act"),
        post_norm=True,
        qkv_bias=flag(config, "attention_bias", True),
        tied_embeddings=flag(config, "tie_word_embeddings"),
    )


def first_spec(config: Json) -> ModelSpec:
    """ModelSpec of a config.json of the first GLM-4, which has no norms after. Raises CheckpointError."""
    return replace(spec(config), post_norm=False)


def mixed_spec(config: Json) -> ModelSpec:
    """ModelSpec of a GLM-4.5 config.json, and of those that follow. Raises CheckpointError."""
    config = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, **config}
    sizes = shape(config)
    plain = ModelSpec(
        **sizes,
        ropes=(rope(config, sizes["head_dim"], partial=True),) * sizes["layers"],
        activation=activation(config, "hidden_act"),
        qk_norm="head" if flag(config, "use_qk_norm") else "none",
        qkv_bias=flag(config, "attention_bias"),
        tied_embeddings=flag(config, "tie_word_embeddings"),
    )
    mixed = tuple(range(integer(config, "first_k_dense_replace", 1, minimum=0), plain.layers))
    return with_sigmoid_experts(plain, config, 1408, mixed, count=128, scaling=1.0)


def names(config: Json) -> WeightNames:
    """Gate and up are joined; four norms a layer."""
    return WeightNames(
        gate_up=("mlp.gate_up_proj",),
        attention_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
    )


FAMILY = Family("glm4", ("Glm4ForCausalLM",), spec, names)
MIXED = Family("glm4_moe", ("Glm4MoeForCausalLM",), mixed_spec, shared_names)
FIRST = Family("glm", ("GlmForCausalLM",), first_spec, names)
