"""Checkpoints of any format that is read, as a configuration and weights. Knows formats, and nothing of models."""

from __future__ import annotations

from pathlib import Path

from engine.errors import CheckpointError
from engine.model.loader import Json, SafetensorsWeights, Weights, is_gguf, read_json
from engine.model.quantization.gguf_config import config_of
from engine.model.quantization.gguf_file import GgufFile


def read_config(place: Path) -> Json:
    """Returns the config.json of a place that `resolve` gave; of a GGUF file one that says the same.

    Raises:
        CheckpointError, UnsupportedArchitecture: the file is damaged, or has what is not read here.
    """
    return config_of(GgufFile(place)) if is_gguf(place) else read_json(place / "config.json")


def open_weights(place: Path) -> Weights:
    """Opens the weights of a place that `resolve` gave.

    Raises:
        CheckpointError, UnsupportedArchitecture: a file is missing or damaged, or has what is not read here.
    """
    if is_gguf(place):
        from engine.model.quantization.gguf_weights import GgufWeights  # with torch, which a client does without

        return GgufWeights(GgufFile(place))
    settings = quantization_of(place)
    if settings is None:
        return SafetensorsWeights(place)
    from engine.model.quantization.quantized_safetensors import QuantizedSafetensors

    return QuantizedSafetensors(place, settings)


def quantization_of(place: Path) -> Json | None:
    """Returns the quantization_config in a directory's config.json, if it has one.

    Raises:
        CheckpointError: it is not an object, or config.json cannot be read.
    """
    config = read_json(place / "config.json")
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if found and not isinstance(found, dict):
        raise CheckpointError(f"{place / 'config.json'}: quantization_config is {found!r}; an object is needed.")
    return found or None
