"""Multi-head latent attention with shared experts: DeepSeek-V2, DeepSeek-V3 (and Kimi K2), GLM-4.7-Flash.

Experts of V2 are chosen by their softmax, those of V3 by their sigmoid and a bias, both within the best groups of them.
GLM-4.7-Flash is V3 with its own list of dense layers.
"""

from __future__ import annotations

from dataclasses import replace

from engine.families.family import Family
from engine.families.mixtures import shared_names, with_experts, with_groups, with_sigmoid_experts
from engine.families.reading import activation, flag, integer, must_be, number, optional_number, refuse, rope, shape
from engine.model.loader import Json
from engine.model.model_spec import Latent, ModelSpec, Rope
from engine.model.rope import yarn_mscale

ROUTINGS = ("greedy", "group_limited_greedy")


def v2_spec(config: Json) -> ModelSpec:
    """ModelSpec of a DeepSeek-V2 config.json. Raises CheckpointError."""
    must_be(config, "scoring_func", "softmax")
    must_be(config, "norm_topk_prob", False)
    plain = _dense(config, neighbours=True)
    routing = config.get("topk_method") or "greedy"
    if routing not in ROUTINGS:
        raise refuse("topk_method", routing, " or ".join(ROUTINGS))
    layers = tuple(range(integer(config, "first_k_dense_replace", 0, minimum=0), plain.layers))
    made = with_experts(
        plain,
        config,
        integer(config, "moe_intermediate_size", 1407),
        layers,
        count=64,
        normalised=False,
        scaling=number(config, "routed_scaling_factor", 1.0),
        shared=integer(config, "n_shared_experts", 2),
    )
    return with_groups(made, config, summed=1) if routing == "group_limited_greedy" else made


def v3_spec(config: Json) -> ModelSpec:
    """ModelSpec of a DeepSeek-V3 config.json. Raises CheckpointError."""
    plain = _dense(config, neighbours=flag(config, "rope_interleave", True))
    config = {"n_group": 8, "topk_group": 4, **config}
    layers = tuple(range(integer(config, "first_k_dense_replace", 3, minimum=0), plain.layers))
    return with_sigmoid_experts(plain, config, 2048, layers, count=256, scaling=2.5)


def glm_flash_spec(config: Json) -> ModelSpec:
    """ModelSpec of a GLM-4.7-Flash config.json. Raises CheckpointError."""
    config = {"rms_norm_eps": 1e-5, **config}
    plain = _dense(config, neighbours=flag(config, "rope_interleave", True))
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        must_be(config, "first_k_dense_replace", 1)
        kinds = ["dense"] + ["sparse"] * (plain.layers - 1)
    if not isinstance(kinds, list) or len(kinds) != plain.layers or not set(kinds) <= {"dense", "sparse"}:
        raise refuse("mlp_layer_types", kinds, f"a list of {plain.layers}, each dense or sparse")
    layers = tuple(index for index, kind in enumerate(kinds) if kind == "sparse")
    return with_sigmoid_experts(plain, config, 1536, layers, count=64, per_token=4, scaling=1.8)


def _dense(config: Json, *, neighbours: bool) -> ModelSpec:
    """Returns the model with an MLP in every layer."""
    must_be(config, "mlp_bias", False)
    must_be(config, "moe_layer_freq", 1)
    heads = integer(config, "num_attention_heads")
    latent = Latent(
        rank=integer(config, "kv_lora_rank", 512),
        query_rank=None if config.get("q_lora_rank") is None else integer(config, "q_lora_rank"),
        nope_dim=integer(config, "qk_nope_head_dim", 128),
        rope_dim=integer(config, "qk_rope_head_dim", 64),
        value_dim=integer(config, "v_head_dim", 128),
    )
    for field, width in (
        ("kv_lora_rank", latent.rank),
        ("q_lora_rank", latent.query_rank or 2),
        ("qk_nope_head_dim", latent.nope_dim),
    ):
        if width % 2:
            raise refuse(field, width, "an even number")
    sizes = shape({**config, "head_dim": latent.rope_dim, "num_key_value_heads": heads})
    rotary = replace(rope(config, latent.rope_dim), neighbours=neighbours)
    sizes |= {
        "kv_heads": 1,
        "head_dim": latent.rank + latent.rope_dim,
        "attention_scale": (latent.nope_dim + latent.rope_dim) ** -0.5 * _temperature(config, rotary),
    }
    bias = flag(config, "attention_bias")
    return ModelSpec(
        **sizes,
        ropes=(rotary,) * sizes["layers"],
        activation=activation(config, "hidden_act"),
        qkv_bias=bias,
        o_bias=bias,
        tied_embeddings=flag(config, "tie_word_embeddings"),
        latent=latent,
    )


def _temperature(config: Json, rotary: Rope) -> float:
    """Returns the factor of the scores with a stretched rope: twice `mscale_all_dim`'s, for queries and for keys."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    mscale = optional_number(parameters, "mscale_all_dim")
    if rotary.kind == "default" or not mscale:
        return 1.0
    return yarn_mscale(number(parameters, "factor"), mscale) ** 2


FAMILIES = (
    Family("deepseek_v2", ("DeepseekV2ForCausalLM",), v2_spec, shared_names),
    Family("deepseek_v3", ("DeepseekV3ForCausalLM",), v3_spec, shared_names),
    Family("glm4_moe_lite", ("Glm4MoeLiteForCausalLM",), glm_flash_spec, shared_names),
)
