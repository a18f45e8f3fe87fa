"""Image processing of Pixtral, as Mistral 3 has it: a picture keeps its shape, and has a prompt token for each square
of merged patches, with a mark after each row of them.

Its definition is transformers' `PixtralImageProcessor` and `PixtralProcessor`: a picture whose longer edge is above
`longest_edge` is scaled down to it, and both edges are then rounded up to whole squares. Loads no torch.
"""

from __future__ import annotations

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

IMAGE, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
LOW_DETAIL_EDGE = 512  # pixels that the longer edge has at most in low detail, as OpenAI's has
_BICUBIC = 3  # Pillow's


@dataclass(frozen=True, slots=True)
class PixtralImageProcessor:
    """The settings of one checkpoint. `tile` is pixels a side of a square, for which one token stands.

    `scale`, `mean` and `std` normalise a byte: (byte * scale - mean) / std, for each of red, green and blue.
    """

    tile: int
    longest_edge: int
    image_token_id: int
    filter: int  # of Pillow, for scaling
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    features: int = 1
    mark: str = IMAGE
    around: str = IMAGE
    whole: bool = False

    @classmethod
    def load(cls, path: Path, config: Json) -> PixtralImageProcessor:
        """Reads the processor of a model directory whose config.json is `config`.

        Raises:
            CheckpointError: its files are missing, or of a processor that is not supported.
        """
        own, given = read_settings(path, ("PixtralImageProcessor",))
        patch = (config.get("vision_config") or {}).get("patch_size", 14)
        merge = config.get("spatial_merge_size", 2)
        for field, value in (("patch_size", patch), ("spatial_merge_size", merge)):
            if own.get(field, value) != value:
                raise refused(field, own[field], f"{value}, by config.json")
        if given.get("do_center_crop"):
            raise refused("do_center_crop", given["do_center_crop"], "false: pictures are not cropped")
        size, words = given.get("size", {"longest_edge": 1024}), '{"longest_edge": pixels}'
        longest = pixels(size.get("longest_edge") if isinstance(size, dict) else None, "size", words)
        return cls(
            patch * merge, longest, int(config.get("image_token_index", 10)), int(given.get("resample", _BICUBIC)),
            float(given.get("rescale_factor", 1 / 255)), channels(given, "image_mean", CLIP_MEAN),
            channels(given, "image_std", CLIP_STD),
        )  # fmt: skip

    @property
    def tokens(self) -> dict[str, int]:
        return {IMAGE: self.image_token_id}

    def process(self, image: Image, encode: Callable[[str], list[int]], *, split: bool = True) -> ImageInput:
        """Returns the strips of an RGB picture, each as high as a square, and its prompt tokens. Without `split` it has
        few of them: OpenAI's low detail.

        Raises:
            InvalidImage: it has more tokens than an image may have.
        """
        longest = self.longest_edge if split else min(self.longest_edge, LOW_DETAIL_EDGE)
        rows, columns = self._squares(*image.size, longest)
        if (count := rows * columns) > MAX_IMAGE_TOKENS:
            raise InvalidImage(f"The image has {count} tokens; accepted: at most {MAX_IMAGE_TOKENS}.")
        data = image.resize((columns * self.tile, rows * self.tile), self.filter).tobytes()
        digest, offsets = image_digest(data, rows, self.tile), iter(range(count))
        text = BREAK.join([IMAGE * columns] * rows) + END
        ids = tuple(placeholder(digest, next(offsets)) if id == self.image_token_id else id for id in encode(text))
        return ImageInput(digest, rows, self.tile, count, data, ids)

    def _squares(self, width: int, height: int, longest: int) -> tuple[int, int]:
        """Returns the rows and columns of squares that a picture is scaled to; one where an edge would vanish."""
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = int(height / ratio), int(width / ratio)
        return max(1, -(-height // self.tile)), max(1, -(-width // self.tile))
