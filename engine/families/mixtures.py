"""Mixtures of experts: Qwen2-MoE, Qwen3-MoE, Mixtral, OLMoE, ERNIE 4.5 and gpt-oss.

All but the last are Qwen 2, Qwen 3, Mistral and Llama with experts for MLPs; Qwen2-MoE and ERNIE have shared ones, too.
gpt-oss has biases throughout, attention sinks, and every other layer sliding; its experts lie in one tensor a layer,
(experts, in, out), or as MXFP4 in `_blocks` and `_scales`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.families import llama, mistral, qwen2, qwen3
from engine.families.family import Family
from engine.families.reading import flag, integer, must_be, number, refuse, rope, shape, windows
from engine.model.loader import Json
from engine.model.model_spec import ClampedSwiGLU, ExpertGroups, Experts, ModelSpec, WeightNames

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}  # of gpt-oss, where its configuration has none


def qwen3_moe(config: Json) -> ModelSpec:
    """ModelSpec of a Qwen3-MoE config.json. Raises CheckpointError."""
    width, normalised = integer(config, "moe_intermediate_size", 768), flag(config, "norm_topk_prob")
    return with_experts(qwen3.spec(config), config, width, _sparse_layers(config), normalised=normalised)


def qwen2_moe(config: Json) -> ModelSpec:
    """ModelSpec of a Qwen2-MoE config.json. Raises CheckpointError."""
    plain = replace(qwen2.spec({**config, "use_sliding_window": False}), qkv_bias=flag(config, "qkv_bias", True))
    if flag(config, "use_sliding_window"):
        last = integer(config, "max_window_layers", 28, minimum=0)
        slides = tuple(i % 2 == 0 and i < last for i in range(plain.layers))
        window = integer(config, "sliding_window", 4096)
        plain = replace(plain, windows=windows(config, plain.layers, slides, window))
    made = with_experts(
        plain,
        config,
        integer(config, "moe_intermediate_size", 1408),
        _sparse_layers(config),
        count=60,
        per_token=4,
        normalised=flag(config, "norm_topk_prob"),
        shared_gate=True,
    )
    assert made.experts is not None
    shared = integer(config, "shared_expert_intermediate_size", 5632)
    return replace(made, experts=replace(made.experts, shared_size=shared))


def _sparse_layers(config: Json) -> tuple[int, ...]:
    """Returns the layers with experts, as Qwen's configurations list them."""
    layers, step = integer(config, "num_hidden_layers"), integer(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(each, int) for each in dense):
        raise refuse("mlp_only_layers", dense, "a list of layers' numbers")
    return tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in dense)


def ernie(config: Json) -> ModelSpec:
    """ModelSpec of an ERNIE 4.5 config.json, of a mixture of text alone. Raises CheckpointError."""
    must_be(config, "use_bias", False)
    config = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True, **config}
    plain = llama.spec(config)
    plain = replace(plain, ropes=tuple(rope and replace(rope, neighbours=True) for rope in plain.ropes))
    interval, end = integer(config, "moe_layer_interval", 1), integer(config, "moe_layer_end_index", -1, minimum=-1)
    first, last = integer(config, "moe_layer_start_index", 1, minimum=0), plain.layers - 1 if end == -1 else end
    return with_experts(
        plain,
        {"num_experts": config.get("moe_num_experts"), "num_experts_per_tok": config.get("moe_k"), **config},
        integer(config, "moe_intermediate_size", 1536),
        tuple(i for i in range(plain.layers) if (i + 1) % interval == 0 and first <= i <= last),
        count=64,
        per_token=6,
        shared=integer(config, "moe_num_shared_experts", 2, minimum=0),
        selection_bias=True,
    )


def mixtral(config: Json) -> ModelSpec:
    """ModelSpec of a Mixtral config.json. Raises CheckpointError."""
    plain = mistral.spec({"sliding_window": None, "rms_norm_eps": 1e-5, **config})
    return with_experts(plain, config, plain.intermediate_size, tuple(range(plain.layers)), count=8, per_token=2)


def olmoe(config: Json) -> ModelSpec:
    """ModelSpec of an OLMoE config.json. Raises CheckpointError."""
    must_be(config, "clip_qkv")
    plain = replace(llama.spec({"rms_norm_eps": 1e-5, **config}), qk_norm="projection")
    mixed, normalised = tuple(range(plain.layers)), flag(config, "norm_topk_prob")
    return with_experts(plain, config, plain.intermediate_size, mixed, normalised=normalised, count=64)


def gpt_oss(config: Json) -> ModelSpec:
    """ModelSpec of a gpt-oss config.json. Raises CheckpointError."""
    must_be(config, "hidden_act", "silu")
    config = {"rms_norm_eps": 1e-5, **config}
    sizes = shape(config, head_dim=64)
    layers, scaling = sizes["layers"], config.get("rope_parameters") or config.get("rope_scaling") or YARN
    slides = tuple(index % 2 == 0 for index in range(layers))
    sizes["windows"] = windows(config, layers, slides, integer(config, "sliding_window", 128))
    limit = number(config, "swiglu_limit", 7.0)
    if limit <= 0:
        raise refuse("swiglu_limit", limit, "a number above 0")
    bias = flag(config, "attention_bias", True)
    plain = ModelSpec(
        **sizes,
        ropes=(rope({**config, "rope_parameters": scaling}, sizes["head_dim"], theta=150_000.0),) * layers,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        sinks=True,
        tied_embeddings=flag(config, "tie_word_embeddings"),
    )
    gate = ClampedSwiGLU(number(config, "swiglu_alpha", 1.702), limit)
    return with_experts(
        plain,
        config,
        plain.intermediate_size,
        tuple(range(layers)),
        per_token=integer(config, "experts_per_token", 4),
        router_bias=True,
        gate=gate,
    )


def with_experts(
    plain: ModelSpec,
    config: Json,
    width: int,
    layers: tuple[int, ...],
    *,
    count: int = 128,
    per_token: int = 8,
    shared: int = 0,
    **fields: Any,  # of Experts
) -> ModelSpec:
    """Returns the model with experts of `width` in `layers`, and `shared` more in one. Raises CheckpointError."""
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        count = integer(config, field, count)
    per_token = integer(config, "num_experts_per_tok", per_token)
    if per_token > count:
        raise refuse("num_experts_per_tok", per_token, f"at most the {count} experts that there are")
    return replace(plain, experts=Experts(count, per_token, width, layers, shared_size=shared * width, **fields))


def with_sigmoid_experts(
    plain: ModelSpec, config: Json, width: int, layers: tuple[int, ...], *, scaling: float, **defaults: int
) -> ModelSpec:
    """Returns the model with DeepSeek-V3's routing (section 2.1.2) and shared experts. Raises CheckpointError."""
    must_be(config, "scoring_func", "sigmoid")
    must_be(config, "topk_method", "noaux_tc")
    made = with_experts(
        plain,
        config,
        integer(config, "moe_intermediate_size", width),
        layers,
        shared=integer(config, "n_shared_experts", 1),
        scores="sigmoid",
        normalised=flag(config, "norm_topk_prob", True),
        scaling=number(config, "routed_scaling_factor", scaling),
        selection_bias=True,
        **defaults,
    )
    return with_groups(made, config, summed=2)


def with_groups(mixed: ModelSpec, config: Json, *, summed: int) -> ModelSpec:
    """Returns the mixture with its experts chosen from the best groups. Raises CheckpointError."""
    experts, count = mixed.experts, integer(config, "n_group", 1)
    assert experts is not None, "it is a mixture"
    per_token, size = integer(config, "topk_group", 1), experts.count // count
    if experts.count % count or size < summed:
        raise refuse("n_group", count, f"a divisor of the {experts.count} experts that leaves {summed} to each")
    if per_token > count or per_token * size < experts.per_token:
        raise refuse("topk_group", per_token, f"at most n_group = {count}, with {experts.per_token} experts in them")
    if count == 1:
        return mixed
    return replace(mixed, experts=replace(experts, groups=ExpertGroups(count, per_token, summed)))


def shared_names(config: Json) -> WeightNames:
    """Layers of multi-token prediction, which follow the others in a checkpoint, are left alone."""
    return WeightNames(ignored=(f"model.layers.{integer(config, 'num_hidden_layers')}.",))


def mixtral_names(config: Json) -> WeightNames:
    """The mixture has names of its own."""
    return WeightNames(
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{index}.",
        expert_gate_up=("w1", "w3"),
        expert_down="w2",
    )


def qwen2_moe_names(config: Json) -> WeightNames:
    """There is one shared expert."""
    return WeightNames(shared_expert="mlp.shared_expert.")


def ernie_names(config: Json) -> WeightNames:
    """The selection's bias has a place of its own, and multi-token prediction is left alone."""
    bias = "mlp.moe_statics.e_score_correction_bias"
    return WeightNames(selection_bias=bias, selection_bias_rows=True, ignored=("model.mtp_",))


def gpt_oss_names(config: Json) -> WeightNames:
    """The router and the stacked experts have names of their own."""
    return WeightNames(router="mlp.router", stacked_experts="mlp.experts.")


FAMILIES = (
    Family("qwen2_moe", ("Qwen2MoeForCausalLM",), qwen2_moe, qwen2_moe_names),
    Family("qwen3_moe", ("Qwen3MoeForCausalLM",), qwen3_moe, qwen3.FAMILY.names),
    Family("mixtral", ("MixtralForCausalLM",), mixtral, mixtral_names),
    Family("olmoe", ("OlmoeForCausalLM",), olmoe),
    Family("ernie4_5_moe", ("Ernie4_5_MoeForCausalLM",), ernie, ernie_names),
    Family("gpt_oss", ("GptOssForCausalLM",), gpt_oss, gpt_oss_names),
)
