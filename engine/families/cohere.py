"""Cohere: attention and MLP side by side on one LayerNorm, pairs of neighbours, logits times a constant.

Cohere 2 (Command R7B, Command A) slides in three of four layers, and the fourth sees everything and has no positions.
Cohere 1 (Command R, Command R+, Aya) has positions everywhere, and a norm over query and key heads in its large models.
"""

from __future__ import annotations

from dataclasses import replace

from engine.families.family import Family
from engine.families.reading import activation, flag, integer, must_be, number, refuse, rope, shape, windows
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, WeightNames


def first_spec(config: Json) -> ModelSpec:
    """ModelSpec of a Cohere 1 config.json. Raises CheckpointError."""
    plain = _plain({"rope_theta": 500_000.0, **config})
    return replace(plain, qk_norm="heads" if flag(config, "use_qk_norm") else "none")


def second_spec(config: Json) -> ModelSpec:
    """ModelSpec of a Cohere 2 config.json. Raises CheckpointError."""
    must_be(config, "use_qk_norm", False)
    must_be(config, "order_of_interleaved_layers", "local_attn_first")
    plain = _plain(config)
    every = integer(config, "sliding_window_pattern", integer(config, "layer_switch", 4))
    slides = tuple((i + 1) % every != 0 for i in range(plain.layers))
    given = "sliding_window" in config and config["sliding_window"] is None
    each = windows(config, plain.layers, slides, None if given else integer(config, "sliding_window", 4096))
    return replace(plain, windows=each, ropes=tuple(None if window is None else plain.ropes[0] for window in each))


def _plain(config: Json) -> ModelSpec:
    for field, accepted in (
        ("use_parallel_block", True),
        ("use_gated_activation", True),
        ("position_embedding_type", "rope_gptj"),
        ("rotary_pct", 1.0),
    ):
        must_be(config, field, accepted)
    sizes = shape(config)
    sizes["norm_eps"] = number(config, "layer_norm_eps", 1e-5)
    scale = number(config, "logit_scale", 0.0625)
    if scale <= 0:
        raise refuse("logit_scale", scale, "a number above 0")
    bias = flag(config, "attention_bias")
    return ModelSpec(
        **sizes,
        ropes=(replace(rope(config, sizes["head_dim"]), neighbours=True),) * sizes["layers"],
        activation=activation(config, "hidden_act"),
        norm="layer",
        parallel=True,
        qkv_bias=bias,
        o_bias=bias,
        logits_scaling=1.0 / scale,
        tied_embeddings=flag(config, "tie_word_embeddings", True),
    )


def names(config: Json) -> WeightNames:
    """The norm before attention is the one before the MLP too."""
    return WeightNames(mlp_pre_norm="input_layernorm")


FAMILY = Family("cohere2", ("Cohere2ForCausalLM",), second_spec, names)
FIRST = Family("cohere", ("CohereForCausalLM",), first_spec, names)
