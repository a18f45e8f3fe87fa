"""Granite 4 (IBM 2025): Granite with Mamba-2 in most layers, mostly without positions, larger ones with experts."""

from __future__ import annotations

from dataclasses import replace

from engine.families.family import Family
from engine.families.granite import spec as granite
from engine.families.reading import flag, integer, must_be, refuse
from engine.model.loader import Json
from engine.model.model_spec import Experts, ModelSpec, StateSpace, WeightNames

RECURRENT, ATTENDING = ("mamba", "linear_attention"), ("attention", "full_attention")


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Granite 4 config.json. Raises CheckpointError."""
    must_be(config, "position_embedding_type", "rope", "nope")
    must_be(config, "hidden_act", "silu")
    shared = integer(config, "shared_intermediate_size", 1024)
    plain = granite({"attention_multiplier": 1.0, **config, "intermediate_size": shared})
    kinds = config.get("layer_types") or config.get("layers_block_type")
    known = (*RECURRENT, *ATTENDING)
    if not isinstance(kinds, list) or len(kinds) != plain.layers or not set(kinds) <= set(known):
        raise refuse("layer_types", kinds, f"a list of {plain.layers}, each one of {', '.join(known)}")
    recurrent = tuple(index for index, kind in enumerate(kinds) if kind in RECURRENT)
    if not 0 < len(recurrent) < plain.layers:
        raise refuse("layer_types", kinds, "one at least of each kind")
    rotates = config.get("position_embedding_type") == "rope"
    return replace(
        plain,
        ropes=tuple(rope if rotates and index not in recurrent else None for index, rope in enumerate(plain.ropes)),
        recurrent_layers=recurrent,
        recurrence=state_space(config, integer(config, "mamba_expand", 2) * plain.hidden_size),
        experts=_experts(config, plain.layers, shared),
    )


def state_space(config: Json, inner: int) -> StateSpace:
    """Reads a Mamba-2 layer of `inner` channels. Raises CheckpointError."""
    heads, groups = integer(config, "mamba_n_heads", 128), integer(config, "mamba_n_groups", 1)
    if inner % heads or heads % groups:
        accepted = f"a divisor of the {inner} channels and a multiple of mamba_n_groups = {groups}"
        raise refuse("mamba_n_heads", heads, accepted)
    must_be(config, "mamba_d_head", "auto", inner // heads)
    taps = integer(config, "mamba_d_conv", 4)
    if taps < 2:
        raise refuse("mamba_d_conv", taps, "at least 2")
    _unlimited(config)
    bias = flag(config, "mamba_proj_bias")
    return StateSpace(
        heads,
        inner // heads,
        groups,
        integer(config, "mamba_d_state", 256),
        taps,
        conv_bias=flag(config, "mamba_conv_bias", True),
        bias=bias,
        out_bias=bias,
    )


def _unlimited(config: Json) -> None:
    """Refuses limits of a token's time step. Infinity is an object in files of transformers 5."""
    limit = config.get("time_step_limit")
    endless = (float("inf"), "Infinity", {"__float__": "Infinity"})
    if limit is not None and (not isinstance(limit, list) or len(limit) != 2 or limit[0] or limit[1] not in endless):
        raise refuse("time_step_limit", limit, "[0, Infinity]")


def _experts(config: Json, layers: int, shared: int) -> Experts | None:
    if not config.get("num_local_experts"):
        return None
    count, per_token = integer(config, "num_local_experts"), integer(config, "num_experts_per_tok", 2)
    if per_token > count:
        raise refuse("num_experts_per_tok", per_token, f"at most the {count} experts that there are")
    width = integer(config, "intermediate_size")
    return Experts(count, per_token, width, tuple(range(layers)), shared_size=shared)


def names(config: Json) -> WeightNames:
    """The MLP that every token takes is `shared_mlp`, with experts or without."""
    return WeightNames(
        recurrence="mamba.",
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        router="block_sparse_moe.router.layer",
        joined_experts=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        shared_expert="shared_mlp.",
        expert_gate_up=("input_linear",),
        expert_down="output_linear",
    )


FAMILY = Family("granitemoehybrid", ("GraniteMoeHybridForCausalLM",), spec, names)
