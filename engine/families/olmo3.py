"""OLMo 3: OLMo 2 with three sliding layers to one that sees everything, which alone stretches its rope."""

from __future__ import annotations

from dataclasses import replace

from engine.families import olmo2
from engine.families.family import Family
from engine.families.reading import integer, rope, windows
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, Rope

THETA = 500_000.0


def spec(config: Json) -> ModelSpec:
    """ModelSpec of an OLMo 3 config.json. Raises CheckpointError."""
    plain = olmo2.spec({"rope_theta": THETA, **config})
    layers, head_dim = plain.layers, plain.head_dim
    slides = windows(config, layers, tuple((i + 1) % 4 != 0 for i in range(layers)), _window(config))
    everywhere = rope(config, head_dim, theta=THETA, layer_type="full_attention")
    nested = (config.get("rope_parameters") or {}).get("sliding_attention")
    local = (
        Rope(head_dim, everywhere.theta)
        if nested is None
        else rope({**config, "rope_parameters": nested}, head_dim, theta=THETA)
    )
    return replace(plain, windows=slides, ropes=tuple(everywhere if each is None else local for each in slides))


def _window(config: Json) -> int | None:
    given = "sliding_window" in config and config["sliding_window"] is None
    return None if given else integer(config, "sliding_window", 4096)


FAMILY = Family("olmo3", ("Olmo3ForCausalLM",), spec, olmo2.names)
