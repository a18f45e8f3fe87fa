"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano (NVIDIA 2025): each layer is Mamba-2, attention, an MLP or experts.

Attention has no positions. MLPs and experts have no gate: a squared ReLU is between their two projections. Experts may
read and return a smaller projection of the hidden states (`moe_latent_size`, Nemotron 3 Super and Ultra). Heads for
several tokens (`mtp.`) are left alone. A time step is held to `time_step_limit`, as in the models' own code:
transformers 5.23 takes `time_step_min`, which is of the initialisation, for the lower limit (its pull request 48989).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.families.family import Family
from engine.families.mixtures import with_sigmoid_experts
from engine.families.reading import flag, integer, must_be, number, refuse, shape
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, StateSpace, WeightNames

PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLDER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
OLDER_FIELDS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
    "attention_head_dim": "head_dim",
}


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Nemotron-H config.json. Raises CheckpointError."""
    for older, field in OLDER_FIELDS.items():
        if config.get(older) is not None:
            must_be(config, field, config[older])
            config = {**config, field: config[older]}
    for field in ("attention_bias", "residual_in_fp32", "tie_word_embeddings", "mamba_proj_bias"):
        must_be(config, field, False)
    must_be(config, "mlp_hidden_act", "relu2")
    must_be(config, "sliding_window")
    kinds = _kinds(config)
    config = {"num_key_value_heads": 8, "intermediate_size": 21504, **config, "num_hidden_layers": len(kinds)}
    sizes = shape(config, head_dim=128)
    sizes["norm_eps"] = number(config, "layer_norm_epsilon", 1e-5)
    mixed = _layers(kinds, "moe")
    plain = ModelSpec(
        **sizes,
        ropes=(None,) * len(kinds),
        activation="relu2",
        gated_mlp=False,
        mlp_bias=flag(config, "mlp_bias"),
        attention_layers=_layers(kinds, "full_attention"),
        mlp_layers=_layers(kinds, "mlp", "moe"),
        recurrent_layers=_layers(kinds, "linear_attention"),
        recurrence=_recurrence(config),
    )
    return _with_experts(plain, config, mixed) if mixed else plain


def _layers(kinds: Sequence[str], *wanted: str) -> tuple[int, ...]:
    return tuple(index for index, kind in enumerate(kinds) if kind in wanted)


def _kinds(config: Json) -> list[str]:
    """Returns each layer's kind, by the names of transformers 5. A list counts more than a pattern of letters."""
    field = next((each for each in ("layers_block_type", "layer_types") if config.get(each) is not None), None)
    known: Sequence[str] = (*PATTERN.values(), *OLDER_KINDS)
    if field is None:
        field, known = "hybrid_override_pattern", tuple(PATTERN)
    given, count = config.get(field), config.get("num_hidden_layers")
    if not isinstance(given, list | str) or not set(given) <= set(known) or count not in (None, len(given)):
        accepted = f"of num_hidden_layers = {count}, each one of {', '.join(known)}"
        raise refuse(field, given, f"a pattern {accepted}" if known[0] in PATTERN else f"a list {accepted}")
    kinds = [PATTERN.get(kind, OLDER_KINDS.get(kind, kind)) for kind in given]
    if not {"linear_attention", "full_attention"} <= set(kinds):
        raise refuse(field, given, "one layer at least of Mamba-2 and one of attention")
    return kinds


def _recurrence(config: Json) -> StateSpace:
    must_be(config, "mamba_hidden_act", "silu")
    heads, groups = integer(config, "mamba_num_heads", 128), integer(config, "n_groups", 8)
    if heads % groups:
        raise refuse("mamba_num_heads", heads, f"a multiple of n_groups = {groups}")
    taps = integer(config, "conv_kernel", 4)
    if taps < 2:
        raise refuse("conv_kernel", taps, "at least 2")
    bias = flag(config, "use_bias")
    shortest, longest = _time_steps(config)
    return StateSpace(
        heads,
        integer(config, "mamba_head_dim", 64),
        groups,
        integer(config, "ssm_state_size", 128),
        taps,
        conv_bias=flag(config, "use_conv_bias", True),
        bias=bias,
        out_bias=bias,
        min_step=shortest,
        max_step=longest,
    )


def _time_steps(config: Json) -> tuple[float, float]:
    """Returns the limits of a token's time step. Infinity is an object in files of transformers 5."""
    given = config.get("time_step_limit")
    limits = (0.0, float("inf")) if given is None else given
    if isinstance(limits, list | tuple):
        limits = [float("inf") if each in ("Infinity", {"__float__": "Infinity"}) else each for each in limits]
    numbers = isinstance(limits, list | tuple) and all(type(each) in (int, float) for each in limits)
    if not numbers or len(limits) != 2 or not 0 <= limits[0] < limits[1]:
        raise refuse("time_step_limit", given, "a number of at least 0 and a larger one, or Infinity")
    return float(limits[0]), float(limits[1])


def _with_experts(plain: ModelSpec, config: Json, layers: tuple[int, ...]) -> ModelSpec:
    """Returns the model with experts in `layers`, routed as DeepSeek-V3's, and a shared one. Raises CheckpointError."""
    must_be(config, "mlp_bias", False)
    must_be(config, "n_shared_experts", 1)
    made = with_sigmoid_experts(plain, config, 7688, layers, scaling=1.0, count=8, per_token=2)
    assert made.experts is not None, "it is a mixture"
    shared = integer(config, "moe_shared_expert_intermediate_size", 7688)
    latent = 0 if config.get("moe_latent_size") is None else integer(config, "moe_latent_size")
    return replace(made, experts=replace(made.experts, shared_size=shared, latent_size=latent))


def names(config: Json) -> WeightNames:
    """A layer has one norm, whatever it is."""
    return WeightNames(
        root="backbone.",
        embedding="embeddings",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        o="mixer.o_proj",
        gate_up=("mixer.up_proj",),
        down="mixer.down_proj",
        recurrence="mixer.",
        router="mixer.gate",
        selection_bias="mixer.gate.e_score_correction_bias",
        shared_expert="mixer.shared_experts.",
        expert="mixer.experts.{index}.",
        expert_gate_up=("up_proj",),
        attention_pre_norm="norm",
        mlp_pre_norm="norm",
        norm="norm_f",
        ignored=("mtp.",),
    )


FAMILY = Family("nemotron_h", ("NemotronHForCausalLM",), spec, names)
