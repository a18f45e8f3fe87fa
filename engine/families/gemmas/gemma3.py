"""Gemma 3: Gemma 2's norms, a norm over query and key heads, five sliding layers to one global, each with its own rope.

A checkpoint with vision (`Gemma3ForConditionalGeneration`) has a SigLIP encoder, whose patches are averaged to 256 rows
an image; the tokens of an image attend to each other in both directions.
"""

from __future__ import annotations

import math
from dataclasses import replace

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
    refuse,
    rope,
    shape,
    text_part,
    windows,
)
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, VisionSpec, WeightNames

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
    """ModelSpec of a Gemma 3 config.json with vision. Raises CheckpointError."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json: a Gemma 3 with vision needs an object 'text_config'.")
    base = spec({**TEXT_DEFAULTS, **text})
    return replace(base, vision=_vision(config, base))


def _vision(config: Json, text: ModelSpec) -> VisionSpec | None:
    """Reads the encoder; None of a checkpoint without one."""
    vision = config.get("vision_config")
    if not vision:
        return None
    must_be(vision, "model_type", "siglip_vision_model")
    must_be(vision, "num_channels", 3)
    hidden, heads = integer(vision, "hidden_size", 768), integer(vision, "num_attention_heads", 12)
    if hidden % heads:
        raise refuse("vision_config.num_attention_heads", heads, f"a divisor of hidden_size = {hidden}")
    size, patch = integer(vision, "image_size", 224), integer(vision, "patch_size", 16)
    tokens = integer(config, "mm_tokens_per_image", 256)
    patches, side = size // patch, math.isqrt(tokens)
    if side**2 != tokens or size % patch or patches % side:
        raise refuse("mm_tokens_per_image", tokens, f"a square whose side divides the {patches} patches a side")
    token = integer(config, "image_token_index", 262_144)
    if token >= text.vocab_size:
        raise refuse("image_token_index", token, f"a token of the vocabulary, below {text.vocab_size}")
    return VisionSpec(
        hidden_size=hidden,
        layers=integer(vision, "num_hidden_layers", 12),
        heads=heads,
        intermediate_size=integer(vision, "intermediate_size", 3072),
        image_size=size,
        patch_size=patch,
        pixel_shuffle=patches // side,
        image_token_id=token,
        activation=activation(vision, "hidden_act", default="gelu_pytorch_tanh"),
        norm_eps=number(vision, "layer_norm_eps", 1e-6),
        averaged=True,
        whole_tokens=tokens,
        optional=True,
    )


def names_with_vision(config: Json) -> WeightNames:
    """Gemma 2's names, of the text part; the encoder lies beside it."""
    return replace(
        text_part(gemma2.names(config)),
        vision="vision_tower.vision_model.",
        connector="multi_modal_projector.mm_input_projection_weight",
    )


FAMILY = Family("gemma3_text", ("Gemma3ForCausalLM",), spec, gemma2.names)
WITH_VISION = Family("gemma3", ("Gemma3ForConditionalGeneration",), spec_with_vision, names_with_vision, sees=True)
