"""Mistral: Llama with one sliding window for all layers, or none."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.reading import activation, flag, integer, must_be, rope, shape
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Mistral config.json. Raises CheckpointError."""
    must_be(config, "layer_types")  # mixed windows are Ministral's, another architecture
    sizes = shape(config)
    if config.get("sliding_window", 4096) is not None:
        sizes["windows"] = (integer(config, "sliding_window", 4096),) * sizes["layers"]
    return ModelSpec(
        **sizes,
        ropes=(rope(config, sizes["head_dim"]),) * sizes["layers"],
        activation=activation(config, "hidden_act"),
        tied_embeddings=flag(config, "tie_word_embeddings"),
    )


FAMILY = Family("mistral", ("MistralForCausalLM",), spec)
