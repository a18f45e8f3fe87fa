"""LFM2 (Liquid AI 2025), dense and with experts: gated short convolutions in most layers, attention in the others."""

from __future__ import annotations

from dataclasses import replace

from engine.families.family import Family
from engine.families.mixtures import with_experts
from engine.families.reading import flag, integer, must_be, number, refuse, rope, shape
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, WeightNames

KINDS = ("conv", "full_attention")


def spec(config: Json) -> ModelSpec:
    """ModelSpec of an LFM2 config.json. Raises CheckpointError."""
    sizes = shape(config)
    sizes["norm_eps"] = number(config, "norm_eps", 1e-5)
    sizes["intermediate_size"] = _intermediate_size(config)
    must_be(config, "conv_bias", False)
    if sizes["hidden_size"] % 2:
        raise refuse("hidden_size", sizes["hidden_size"], "an even number")
    kinds = _kinds(config, sizes["layers"])
    rotated = rope(config, sizes["head_dim"], theta=1_000_000.0)
    return ModelSpec(
        **sizes,
        ropes=tuple(rotated if kind == "full_attention" else None for kind in kinds),
        qk_norm="head",
        tied_embeddings=flag(config, "tie_embedding", flag(config, "tie_word_embeddings", True)),
        conv_layers=tuple(index for index, kind in enumerate(kinds) if kind == "conv"),
        conv_taps=integer(config, "conv_L_cache", 3),
    )


def _kinds(config: Json, layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        attending = config.get("full_attn_idxs")
        attending = list(range(layers)) if attending is None else attending
        if not isinstance(attending, list):
            raise refuse("full_attn_idxs", attending, "a list of layers")
        return ["full_attention" if index in attending else "conv" for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= set(KINDS):
        raise refuse("layer_types", kinds, f"a list of {layers}, each {' or '.join(KINDS)}")
    if "full_attention" not in kinds:
        raise refuse("layer_types", kinds, "one full_attention at least")
    return kinds


def _intermediate_size(config: Json) -> int:
    """Returns the width of the MLP, which LFM2 computes from a nominal one where `block_auto_adjust_ff_dim` is set."""
    nominal = integer(config, "block_ff_dim" if config.get("block_ff_dim") else "intermediate_size")
    if not flag(config, "block_auto_adjust_ff_dim", True):
        return nominal
    width, multiple = int(2 * nominal / 3), integer(config, "block_multiple_of", 256)
    width = int(number(config, "block_ffn_dim_multiplier", 1.0) * width)
    return -(-width // multiple) * multiple


def names(config: Json) -> WeightNames:
    """LFM2's own names throughout."""
    return WeightNames(
        o="self_attn.out_proj",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        norm="embedding_norm",
        attention_pre_norm="operator_norm",
        mlp_pre_norm="ffn_norm",
    )


def mixture(config: Json) -> ModelSpec:
    """ModelSpec of an LFM2-MoE config.json: its first layers are dense, and no width is computed. Raises
    CheckpointError."""
    for field in ("block_auto_adjust_ff_dim", "block_ff_dim"):
        must_be(config, field, False)
    plain = spec({**config, "block_auto_adjust_ff_dim": False})
    return with_experts(
        plain,
        config,
        integer(config, "moe_intermediate_size", 1792),
        tuple(range(integer(config, "num_dense_layers", 2, minimum=0), plain.layers)),
        count=32,
        per_token=4,
        scores="sigmoid",
        normalised=flag(config, "norm_topk_prob", True),
        min_weight=1e-6,
        scaling=number(config, "routed_scaling_factor", 1.0),
        selection_bias=flag(config, "use_expert_bias", True),
    )


def mixture_names(config: Json) -> WeightNames:
    """Experts are named as the MLP is."""
    return replace(
        names(config),
        router="feed_forward.gate",
        selection_bias="feed_forward.expert_bias",
        expert="feed_forward.experts.{index}.",
        expert_gate_up=("w1", "w3"),
        expert_down="w2",
    )


FAMILY = Family("lfm2", ("Lfm2ForCausalLM",), spec, names)
MIXED = Family("lfm2_moe", ("Lfm2MoeForCausalLM",), mixture, mixture_names)
