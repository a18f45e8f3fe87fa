"""GLM-4: norms on both sides of attention and MLP, half of each head rotated, as pairs of neighbours."""

from __future__ import annotations

from dataclasses import replace

from engine.families.family import Family
from engine.families.reading import activation, flag, rope, shape
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


def names(config: Json) -> WeightNames:
    """Gate and up are joined; four norms a layer."""
    return WeightNames(
        gate_up=("mlp.gate_up_proj",),
        attention_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
    )


FAMILY = Family("glm4", ("Glm4ForCausalLM",), spec, names)
FIRST = Family("glm", ("GlmForCausalLM",), first_spec, names)
