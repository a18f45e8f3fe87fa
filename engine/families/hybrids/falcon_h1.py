"""Falcon-H1 (TII 2025): Mamba-2 and attention side by side in each layer, and multipliers of nearly all parts.

Multipliers that a linear map lets through are joined: attention's input, keys and output become the scale of its scores
and a multiplier of its output; those of Mamba-2's projection take in the multiplier of its input.
"""

from __future__ import annotations

from dataclasses import replace

from engine.families import llama
from engine.families.family import Family
from engine.families.hybrids.granite_hybrid import state_space
from engine.families.reading import flag, integer, must_be, number, refuse
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, StateNorm, StateSpace, WeightNames


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Falcon-H1 config.json. Raises CheckpointError."""
    must_be(config, "hidden_act", "silu")
    must_be(config, "mamba_use_mlp", True)
    must_be(config, "attn_layer_indices")
    plain = llama.spec({"rms_norm_eps": 1e-5, **config})
    every = tuple(range(plain.layers))
    for field in ("layer_types", "layers_block_type"):
        must_be(config, field, ["hybrid"] * plain.layers)
    attention_in, keys = number(config, "attention_in_multiplier", 1.0), number(config, "key_multiplier", 1.0)
    if plain.qkv_bias and attention_in != 1.0:
        raise refuse("attention_bias", True, f"false with attention_in_multiplier = {attention_in}")
    head = number(config, "lm_head_multiplier", 1.0)
    if head <= 0:
        raise refuse("lm_head_multiplier", head, "a number above 0")
    gate, down = _numbers(config, "mlp_multipliers", 2)
    return replace(
        plain,
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        attention_scale=plain.attention_scale * attention_in**2 * keys,
        attention_multiplier=number(config, "attention_out_multiplier", 1.0) * attention_in,
        recurrence_multiplier=number(config, "ssm_out_multiplier", 1.0),
        gate_multiplier=gate,
        mlp_multiplier=down,
        logits_scaling=1.0 / head,
        attention_layers=every,
        recurrent_layers=every,
        recurrence=_recurrence(config, plain.hidden_size),
    )


def _recurrence(config: Json, hidden: int) -> StateSpace:
    inner = integer(config, "mamba_d_ssm", integer(config, "mamba_expand", 2) * hidden)
    space, before = state_space(config, inner), number(config, "ssm_in_multiplier", 1.0)
    if space.bias and before != 1.0:
        raise refuse("mamba_proj_bias", True, f"false with ssm_in_multiplier = {before}")
    gate, inputs, to_state, from_state, step = (each * before for each in _numbers(config, "ssm_multipliers", 5))
    norm: StateNorm = "none"
    if flag(config, "mamba_rms_norm"):
        norm = "before_gate" if flag(config, "mamba_norm_before_gate", True) else "gated"
    return replace(
        space,
        out_bias=flag(config, "projectors_bias"),
        norm=norm,
        multipliers=(gate, inputs, to_state, from_state, step),
    )


def _numbers(config: Json, field: str, count: int) -> tuple[float, ...]:
    """Returns a list of numbers; ones where it is absent."""
    values = config.get(field)
    values = [1.0] * count if values is None else values
    right = isinstance(values, list) and len(values) == count
    if not right or any(isinstance(each, bool) or not isinstance(each, (int, float)) for each in values):
        raise refuse(field, values, f"a list of {count} numbers")
    return tuple(map(float, values))


def names(config: Json) -> WeightNames:
    """Both halves of a layer read `input_layernorm`."""
    return WeightNames(
        recurrence="mamba.",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        norm="final_layernorm",
        mlp_pre_norm="pre_ff_layernorm",
    )


FAMILY = Family("falcon_h1", ("FalconH1ForCausalLM",), spec, names)
