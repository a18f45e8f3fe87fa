"""Gemma 4: most layers slide; the others have larger heads, a quarter of which rotates, and values may be keys.

The last layers may read the keys and values of earlier ones, every layer may have an input of its own, and experts run
beside the MLP. A checkpoint with vision has an encoder of images; in the larger models the tokens of an image attend to
each other in both directions where layers slide. Sounds and videos are not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
    windows,
)
from engine.model.loader import Json
from engine.model.model_spec import Experts, GlobalHeads, ModelSpec, PerLayerInput, PooledVisionSpec, Rope, WeightNames

SLIDING, FULL = "sliding_attention", "full_attention"
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
MAX_SOFT_TOKENS = 1120  # of an image, in any processor
# Configurations leave out what is as in transformers' defaults.
DEFAULTS: Json = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Gemma 4 text config.json. Raises CheckpointError."""
    must_be(config, "use_bidirectional_attention", False, "vision")  # of images alone
    config = {**DEFAULTS, **config}
    sizes = shape(config, head_dim=256)
    layers, width = sizes["layers"], sizes["intermediate_size"]
    slides = tuple((index + 1) % 6 != 0 for index in range(layers - 1))
    sizes["windows"] = windows(config, layers, (*slides, False), integer(config, "sliding_window", 512))
    sizes["attention_scale"] = 1.0  # queries and keys are normalised
    if sizes["windows"][-1] is not None:
        raise refuse("layer_types", SLIDING, f"a last layer of {FULL}")
    heads, sources = _global_heads(config, sizes), _sources(config, sizes["windows"])
    everywhere, local = _rope(config, FULL, heads.head_dim), _rope(config, SLIDING, sizes["head_dim"])
    doubled = flag(config, "use_double_wide_mlp") and any(source is not None for source in sources)
    bias = flag(config, "attention_bias")
    return ModelSpec(
        **sizes,
        ropes=tuple(everywhere if window is None else local for window in sizes["windows"]),
        activation=activation(config, "hidden_activation", default="gelu_pytorch_tanh"),
        post_norm=True,
        qk_norm="head",
        value_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        logit_softcap=optional_number(config, "final_logit_softcapping"),
        embedding_multiplier=sizes["hidden_size"] ** 0.5,
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        global_heads=heads,
        kv_sources=sources if any(source is not None for source in sources) else (),
        mlp_widths=tuple(width if source is None else 2 * width for source in sources) if doubled else (),
        per_layer_input=_layer_input(config, sizes["vocab_size"]),
        layer_scales=True,
        experts=_experts(config, layers) if flag(config, "enable_moe_block") else None,
    )


def _rope(config: Json, kind: str, head_dim: int) -> Rope:
    given = config.get("rope_parameters")
    given = ROPES if given is None else given
    if not isinstance(given, dict) or not isinstance(given.get(kind), dict):
        raise refuse("rope_parameters", given, f"an object with one for {SLIDING} and one for {FULL}")
    return rope({**config, "rope_parameters": given}, head_dim, layer_type=kind)


def _global_heads(config: Json, sizes: dict[str, Any]) -> GlobalHeads:
    """Reads the heads of the layers that do not slide. transformers 5 lists them by layer when it saves."""
    wide = tuple(index for index, window in enumerate(sizes["windows"]) if window is None)
    shared = flag(config, "attention_k_eq_v")
    listed = config.get("per_layer_config")
    if listed is None:
        kv_heads = integer(config, "num_global_key_value_heads", sizes["kv_heads"]) if shared else sizes["kv_heads"]
        head_dim = integer(config, "global_head_dim", 512)
    else:
        each = [listed.get(str(index)) for index in wide] if isinstance(listed, dict) and listed else [{}]
        same = isinstance(listed, dict) and len(listed) in (0, len(wide)) and all(one == each[0] for one in each)
        if not same or not isinstance(each[0], dict) or not each[0].keys() <= {"head_dim", "num_key_value_heads"}:
            raise refuse("per_layer_config", listed, f"one head_dim and num_key_value_heads of layers {wide}")
        kv_heads = integer(each[0], "num_key_value_heads", sizes["kv_heads"])
        head_dim = integer(each[0], "head_dim", sizes["head_dim"])
    if sizes["heads"] % kv_heads:
        accepted = f"a divisor of num_attention_heads = {sizes['heads']}"
        raise refuse("num_global_key_value_heads", kv_heads, accepted)
    if head_dim % 2:
        raise refuse("global_head_dim", head_dim, "an even number")
    return GlobalHeads(wide, kv_heads, head_dim, keys_are_values=shared)


def _sources(config: Json, sliding: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Returns for each of the last layers the last one of its kind that has keys and values of its own."""
    shared = integer(config, "num_kv_shared_layers", 0, minimum=0)
    first = len(sliding) - shared
    last = {window: index for index, window in enumerate(sliding[: max(first, 0)])}
    if shared and set(last) != set(sliding):
        raise refuse("num_kv_shared_layers", shared, "so many that each kind of layer has one before those")
    return tuple(None if index < first else last[window] for index, window in enumerate(sliding))


def _layer_input(config: Json, vocab_size: int) -> PerLayerInput | None:
    size = integer(config, "hidden_size_per_layer_input", 256, minimum=0)
    if not size:
        return None
    rows = integer(config, "vocab_size_per_layer_input", 262_144, minimum=0)
    if rows < vocab_size:
        raise refuse("vocab_size_per_layer_input", rows, f"at least vocab_size = {vocab_size}")
    return PerLayerInput(size, rows)


def _experts(config: Json, layers: int) -> Experts:
    count, per_token = integer(config, "num_experts"), integer(config, "top_k_experts")
    if per_token > count:
        raise refuse("top_k_experts", per_token, f"at most the {count} experts that there are")
    width = integer(config, "moe_intermediate_size")
    return Experts(count, per_token, width, tuple(range(layers)), weight_scales=True, beside_mlp=True)


def names(config: Json) -> WeightNames:
    """Gemma 2's names; layers that read the keys and values of others have weights that nothing uses."""
    return _names(config, "model.", ())


def _names(config: Json, root: str, others: tuple[str, ...]) -> WeightNames:
    layers = integer(config, "num_hidden_layers", 30)
    first = layers - integer(config, "num_kv_shared_layers", 0, minimum=0)
    parts = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    unused = (f"{root}layers.{index}.self_attn.{part}" for index in range(first, layers) for part in parts)
    return replace(
        gemma2.names(config),
        root=root,
        router="router.proj",
        joined_experts=("experts.gate_up_proj", "experts.down_proj"),
        ignored=(*others, *unused),
    )


def _text(config: Json) -> Json:
    """Returns the text part's configuration of a checkpoint with vision. Raises CheckpointError."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json: a Gemma 4 with vision needs an object 'text_config'.")
    return {"tie_word_embeddings": config.get("tie_word_embeddings", True), **text}


def spec_with_vision(config: Json) -> ModelSpec:
    """ModelSpec of a Gemma 4 config.json with vision. Raises CheckpointError."""
    text = _text(config)
    return replace(spec(text), vision=_vision(config.get("vision_config"), text))


def _vision(vision: Any, text: Json) -> PooledVisionSpec | None:  # Any: JSON
    """Reads the encoder; None of a checkpoint without one."""
    if not vision:
        return None
    must_be(vision, "model_type", "gemma4_vision")
    must_be(vision, "attention_bias", False)
    rotary = vision.get("rope_parameters") or {}
    must_be(rotary, "rope_type", "axial", "default")
    heads, kv_heads = integer(vision, "num_attention_heads", 12), integer(vision, "num_key_value_heads", 12)
    head_dim = integer(vision, "head_dim", 64)
    if heads % kv_heads:
        raise refuse("vision_config.num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    if head_dim % 4:
        raise refuse("vision_config.head_dim", head_dim, "a multiple of 4")
    padding, rows = integer(text, "pad_token_id", 0, minimum=0), integer(text, "vocab_size", DEFAULTS["vocab_size"])
    if padding >= rows:
        raise refuse("pad_token_id", padding, f"a token of the vocabulary, below {rows}")
    return PooledVisionSpec(
        hidden_size=integer(vision, "hidden_size", 768),
        layers=integer(vision, "num_hidden_layers", 16),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=integer(vision, "intermediate_size", 3072),
        patch_size=integer(vision, "patch_size", 16),
        pool=integer(vision, "pooling_kernel_size", 3),
        positions=integer(vision, "position_embedding_size", 10_240),
        image_token_id=padding,
        activation=activation(vision, "hidden_activation", default="gelu_pytorch_tanh"),
        norm_eps=number(vision, "rms_norm_eps", 1e-6),
        theta=number(rotary, "rope_theta", 100.0),
        clipped=flag(vision, "use_clipped_linears"),
        standardized=flag(vision, "standardize"),
        whole_tokens=MAX_SOFT_TOKENS if text.get("use_bidirectional_attention") == "vision" else 0,
    )


def names_with_vision(config: Json) -> WeightNames:
    """The text model lies under a root of its own; what lies beside it and is no part of it is left alone."""
    others = tuple(f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio"))
    return replace(
        _names(_text(config), "model.language_model.", others),
        vision="model.vision_tower.",
        connector="model.embed_vision.embedding_projection.weight",
    )


FAMILY = Family("gemma4_text", ("Gemma4ForCausalLM",), spec, names)
WITH_VISION = Family("gemma4", ("Gemma4ForConditionalGeneration",), spec_with_vision, names_with_vision, sees=True)
