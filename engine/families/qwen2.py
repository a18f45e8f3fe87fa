"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values, and optional windows in the upper layers."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.reading import activation, flag, integer, rope, shape, windows
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec


def sliding_windows(config: Json, layers: int) -> tuple[int | None, ...]:
    """Qwen's rule: with `use_sliding_window`, the layers from `max_window_layers` on slide."""
    if not flag(config, "use_sliding_window") or config.get("sliding_window", 4096) is None:
        return (None,) * layers
    first = config.get("max_window_layers", 28)
    return windows(config, layers, tuple(i >= first for i in range(layers)), integer(config, "sliding_window", 4096))


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Qwen2 config.json. Raises CheckpointError."""
    sizes = shape(config)
    sizes["windows"] = sliding_windows(config, sizes["layers"])
    return ModelSpec(
        **sizes,
        ropes=(rope(config, sizes["head_dim"]),) * sizes["layers"],
        activation=activation(config, "hidden_act"),
        qkv_bias=True,
        tied_embeddings=flag(config, "tie_word_embeddings"),
    )


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), spec)
