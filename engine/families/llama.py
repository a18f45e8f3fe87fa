"""Llama 2 and 3, and the many checkpoints of the same shape (SmolLM, TinyLlama, Yi).

Idefics3 (Laurençon et al. 2024) and SmolVLM are Llama over text and over images, which SigLIP encodes: the encoder's
rows of each tile are joined by pixel shuffle and projected to the width of the text model's embeddings.
"""

from __future__ import annotations

from dataclasses import replace

from engine.errors import CheckpointError
from engine.families.family import Family
from engine.families.reading import activation, flag, integer, must_be, number, refuse, rope, shape
from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, VisionSpec, WeightNames


def spec(config: Json) -> ModelSpec:
    """ModelSpec of a Llama config.json. Raises CheckpointError."""
    sizes = shape(config)
    bias = flag(config, "attention_bias")
    return ModelSpec(
        **sizes,
        ropes=(rope(config, sizes["head_dim"]),) * sizes["layers"],
        activation=activation(config, "hidden_act"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
        tied_embeddings=flag(config, "tie_word_embeddings"),
    )


def spec_with_vision(config: Json) -> ModelSpec:
    """ModelSpec of an Idefics3 or SmolVLM config.json. Raises CheckpointError."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json: a model with vision needs an object 'text_config'.")
    must_be(text, "model_type", "llama")
    tied = flag(config, "tie_word_embeddings")
    base = spec({"rms_norm_eps": 1e-5, **text, "tie_word_embeddings": tied})
    return replace(base, vision=_vision(config, base))


def _vision(config: Json, text: ModelSpec) -> VisionSpec:
    vision = config.get("vision_config") or {}
    must_be(vision, "num_channels", 3)
    hidden, heads = integer(vision, "hidden_size", 1152), integer(vision, "num_attention_heads", 16)
    if hidden % heads:
        raise refuse("vision_config.num_attention_heads", heads, f"a divisor of hidden_size = {hidden}")
    token = integer(config, "image_token_id", 128_257)
    if token >= text.vocab_size:
        raise refuse("image_token_id", token, f"a token of the vocabulary, below {text.vocab_size}")
    return VisionSpec(
        hidden_size=hidden,
        layers=integer(vision, "num_hidden_layers", 12),
        heads=heads,
        intermediate_size=integer(vision, "intermediate_size", 3072),
        image_size=integer(vision, "image_size", 224),
        patch_size=integer(vision, "patch_size", 32),
        pixel_shuffle=integer(config, "scale_factor", 2),
        image_token_id=token,
        activation=activation(vision, "hidden_act", default="gelu_pytorch_tanh"),
        norm_eps=number(vision, "layer_norm_eps", 1e-6),
    )


def names_with_vision(config: Json) -> WeightNames:
    """The text model lies beside the encoder."""
    return WeightNames(root="model.text_model.", ignored=("model.vision_model.", "model.connector."))


FAMILY = Family("llama", ("LlamaForCausalLM",), spec)
IDEFICS3 = Family("idefics3", ("Idefics3ForConditionalGeneration",), spec_with_vision, names_with_vision, sees=True)
SMOLVLM = Family("smolvlm", ("SmolVLMForConditionalGeneration",), spec_with_vision, names_with_vision, sees=True)
