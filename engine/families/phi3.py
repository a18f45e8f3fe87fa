"""Phi-3 and Phi-4-mini: joined projections, partial rotation, longrope."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.reading import activation, flag, integer, rope, shape
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, WeightNames


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Phi-3 config.json. Raises CheckpointError."""
    sizes = shape({"rms_norm_eps": 1e-5, **config})
    if config.get("sliding_window") is not None:
        sizes["windows"] = (integer(config, "sliding_window"),) * sizes["layers"]
    return ModelSpec(
        **sizes,
        ropes=(rope(config, sizes["head_dim"], partial=True),) * sizes["layers"],
        activation=activation(config, "hidden_act"),
        tied_embeddings=flag(config, "tie_word_embeddings"),
    )


def names(config: Json) -> WeightNames:
    """Phi-3 stores its projections joined."""
    return WeightNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


FAMILY = Family("phi3", ("Phi3ForCausalLM",), spec, names)
