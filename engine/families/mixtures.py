"""Mixtures of experts: Qwen3-MoE, Mixtral and OLMoE, which are Qwen 3, Mistral and Llama with experts for MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.families import llama, mistral, qwen3
from engine.families.family import Family
from engine.families.reading import flag, integer, must_be, refuse
from engine.model.loader import Json
from engine.model.model_spec import Experts, ModelSpec, WeightNames


def qwen3_moe(config: Json) -> ModelSpec:
    """ModelSpec of a Qwen3-MoE config.json. Raises CheckpointError."""
    layers, step = integer(config, "num_hidden_layers"), integer(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(each, int) for each in dense):
        raise refuse("mlp_only_layers", dense, "a list of layers' numbers")
    mixed = tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in dense)
    width = integer(config, "moe_intermediate_size", 768)
    return _with_experts(qwen3.spec(config), config, width, mixed, normalised=flag(config, "norm_topk_prob"))


def mixtral(config: Json) -> ModelSpec:
    """ModelSpec of a Mixtral config.json. Raises CheckpointError."""
    plain = mistral.spec({"sliding_window": None, "rms_norm_eps": 1e-5, **config})
    return _with_experts(plain, config, plain.intermediate_size, tuple(range(plain.layers)), count=8, per_token=2)


def olmoe(config: Json) -> ModelSpec:
    """ModelSpec of an OLMoE config.json. Raises CheckpointError."""
    must_be(config, "clip_qkv")
    plain = replace(llama.spec({"rms_norm_eps": 1e-5, **config}), qk_norm="projection")
    mixed, normalised = tuple(range(plain.layers)), flag(config, "norm_topk_prob")
    return _with_experts(plain, config, plain.intermediate_size, mixed, normalised=normalised, count=64)


def _with_experts(
    plain: ModelSpec,
    config: Json,
    width: int,
    layers: tuple[int, ...],
    *,
    count: int = 128,
    per_token: int = 8,
    **fields: Any,  # of Experts
) -> ModelSpec:
    count = integer(config, "num_local_experts", integer(config, "num_experts", count))
    per_token = integer(config, "num_experts_per_tok", per_token)
    if per_token > count:
        raise refuse("num_experts_per_tok", per_token, f"at most the {count} experts that there are")
    return replace(plain, experts=Experts(count, per_token, width, layers, **fields))


def mixtral_names(config: Json) -> WeightNames:
    """The mixture has names of its own."""
    return WeightNames(
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{index}.",
        expert_gate_up=("w1", "w3"),
        expert_down="w2",
    )


FAMILIES = (
    Family("qwen3_moe", ("Qwen3MoeForCausalLM",), qwen3_moe, qwen3.FAMILY.names),
    Family("mixtral", ("MixtralForCausalLM",), mixtral, mixtral_names),
    Family("olmoe", ("OlmoeForCausalLM",), olmoe),
)
