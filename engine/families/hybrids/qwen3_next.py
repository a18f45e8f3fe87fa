"""Qwen3-Next, and Qwen3.5 dense and with experts: Gated DeltaNet in most layers, gated attention in the others.

A quarter of each attending head rotates; norms are stored less one. Beside the experts is one that every token takes.
A Qwen3.5 checkpoint with vision reads images, whose tokens rotate by row and column. The layer of multi-token
prediction (`mtp.`) is no part of the model: it proposes drafts (`engine.speculation.mtp`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from engine.errors import CheckpointError
from engine.families.family import Family
from engine.families.reading import activation, flag, integer, must_be, number, refuse, rope, shape
from engine.model.loader import Json
from engine.model.model_spec import Experts, GatedDelta, GridVisionSpec, ModelSpec, WeightNames

KINDS = ("linear_attention", "full_attention")
OTHER_PARTS = ("mtp.", "model.visual.")


def dense(config: Json) -> ModelSpec:
    """ModelSpec of a Qwen3.5 text config.json. Raises CheckpointError."""
    must_be(config, "attn_output_gate", True)
    config = {"partial_rotary_factor": 0.25, **config}
    sizes = shape(config, head_dim=256)
    kinds = _kinds(config, sizes["layers"])
    rotary = rope(config, sizes["head_dim"], partial=True)
    bias = flag(config, "attention_bias")
    return ModelSpec(
        **sizes,
        ropes=tuple(rotary if kind == "full_attention" else None for kind in kinds),
        activation=activation(config, "hidden_act"),
        norm_offset=1.0,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        tied_embeddings=flag(config, "tie_word_embeddings"),
        gated_attention=True,
        recurrent_layers=tuple(index for index, kind in enumerate(kinds) if kind == "linear_attention"),
        recurrence=_recurrence(config),
        mtp_layers=_mtp_layers(config),
    )


def _mtp_layers(config: Json) -> int:
    """Returns 1 where the checkpoint's layers of multi-token prediction can draft: one, with the model's embedding."""
    layers = integer(config, "mtp_num_hidden_layers", 0, minimum=0)
    return int(layers == 1 and not flag(config, "mtp_use_dedicated_embeddings"))


def _kinds(config: Json, layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        every = integer(config, "full_attention_interval", 4)
        return [KINDS[(index + 1) % every == 0] for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= set(KINDS):
        raise refuse("layer_types", kinds, f"a list of {layers}, each {' or '.join(KINDS)}")
    if set(kinds) != set(KINDS):
        raise refuse("layer_types", kinds, "one at least of each kind")
    return kinds


def _recurrence(config: Json) -> GatedDelta:
    must_be(config, "hidden_act", "silu")
    key_heads = integer(config, "linear_num_key_heads", 16)
    value_heads = integer(config, "linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise refuse("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads = {key_heads}")
    taps = integer(config, "linear_conv_kernel_dim", 4)
    if taps < 2:
        raise refuse("linear_conv_kernel_dim", taps, "at least 2")
    key_dim, value_dim = (integer(config, f"linear_{part}_head_dim", 128) for part in ("key", "value"))
    return GatedDelta(key_heads, value_heads, key_dim, value_dim, taps)


def mixture(config: Json) -> ModelSpec:
    """ModelSpec of a Qwen3.5 text config.json with experts. Raises CheckpointError."""
    width = integer(config, "moe_intermediate_size", 512)
    plain = dense({"intermediate_size": width, **config})
    experts = Experts(
        integer(config, "num_experts", 256),
        integer(config, "num_experts_per_tok", 8),
        width,
        tuple(range(plain.layers)),
        shared_size=integer(config, "shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    if experts.per_token > experts.count:
        raise refuse("num_experts_per_tok", experts.per_token, f"at most the {experts.count} experts that there are")
    return replace(plain, experts=experts)


def qwen3_next(config: Json) -> ModelSpec:
    """ModelSpec of a Qwen3-Next config.json. Raises CheckpointError."""
    plain = mixture({"num_experts": 512, "num_experts_per_tok": 10, "mtp_num_hidden_layers": 1, **config})
    step, without = integer(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(without, list) or not all(isinstance(each, int) for each in without):
        raise refuse("mlp_only_layers", without, "a list of layers' numbers")
    mixed = tuple(index for index in range(plain.layers) if (index + 1) % step == 0 and index not in without)
    assert plain.experts is not None and isinstance(plain.recurrence, GatedDelta), "of `mixture`"
    normalised = flag(config, "norm_topk_prob", True)
    return replace(
        plain,
        experts=replace(plain.experts, layers=mixed, normalised=normalised),
        recurrence=replace(plain.recurrence, interleaved=True),
    )


def names(config: Json) -> WeightNames:
    """Qwen's names; other parts of a checkpoint are left alone."""
    return WeightNames(ignored=OTHER_PARTS, shared_expert="mlp.shared_expert.")


def _text(config: Json) -> Json:
    """Returns the text part's configuration of a checkpoint with vision. Raises CheckpointError."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json: a Qwen3.5 with vision needs an object 'text_config'.")
    return {"tie_word_embeddings": config.get("tie_word_embeddings", False), **text}


def dense_with_vision(config: Json) -> ModelSpec:
    """ModelSpec of a Qwen3.5 config.json with vision. Raises CheckpointError."""
    return _with_vision(dense(_text(config)), config)


def mixture_with_vision(config: Json) -> ModelSpec:
    """ModelSpec of a Qwen3.5 config.json with vision and experts. Raises CheckpointError."""
    return _with_vision(mixture(_text(config)), config)


def _with_vision(text: ModelSpec, config: Json) -> ModelSpec:
    """Adds the encoder, where there is one and a token of the vocabulary stands for its rows."""
    vision, token = config.get("vision_config"), integer(config, "image_token_id", 248_056)
    if not vision or token >= text.vocab_size:
        return text
    must_be(vision, "in_channels", 3)
    must_be(vision, "out_hidden_size", text.hidden_size)
    must_be(vision, "deepstack_visual_indexes", [])
    hidden, heads = integer(vision, "hidden_size", 1152), integer(vision, "num_heads", 16)
    if hidden % (4 * heads):
        raise refuse("vision_config.num_heads", heads, f"heads of a multiple of 4 numbers, of hidden_size = {hidden}")
    places = integer(vision, "num_position_embeddings", 2304)
    if math.isqrt(places) ** 2 != places:
        raise refuse("vision_config.num_position_embeddings", places, "those of a square")
    rotary = vision.get("rope_parameters") or {}
    must_be(rotary, "rope_type", "axial")
    encoder = GridVisionSpec(
        hidden_size=hidden,
        layers=integer(vision, "depth", 27),
        heads=heads,
        intermediate_size=integer(vision, "intermediate_size", 4304),
        patch_size=integer(vision, "patch_size", 16),
        frames=integer(vision, "temporal_patch_size", 2),
        merge=integer(vision, "spatial_merge_size", 2),
        positions=places,
        image_token_id=token,
        activation=activation(vision, "hidden_act", default="gelu_pytorch_tanh"),
        theta=number(rotary, "rope_theta", 10_000.0),
    )
    sections = _sections(_text(config))
    ropes = tuple(None if rope is None else replace(rope, sections=sections) for rope in text.ropes)
    return replace(text, vision=encoder, ropes=ropes)


def _sections(config: Json) -> tuple[int, ...]:
    """Reads how many pairs rotate by frame, row and column."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    must_be(parameters, "mrope_interleaved", True)
    sections = parameters.get("mrope_section", [11, 11, 10])
    if not isinstance(sections, list) or len(sections) != 3 or not all(isinstance(each, int) for each in sections):
        raise refuse("mrope_section", sections, "three numbers of pairs, for frame, row and column")
    return tuple(sections)


def names_with_vision(config: Json) -> WeightNames:
    """The text model lies under a root of its own."""
    return replace(names(config), root="model.language_model.", vision="model.visual.")


FAMILIES = (
    Family("qwen3_5_text", ("Qwen3_5ForCausalLM",), dense, names),
    Family("qwen3_5_moe_text", ("Qwen3_5MoeForCausalLM",), mixture, names),
    Family("qwen3_next", ("Qwen3NextForCausalLM",), qwen3_next, names),
    Family("qwen3_5", ("Qwen3_5ForConditionalGeneration",), dense_with_vision, names_with_vision, sees=True),
    Family("qwen3_5_moe", ("Qwen3_5MoeForConditionalGeneration",), mixture_with_vision, names_with_vision, sees=True),
)
