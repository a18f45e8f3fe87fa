"""Gemma 3: Gemma 2's norms, a norm over query and key heads, five sliding layers to one global, each with its own rope.

The text part of a Gemma 3 checkpoint with vision (`Gemma3ForConditionalGeneration`) is run too; its images are not.
"""

from __future__ import annotations

from engine.errors import CheckpointError
from engine.families.family import Family
from engine.families.gemmas import gemma2
from engine.families.reading import (
    activation,
    flag,
    integer,
    must_be,
    number,
    optional_number,
    rope,
    shape,
    text_part,
    windows,
)
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, WeightNames

# Configurations with vision leave out fields of `text_config` that are as in the 4B model.
TEXT_DEFAULTS: Json = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
}


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Gemma 3 text config.json. Raises CheckpointError."""
    must_be(config, "use_bidirectional_attention", False)
    sizes = shape(config, head_dim=256)
    layers, head_dim = sizes["layers"], sizes["head_dim"]
    every = integer(config, "sliding_window_pattern", 6)
    sizes["windows"] = windows(
        config, layers, tuple((i + 1) % every != 0 for i in range(layers)), integer(config, "sliding_window", 4096)
    )
    sizes["attention_scale"] = number(config, "query_pre_attn_scalar", 256) ** -0.5
    everywhere = rope(config, head_dim, theta=1_000_000.0, layer_type="full_attention")
    nested = {"rope_parameters": {"sliding_attention": (config.get("rope_parameters") or {}).get("sliding_attention")}}
    local = rope(
        {**config, **nested, "rope_theta": None, "rope_scaling": None},
        head_dim,
        theta=number(config, "rope_local_base_freq", 10_000.0),
        layer_type="sliding_attention",
    )
    bias = flag(config, "attention_bias")
    return ModelSpec(
        **sizes,
        ropes=tuple(everywhere if window is None else local for window in sizes["windows"]),
        activation=activation(config, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        norm_offset=1.0,
        post_norm=True,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        attention_softcap=optional_number(config, "attn_logit_softcapping"),
        logit_softcap=optional_number(config, "final_logit_softcapping"),
        embedding_multiplier=sizes["hidden_size"] ** 0.5,
        tied_embeddings=flag(config, "tie_word_embeddings", True),
    )


def spec_with_vision(config: Json) -> ModelSpec:
    """ModelSpec of the text part of a Gemma 3 config.json with vision. Raises CheckpointError."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json: a Gemma 3 with vision needs an object 'text_config'.")
    return spec({**TEXT_DEFAULTS, **text})


def names_with_vision(config: Json) -> WeightNames:
    """Gemma 2's names, of the text part."""
    return text_part(gemma2.names(config))


FAMILY = Family("gemma3_text", ("Gemma3ForCausalLM",), spec, gemma2.names)
WITH_VISION = Family("gemma3", ("Gemma3ForConditionalGeneration",), spec_with_vision, names_with_vision)
