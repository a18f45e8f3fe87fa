"""OLMo 2 and 3: norms after attention and MLP instead of before, and over whole query and key projections.

OLMo 3 is OLMo 2 with three sliding layers to one that sees everything, which alone stretches its rope.
"""

from __future__ import annotations

from dataclasses import replace

from engine.families.family import Family
from engine.families.reading import activation, flag, integer, rope, shape, windows
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, Rope, WeightNames

THETA = 500_000.0  # OLMo 3's


def second_spec(config: Json) -> ModelSpec:
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


def third_spec(config: Json) -> ModelSpec:
    """ModelSpec of an OLMo 3 config.json. Raises CheckpointError."""
    plain = second_spec({"rope_theta": THETA, **config})
    layers, head_dim = plain.layers, plain.head_dim
    slides = windows(config, layers, tuple((i + 1) % 4 != 0 for i in range(layers)), _window(config))
    everywhere = rope(config, head_dim, theta=THETA, layer_type="full_attention")
    nested = (config.get("rope_parameters") or {}).get("sliding_attention")
    local = (
        Rope(head_dim, everywhere.theta)
        if nested is None
        else rope({**config, "rope_parameters": nested}, head_dim, theta=THETA)
    )
    return replace(plain, windows=slides, ropes=tuple(everywhere if each is None else local for each in slides))


def _window(config: Json) -> int | None:
    given = "sliding_window" in config and config["sliding_window"] is None
    return None if given else integer(config, "sliding_window", 4096)


def names(config: Json) -> WeightNames:
    """Two norms a layer, both after."""
    return WeightNames(
        attention_pre_norm="",
        attention_post_norm="post_attention_layernorm",
        mlp_pre_norm="",
        mlp_post_norm="post_feedforward_layernorm",
    )


FAMILY = Family("olmo2", ("Olmo2ForCausalLM",), second_spec, names)
THIRD = Family("olmo3", ("Olmo3ForCausalLM",), third_spec, names)
