"""Llama 4: most layers attend within chunks and rotate; the others see everything, without positions.

Queries and keys that rotate are normalised, and queries that do not grow with their position. Experts, of which a token
takes few and one more that all take, read what it is times their score. The text part of a checkpoint with vision is
run too; its images are not.
"""

from __future__ import annotations

from dataclasses import replace

from engine.errors import CheckpointError
from engine.families.family import Family
from engine.families.mixtures import with_experts
from engine.families.reading import activation, flag, integer, number, refuse, rope, shape, text_part
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, Rope, WeightNames

CHUNKED, FULL = "chunked_attention", "full_attention"
# Configurations leave out what is as in transformers' defaults.
DEFAULTS: Json = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Llama 4 text config.json. Raises CheckpointError."""
    config = {**DEFAULTS, **config}
    width = integer(config, "intermediate_size")  # of an expert
    sizes = shape({**config, "intermediate_size": integer(config, "intermediate_size_mlp", 16_384)}, head_dim=128)
    layers, head_dim = sizes["layers"], sizes["head_dim"]
    rotates = _rotating(config, layers)
    sizes["windows"] = _windows(config, layers, rotates)
    rotary, still = _rope(config, head_dim), _growing(config)
    bias = flag(config, "attention_bias")
    plain = ModelSpec(
        **sizes,
        ropes=tuple(rotary if each else still for each in rotates),
        activation=activation(config, "hidden_act"),
        qk_norm="rotated" if flag(config, "use_qk_norm", True) else "none",
        qkv_bias=bias,
        o_bias=bias,
        tied_embeddings=flag(config, "tie_word_embeddings"),
        chunked=True,
    )
    mixed = _mixed_layers(config, layers)
    if not mixed:
        return plain
    return with_experts(
        plain,
        config,
        width,
        mixed,
        count=16,
        per_token=1,
        shared=1,
        scores="sigmoid",
        normalised=False,
        scaled_inputs=True,
    )


def _rotating(config: Json, layers: int) -> tuple[bool, ...]:
    """Returns the layers with positions. A configuration lists those, by the name of the others."""
    given = config.get("no_rope_layers")
    if not given:
        every = integer(config, "no_rope_layer_interval", 4)
        return tuple((index + 1) % every != 0 for index in range(layers))
    if not isinstance(given, list) or len(given) < layers or not set(given) <= {0, 1}:
        raise refuse("no_rope_layers", given, f"a list of {layers}, each 0 or 1")
    return tuple(bool(each) for each in given[:layers])


def _windows(config: Json, layers: int, rotates: tuple[bool, ...]) -> tuple[int | None, ...]:
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [CHUNKED if each else FULL for each in rotates]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {CHUNKED, FULL}:
        raise refuse("layer_types", kinds, f"a list of {layers}, each {CHUNKED} or {FULL}")
    if CHUNKED in kinds and "attention_chunk_size" in config and config["attention_chunk_size"] is None:
        raise refuse("attention_chunk_size", None, f"a positive integer, as some layers are {CHUNKED}")
    size = integer(config, "attention_chunk_size", 8192)
    return tuple(size if kind == CHUNKED else None for kind in kinds)


def _rope(config: Json, head_dim: int) -> Rope:
    rotary = rope(config, head_dim, theta=500_000.0)
    if rotary.attention_factor != 1.0 or rotary.kind == "longrope":  # before a norm that takes it away again
        raise refuse("rope_type", rotary.kind, "default, linear, llama3, proportional")
    return replace(rotary, neighbours=True)


def _growing(config: Json) -> Rope | None:
    """Reads the growth of queries without positions (`attn_temperature_tuning`)."""
    tuned = config.get("attn_temperature_tuning")
    if tuned is not None and not isinstance(tuned, int):  # early files have a number
        raise refuse("attn_temperature_tuning", tuned, "true or false")
    if tuned is not None and not tuned:
        return None
    beta, context = number(config, "attn_scale", 0.1), integer(config, "floor_scale", 8192)
    return Rope(0, 1.0, query_beta=beta, query_context=context, query_offset=1)


def _mixed_layers(config: Json, layers: int) -> tuple[int, ...]:
    given = config.get("moe_layers")
    if given is None:
        step = integer(config, "interleave_moe_layer_step", 1)
        return tuple(range(step - 1, layers, step))
    if not isinstance(given, list) or not all(isinstance(each, int) for each in given):
        raise refuse("moe_layers", given, "a list of layers' numbers")
    return tuple(index for index in range(layers) if index in given)


def names(config: Json) -> WeightNames:
    """MLPs and experts lie in `feed_forward`."""
    return WeightNames(
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        router="feed_forward.router",
        stacked_experts="feed_forward.experts.",
        stacked_in_turn=False,
        shared_expert="feed_forward.shared_expert.",
    )


def _text(config: Json) -> Json:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json: a Llama 4 with vision needs an object 'text_config'.")
    return {"tie_word_embeddings": config.get("tie_word_embeddings", False), **text}


def spec_with_vision(config: Json) -> ModelSpec:
    """ModelSpec of the text part of a Llama 4 config.json with vision. Raises CheckpointError."""
    return spec(_text(config))


def names_with_vision(config: Json) -> WeightNames:
    """The text model lies under a root of its own, the encoder beside it is left alone."""
    return replace(text_part(names(config)), ignored=("vision_model.", "multi_modal_projector."))


FAMILY = Family("llama4_text", ("Llama4ForCausalLM",), spec, names)
WITH_VISION = Family("llama4", ("Llama4ForConditionalGeneration",), spec_with_vision, names_with_vision)
