"""Ministral 3: Llama on YaRN, whose queries grow with their position beyond the context of pre-training.

The text part of a checkpoint with vision (`Mistral3ForConditionalGeneration`) is run too; its images are not.
"""

from __future__ import annotations

from dataclasses import replace

from engine.errors import CheckpointError
from engine.families import mistral
from engine.families.family import Family
from engine.families.reading import flag, integer, number, refuse, text_part
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, WeightNames


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Ministral 3 config.json. Raises CheckpointError."""
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        raise refuse("rope_parameters", None, "an object, as the family's default of YaRN is not assumed")
    plain = mistral.spec({"sliding_window": None, "rms_norm_eps": 1e-5, **config})
    rotary = plain.ropes[0]
    assert rotary is not None, "every layer of Mistral has positions"
    beta, context = _query_scale(config)
    return replace(plain, ropes=(replace(rotary, query_beta=beta, query_context=context),) * plain.layers)


def _query_scale(config: Json) -> tuple[float, int]:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    beta = number(parameters, "llama_4_scaling_beta", 0.0)
    if beta < 0:
        raise refuse("rope_parameters.llama_4_scaling_beta", beta, "0 or more")
    return (beta, integer(parameters, "original_max_position_embeddings")) if beta else (0.0, 0)


def _text(config: Json) -> Json:
    text = config.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") not in ("ministral3", "mistral"):
        raise CheckpointError("config.json: text_config is missing, or its model_type is not ministral3 or mistral.")
    return text


def spec_with_vision(config: Json) -> ModelSpec:
    """ModelSpec of the text part of a config.json with vision. Raises CheckpointError."""
    text = {**_text(config), "tie_word_embeddings": flag(config, "tie_word_embeddings", True)}
    return spec(text) if text["model_type"] == "ministral3" else mistral.spec(text)


FAMILY = Family("ministral3", ("Ministral3ForCausalLM",), spec)
WITH_VISION = Family(
    "mistral3", ("Mistral3ForConditionalGeneration",), spec_with_vision, lambda config: text_part(WeightNames())
)
