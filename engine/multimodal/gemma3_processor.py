"""Image processing of Gemma 3: a picture becomes one square, and 256 prompt tokens between two marks.

Its definition is transformers' `Gemma3ImageProcessor` and `Gemma3Processor`: both edges are scaled to the size of the
encoder's images by Pillow's filter. Pan and scan, which adds crops of long pictures, is off there unless a caller asks
for it, and is left out here. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.model.loader import Json
from engine.multimodal.image_input import ImageInput, image_digest, placeholder
from engine.multimodal.processor_config import channels, read_settings, refused

if TYPE_CHECKING:
    from PIL.Image import Image  # Pillow is loaded with the first image

BEGIN, END, SOFT = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
_BILINEAR = 2  # Pillow's


@dataclass(frozen=True, slots=True)
class Gemma3ImageProcessor:
    """The settings of one checkpoint. `tile` is pixels a side; `features` tokens stand for an image.

    `scale`, `mean` and `std` normalise a byte: (byte * scale - mean) / std, for each of red, green and blue.
    """

    tile: int
    features: int
    image_token_id: int
    filter: int  # of Pillow, for scaling
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    begin_id: int
    end_id: int
    mark: str = BEGIN
    around: str = f"\n\n{BEGIN}\n\n"
    whole: bool = True

    @classmethod
    def load(cls, path: Path, config: Json) -> Gemma3ImageProcessor:
        """Reads the processor of a model directory whose config.json is `config`.

        Raises:
            CheckpointError: its files are missing, or of a processor that is not supported.
        """
        own, given = read_settings(path, ("Gemma3ImageProcessor",))
        if given.get("do_pan_and_scan"):
            raise refused("do_pan_and_scan", given["do_pan_and_scan"], "false: pictures are not cropped")
        tile = (config.get("vision_config") or {}).get("image_size", 224)
        size = given.get("size") or {"height": 224, "width": 224}
        if size != {"height": tile, "width": tile}:
            raise refused("size", size, f'{{"height": {tile}, "width": {tile}}}, the size of the encoder\'s images')
        features = config.get("mm_tokens_per_image", 256)
        if own.get("image_seq_length", features) != features:
            raise refused("image_seq_length", own["image_seq_length"], f"{features}, by config.json")
        return cls(
            tile, features, int(config.get("image_token_index", 262_144)), int(given.get("resample", _BILINEAR)),
            float(given.get("rescale_factor", 1 / 255)), channels(given, "image_mean"), channels(given, "image_std"),
            int(config.get("boi_token_index", 255_999)), int(config.get("eoi_token_index", 256_000)),
        )  # fmt: skip

    @property
    def tokens(self) -> dict[str, int]:
        return {BEGIN: self.begin_id, END: self.end_id, SOFT: self.image_token_id}

    def process(self, image: Image, encode: Callable[[str], list[int]], *, split: bool = True) -> ImageInput:
        """Returns the square of an RGB picture, and its prompt tokens: the same with `split` and without."""
        pixels = image.resize((self.tile, self.tile), self.filter).tobytes()
        digest = image_digest(pixels, 1, self.tile)
        rows = (placeholder(digest, at) for at in range(self.features))
        return ImageInput(digest, 1, self.tile, self.features, pixels, (self.begin_id, *rows, self.end_id))
