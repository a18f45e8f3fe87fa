"""The image processor of a checkpoint, found by its architecture. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.model.loader import Json
from engine.multimodal.gemma3_processor import Gemma3ImageProcessor
from engine.multimodal.gemma4_processor import Gemma4ImageProcessor
from engine.multimodal.image_input import ImageInput
from engine.multimodal.image_processor import ImageProcessor
from engine.multimodal.pixtral_processor import PixtralImageProcessor
from engine.multimodal.qwen3_5_processor import Qwen35ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image


class Processor(Protocol):
    """Makes tiles and prompt tokens of a picture. `features` rows stand for a square of a tile, and `image_token_id`
    is the token that a reader of a prompt is shown for each. `mark` is what the chat template writes for an image, and
    `around` the text that the model wants in its place: the mark in it becomes the image's tokens."""

    @property
    def features(self) -> int: ...

    @property
    def image_token_id(self) -> int: ...

    @property
    def whole(self) -> bool:
        """Returns whether an image's tokens attend to each other, so that a prompt has all of them or none."""
        ...

    @property
    def mark(self) -> str: ...

    @property
    def around(self) -> str: ...

    @property
    def tokens(self) -> Mapping[str, int]:
        """Returns the tokens that it writes, with the ids that the tokenizer has to have for them."""
        ...

    def process(self, image: Image, encode: Callable[[str], list[int]], *, split: bool = True) -> ImageInput:
        """Returns the processed picture. `encode` tokenizes text with its control tokens. Raises InvalidImage."""
        ...


_LOADERS: Mapping[str, Callable[[Path, Json], Processor]] = {
    "Gemma3ForConditionalGeneration": Gemma3ImageProcessor.load,
    "Gemma4ForConditionalGeneration": Gemma4ImageProcessor.load,
    "Mistral3ForConditionalGeneration": PixtralImageProcessor.load,
    "Qwen3_5ForConditionalGeneration": Qwen35ImageProcessor.load,
    "Qwen3_5MoeForConditionalGeneration": Qwen35ImageProcessor.load,
}


def load_processor(path: Path, config: Json) -> Processor:
    """Returns the processor of a model directory whose config.json is `config`.

    Raises:
        CheckpointError: its files are missing, or of a processor that is not supported.
    """
    architectures = config.get("architectures") or [""]
    return _LOADERS.get(architectures[0], ImageProcessor.load)(path, config)
