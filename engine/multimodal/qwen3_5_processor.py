"""Image processing of Qwen3.5: a picture keeps its shape, and has a prompt token for each square of 2 x 2 patches.

Its definition is transformers' `Qwen2VLImageProcessor` and `Qwen3VLProcessor`: both edges are rounded to multiples of a
square, and the picture is scaled so that it has no more pixels than `longest_edge` and no fewer than `shortest_edge`
(which are areas, in spite of their names). Videos are not read. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import InvalidImage
from engine.model.loader import Json
from engine.multimodal.image_input import MAX_IMAGE_TOKENS, ImageInput, image_digest, placeholder
from engine.multimodal.processor_config import CLIP_MEAN, CLIP_STD, channels, pixels, read_settings, refused

if TYPE_CHECKING:
    from PIL.Image import Image  # Pillow is loaded with the first image

BEGIN, END, PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
MAX_RATIO = 200  # of a picture's edges
LOW_DETAIL_PIXELS = 512 * 512  # that a picture of low detail has at most, as OpenAI's has
_KINDS = ("Qwen2VLImageProcessor", "Qwen3VLImageProcessor")
_BICUBIC = 3  # Pillow's


@dataclass(frozen=True, slots=True)
class Qwen35ImageProcessor:
    """The settings of one checkpoint. `tile` is pixels a side of a square, for which one token stands.

    `scale`, `mean` and `std` normalise a byte: (byte * scale - mean) / std, for each of red, green and blue.
    """

    tile: int
    min_pixels: int
    max_pixels: int
    image_token_id: int
    begin_id: int
    end_id: int
    filter: int  # of Pillow, for scaling
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    features: int = 1
    mark: str = PAD
    around: str = PAD
    whole: bool = False

    @classmethod
    def load(cls, path: Path, config: Json) -> Qwen35ImageProcessor:
        """Reads the processor of a model directory whose config.json is `config`.

        Raises:
            CheckpointError: its files are missing, or of a processor that is not supported.
        """
        _, given = read_settings(path, _KINDS)
        vision = config.get("vision_config") or {}
        patch, merge = vision.get("patch_size", 16), vision.get("spatial_merge_size", 2)
        for field, value, usual in (("patch_size", patch, 14), ("merge_size", merge, 2)):
            if given.get(field, usual) != value:
                raise refused(field, given.get(field, usual), f"{value}, by config.json")
        size = given.get("size") or {}
        words = '{"shortest_edge": pixels of the smallest picture, "longest_edge": of the largest}'
        if not isinstance(size, dict):
            raise refused("size", size, words)
        least = pixels(given.get("min_pixels", size.get("shortest_edge", 56 * 56)), "size", words)
        most = pixels(given.get("max_pixels", size.get("longest_edge", 28 * 28 * 1280)), "size", words)
        if most < max(least, (patch * merge) ** 2):
            raise refused("size", size, f"at least {max(least, (patch * merge) ** 2)} pixels in the largest picture")
        return cls(
            patch * merge, least, most, int(config.get("image_token_id", 248_056)),
            int(config.get("vision_start_token_id", 248_053)), int(config.get("vision_end_token_id", 248_054)),
            int(given.get("resample", _BICUBIC)), float(given.get("rescale_factor", 1 / 255)),
            channels(given, "image_mean", CLIP_MEAN), channels(given, "image_std", CLIP_STD),
        )  # fmt: skip

    @property
    def tokens(self) -> dict[str, int]:
        return {BEGIN: self.begin_id, END: self.end_id, PAD: self.image_token_id}

    def process(self, image: Image, encode: Callable[[str], list[int]], *, split: bool = True) -> ImageInput:
        """Returns the strips of an RGB picture, each as high as a square, and its prompt tokens. Without `split` it has
        few of them: OpenAI's low detail.

        Raises:
            InvalidImage: one edge is too much longer than the other, or it has more tokens than an image may have.
        """
        width, height = self._scaled(*image.size, self.max_pixels if split else min(self.max_pixels, LOW_DETAIL_PIXELS))
        rows, columns = height // self.tile, width // self.tile
        if (count := rows * columns) > MAX_IMAGE_TOKENS:
            raise InvalidImage(f"The image has {count} tokens; accepted: at most {MAX_IMAGE_TOKENS}.")
        data = image.resize((width, height), self.filter).tobytes()
        digest = image_digest(data, rows, self.tile)
        return ImageInput(digest, rows, self.tile, count, data, tuple(placeholder(digest, at) for at in range(count)))

    def _scaled(self, width: int, height: int, most: int) -> tuple[int, int]:
        """Scales a size to multiples of a square, within the limits of pixels."""
        if max(width, height) > MAX_RATIO * min(width, height):
            raise InvalidImage(
                f"The image has {width} x {height} pixels; accepted: of one edge at most {MAX_RATIO} times the other."
            )
        side = self.tile
        high, wide = round(height / side) * side, round(width / side) * side
        least = min(self.min_pixels, most)
        if high * wide > most:
            by = math.sqrt(height * width / most)
            high, wide = (max(side, math.floor(each / by / side) * side) for each in (height, width))
        elif high * wide < least:
            by = math.sqrt(least / (height * width))
            high, wide = (math.ceil(each * by / side) * side for each in (height, width))
        return wide, high
