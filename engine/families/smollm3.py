"""SmolLM3: Llama in which every fourth layer has no positions (NoPE)."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.reading import activation, flag, integer, refuse, rope, shape, windows
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a SmolLM3 config.json. Raises CheckpointError."""
    sizes = shape(config)
    layers = sizes["layers"]
    every = integer(config, "no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers")  # despite its name, 1 means that the layer rotates
    if rotates is None:
        rotates = [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(rotates, list) or len(rotates) < layers:
        raise refuse("no_rope_layers", rotates, f"a list of {layers}")
    if flag(config, "use_sliding_window"):
        window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
        slides = tuple(window is not None and not rotates[i] for i in range(layers))
        sizes["windows"] = windows(config, layers, slides, window)
    rotary = rope(config, sizes["head_dim"], theta=2_000_000.0)
    bias = flag(config, "attention_bias")
    return ModelSpec(
        **sizes,
        ropes=tuple(rotary if rotates[i] else None for i in range(layers)),
        activation=activation(config, "hidden_act"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
        tied_embeddings=flag(config, "tie_word_embeddings", True),
    )


FAMILY = Family("smollm3", ("SmolLM3ForCausalLM",), spec)
