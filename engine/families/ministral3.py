"""Ministral 3: Llama on YaRN, whose queries grow with their position beyond the context of pre-training.

A checkpoint with vision (`Mistral3ForConditionalGeneration`, of Mistral Small 3.1, too) has Pixtral's encoder, whose
patches are merged to a token for each square of 2 x 2.
"""

from __future__ import annotations

from dataclasses import replace

from engine.errors import CheckpointError
from engine.families import mistral
from engine.families.family import Family
from engine.families.reading import activation, flag, integer, must_be, number, refuse, text_part
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, PixtralVisionSpec, WeightNames


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
    """ModelSpec of a config.json with vision. Raises CheckpointError."""
    text = {**_text(config), "tie_word_embeddings": flag(config, "tie_word_embeddings", True)}
    base = spec(text) if text["model_type"] == "ministral3" else mistral.spec(text)
    return replace(base, vision=_vision(config, base))


def _vision(config: Json, text: ModelSpec) -> PixtralVisionSpec | None:
    """Reads the encoder; None of a checkpoint without one."""
    vision = config.get("vision_config")
    if not vision:
        return None
    must_be(vision, "model_type", "pixtral")
    must_be(vision, "num_channels", 3)
    must_be(config, "vision_feature_layer", -1)
    rotary = vision.get("rope_parameters") or {}
    must_be(rotary, "rope_type", "axial", "default")
    hidden, heads = integer(vision, "hidden_size", 1024), integer(vision, "num_attention_heads", 16)
    if hidden % (4 * heads):
        raise refuse("vision_config.num_attention_heads", heads, f"heads of a multiple of 4 numbers, of {hidden}")
    must_be(vision, "head_dim", hidden // heads)
    token = integer(config, "image_token_index", 10)
    if token >= text.vocab_size:
        raise refuse("image_token_index", token, f"a token of the vocabulary, below {text.vocab_size}")
    return PixtralVisionSpec(
        hidden_size=hidden,
        layers=integer(vision, "num_hidden_layers", 24),
        heads=heads,
        intermediate_size=integer(vision, "intermediate_size", 4096),
        patch_size=integer(vision, "patch_size", 14),
        merge=integer(config, "spatial_merge_size", 2),
        image_token_id=token,
        activation=activation(vision, "hidden_act", default="gelu"),
        theta=number(rotary, "rope_theta", number(vision, "rope_theta", 10_000.0)),
        merge_eps=text.norm_eps,
        projector_activation=activation(config, "projector_hidden_act", default="gelu"),
        projector_bias=flag(config, "multimodal_projector_bias"),
    )


def names_with_vision(config: Json) -> WeightNames:
    """Llama's names, of the text part; the encoder lies beside it."""
    return replace(text_part(WeightNames()), vision="vision_tower.", connector="multi_modal_projector.")


FAMILY = Family("ministral3", ("Ministral3ForCausalLM",), spec)
WITH_VISION = Family("mistral3", ("Mistral3ForConditionalGeneration",), spec_with_vision, names_with_vision, sees=True)
