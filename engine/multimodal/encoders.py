"""The encoder of a checkpoint's images, found by its architecture."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

import torch
from torch import Tensor

from engine.model.loader import Weights
from engine.model.model_spec import GridVisionSpec, ModelSpec, PixtralVisionSpec, PooledVisionSpec, WeightNames
from engine.multimodal.gemma3_encoder import Gemma3Encoder
from engine.multimodal.gemma3_processor import Gemma3ImageProcessor
from engine.multimodal.gemma4_encoder import Gemma4Encoder
from engine.multimodal.gemma4_processor import Gemma4ImageProcessor
from engine.multimodal.image_processor import ImageProcessor
from engine.multimodal.pixtral_encoder import PixtralEncoder
from engine.multimodal.pixtral_processor import PixtralImageProcessor
from engine.multimodal.processors import Processor
from engine.multimodal.qwen3_5_encoder import Qwen35Encoder
from engine.multimodal.qwen3_5_processor import Qwen35ImageProcessor
from engine.multimodal.vision_encoder import VisionEncoder


class ImageEncoder(Protocol):
    """An encoder, loaded. A square of a tile has `features` rows of `hidden_size` numbers. `whole_tokens`: see
    `VisionSpec`."""

    features: int
    planar: bool  # the tokens of an image have rows and columns in the text model, too
    hidden_size: int
    whole_tokens: int
    dtype: torch.dtype
    device: torch.device

    def encode(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Encodes an image (tiles, size, width, 3) uint8, and yields after each unit of work. Returns its rows."""
        ...


def load_encoder(
    spec: ModelSpec,
    names: WeightNames,
    weights: Weights,
    processor: Processor,
    dtype: torch.dtype,
    device: torch.device,
) -> ImageEncoder:
    """Loads the encoder of `spec.vision`.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """
    assert spec.vision is not None, "the model reads images"
    if isinstance(spec.vision, GridVisionSpec):
        assert isinstance(processor, Qwen35ImageProcessor), "of one checkpoint"
        return Qwen35Encoder(spec.vision, names, weights, processor, spec.hidden_size, dtype, device)
    if isinstance(spec.vision, PooledVisionSpec):
        assert isinstance(processor, Gemma4ImageProcessor), "of one checkpoint"
        return Gemma4Encoder(spec.vision, names, weights, processor, spec.hidden_size, dtype, device)
    if isinstance(spec.vision, PixtralVisionSpec):
        assert isinstance(processor, PixtralImageProcessor), "of one checkpoint"
        return PixtralEncoder(spec.vision, names, weights, processor, spec.hidden_size, dtype, device)
    assert isinstance(processor, ImageProcessor | Gemma3ImageProcessor), "of one checkpoint"
    encoder = Gemma3Encoder if spec.vision.averaged else VisionEncoder
    return encoder(spec.vision, names, weights, processor, spec.hidden_size, dtype, device)
