"""Image processing of Gemma 4: a picture keeps its shape, and has a prompt token for each square of pooled patches.

Its definition is transformers' `Gemma4ImageProcessor` and `Gemma4Processor`: the picture is scaled, up or down, to as
many squares as `max_soft_tokens` allows, and both edges are rounded down to whole ones. Videos and sounds are not read.
Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.model.loader import Json
from engine.multimodal.image_input import ImageInput, image_digest, placeholder
from engine.multimodal.processor_config import channels, read_settings, refused

if TYPE_CHECKING:
    from PIL.Image import Image  # Pillow is loaded with the first image

BEGIN, END, IMAGE = "<|image>", "<image|>", "<|image|>"
SOFT_TOKENS = (70, 140, 280, 560, 1120)  # of an image at most, that the models were trained with
_STEPS = ("do_resize", "do_rescale", "do_convert_rgb")
_BICUBIC = 3  # Pillow's


@dataclass(frozen=True, slots=True)
class Gemma4ImageProcessor:
    """The settings of one checkpoint. `tile` is pixels a side of a square, for which one token stands; an image has at
    most `max_tokens` of them.

    `scale`, `mean` and `std` normalise a byte: (byte * scale - mean) / std, for each of red, green and blue.
    """

    tile: int
    max_tokens: int
    image_token_id: int
    begin_id: int
    end_id: int
    filter: int  # of Pillow, for scaling
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    whole: bool
    features: int = 1
    mark: str = IMAGE
    around: str = IMAGE

    @classmethod
    def load(cls, path: Path, config: Json) -> Gemma4ImageProcessor:
        """Reads the processor of a model directory whose config.json is `config`.

        Raises:
            CheckpointError: its files are missing, or of a processor that is not supported.
        """
        _, given = read_settings(path, ("Gemma4ImageProcessor",), _STEPS)
        vision, text = config.get("vision_config") or {}, config.get("text_config") or {}
        patch, pool = vision.get("patch_size", 16), vision.get("pooling_kernel_size", 3)
        for field, value, usual in (("patch_size", patch, 16), ("pooling_kernel_size", pool, 3)):
            if given.get(field, usual) != value:
                raise refused(field, given.get(field, usual), f"{value}, by config.json")
        tokens, positions = given.get("max_soft_tokens", 280), vision.get("position_embedding_size", 10_240)
        accepted = [each for each in SOFT_TOKENS if each * pool <= positions]  # in a row or a column
        if tokens not in accepted:
            raise refused("max_soft_tokens", tokens, ", ".join(map(str, accepted)))
        normalises = given.get("do_normalize", False)
        mean = channels(given, "image_mean", (0.0, 0.0, 0.0)) if normalises else (0.0, 0.0, 0.0)
        std = channels(given, "image_std", (1.0, 1.0, 1.0)) if normalises else (1.0, 1.0, 1.0)
        return cls(
            patch * pool, tokens, int(config.get("image_token_id", 258_880)), int(config.get("boi_token_id", 255_999)),
            int(config.get("eoi_token_id", 258_882)), int(given.get("resample", _BICUBIC)),
            float(given.get("rescale_factor", 1 / 255)),
            tuple(each + width / 2 for each, width in zip(mean, std, strict=True)),  # the encoder's own 2 x - 1
            tuple(width / 2 for width in std), text.get("use_bidirectional_attention") == "vision",
        )  # fmt: skip

    @property
    def tokens(self) -> dict[str, int]:
        return {BEGIN: self.begin_id, END: self.end_id, IMAGE: self.image_token_id}

    def process(self, image: Image, encode: Callable[[str], list[int]], *, split: bool = True) -> ImageInput:
        """Returns the strips of an RGB picture, each as high as a square, and its prompt tokens. Without `split` it has
        the fewest that the models were trained with: OpenAI's low detail."""
        rows, columns = self._squares(*image.size, self.max_tokens if split else SOFT_TOKENS[0])
        data = image.resize((columns * self.tile, rows * self.tile), self.filter).tobytes()
        digest, count = image_digest(data, rows, self.tile), rows * columns
        ids = (placeholder(digest, at) for at in range(count))
        return ImageInput(digest, rows, self.tile, count, data, (self.begin_id, *ids, self.end_id))

    def _squares(self, width: int, height: int, most: int) -> tuple[int, int]:
        """Returns the rows and columns of at most so many squares that a picture is scaled to."""
        by = math.sqrt(most * self.tile**2 / (height * width))
        rows, columns = (math.floor(by * edge / self.tile) for edge in (height, width))
        if not rows:
            return 1, min(width // height, most)
        if not columns:
            return min(height // width, most), 1
        return rows, columns
