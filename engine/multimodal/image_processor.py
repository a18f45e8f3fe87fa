"""Image processing of Idefics3 and SmolVLM: a picture becomes square tiles, and the prompt tokens that mark them.

Its definition is transformers' `Idefics3ImageProcessor` and `Idefics3Processor`: the longest edge is scaled to
`size.longest_edge`, both edges are scaled up to multiples of a tile, and the picture is cut into tiles, followed by the
whole of it in the size of one. Pillow's filters are used, so the pixels are the reference's to the bit. Loads no torch:
a process that only serves has this part alone.
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
from engine.multimodal.processor_config import channels, read_settings, refused
from engine.multimodal.prompt_images import IMAGE

if TYPE_CHECKING:
    from PIL.Image import Image  # Pillow is loaded with the first image

MAX_SIDE = 4096  # pixels that no scaled edge exceeds
MAX_TILES = 6  # a side: the tokenizer's marks `<row_i_col_j>` end there
_PROCESSORS = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_pad")
FAKE, GLOBAL = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """The settings of one checkpoint. `longest_edge` and `tile` are pixels; `features` rows stand for a tile.

    `scale`, `mean` and `std` normalise a byte: (byte * scale - mean) / std, for each of red, green and blue.
    """

    longest_edge: int
    tile: int
    splits: bool
    features: int
    image_token_id: int
    filter: int  # of Pillow, for scaling
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mark: str = IMAGE
    around: str = IMAGE
    whole: bool = False

    @property
    def tokens(self) -> dict[str, int]:
        return {IMAGE: self.image_token_id}

    @classmethod
    def load(cls, path: Path, config: Json) -> ImageProcessor:
        """Reads the processor of a model directory whose config.json is `config`.

        Raises:
            CheckpointError: its files are missing, or of a processor that is not supported.
        """
        own, given = read_settings(path, _PROCESSORS, _STEPS, nulls=False)
        vision = config.get("vision_config") or {}
        tile = _longest_edge(given, "max_image_size", 364)
        patch, shuffle = vision.get("patch_size", 32), config.get("scale_factor", 2)
        if tile % patch or tile // patch % shuffle:
            raise refused("max_image_size", tile, f"a multiple of {patch * shuffle}, patches of the pixel shuffle")
        features = (tile // patch // shuffle) ** 2
        if own.get("image_seq_len", features) != features:
            raise refused("image_seq_len", own["image_seq_len"], f"{features}, by config.json")
        return cls(
            _longest_edge(given, "size", 4 * 364), tile, bool(given.get("do_image_splitting", True)), features,
            int(config.get("image_token_id", 128_257)), int(given.get("resample", 1)),
            float(given.get("rescale_factor", 1 / 255)), channels(given, "image_mean"), channels(given, "image_std"),
        )  # fmt: skip

    def process(self, image: Image, encode: Callable[[str], list[int]], *, split: bool = True) -> ImageInput:
        """Returns the tiles of an RGB picture, and its prompt tokens.

        `encode` tokenizes text with its control tokens. Without `split` the picture is one tile, whatever its size:
        OpenAI's low detail.

        Raises:
            InvalidImage: the picture has more tiles than there are marks, or than an image may have tokens.
        """
        tiles, rows, columns = self._tiles(image) if split and self.splits else ([self._whole(image)], 0, 0)
        count = len(tiles) * self.features
        if max(rows, columns) > MAX_TILES or count > MAX_IMAGE_TOKENS:
            raise InvalidImage(
                f"The image has {columns} x {rows} tiles of {self.tile} pixels; accepted: at most {MAX_TILES} a side."
            )
        pixels = b"".join(tile.tobytes() for tile in tiles)
        digest = image_digest(pixels, len(tiles), self.tile)
        offsets = iter(range(count))
        ids = tuple(
            placeholder(digest, next(offsets)) if id == self.image_token_id else id
            for id in encode(self._marked(rows, columns))
        )
        return ImageInput(digest, len(tiles), self.tile, count, pixels, ids)

    def _tiles(self, image: Image) -> tuple[list[Image], int, int]:
        """Returns the picture's tiles, row by row, and then all of it in one; and the numbers of rows and columns."""
        image = image.resize(_bounded(*_scaled(*image.size, self.longest_edge)), self.filter)
        image = image.resize(_in_tiles(*image.size, self.tile), self.filter)
        width, height = image.size
        if max(width, height) <= self.tile:
            return [image], 0, 0
        side, rows, columns = self.tile, height // self.tile, width // self.tile
        tiles = [
            image.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
            for row in range(rows)
            for column in range(columns)
        ]
        return [*tiles, image.resize((side, side), self.filter)], rows, columns

    def _whole(self, image: Image) -> Image:
        image = image.resize(_bounded(*_scaled(*image.size, self.longest_edge)), self.filter)
        return image.resize((self.tile, self.tile), self.filter)

    def _marked(self, rows: int, columns: int) -> str:
        """Returns the text that stands for an image: each tile after its mark, a row of tiles a line."""
        row_texts = (
            "".join(f"{FAKE}<row_{row}_col_{column}>{IMAGE * self.features}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        return "".join(row_texts) + ("\n" if rows else "") + f"{FAKE}{GLOBAL}{IMAGE * self.features}{FAKE}"


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """Scales a size so that its longer edge is `longest` and the other one even, at least 1."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    return max(width, 1), max(height, 1)


def _bounded(width: int, height: int) -> tuple[int, int]:
    """Scales a size down to at most `MAX_SIDE` a side."""
    ratio = width / height
    if width >= height and width > MAX_SIDE:
        width, height = MAX_SIDE, int(MAX_SIDE / ratio)
    elif height > width and height > MAX_SIDE:
        width, height = int(MAX_SIDE * ratio), MAX_SIDE
    return max(width, 1), max(height, 1)


def _in_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    """Scales a size up to multiples of a tile: the longer edge first, then the other at the same ratio."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return width, math.ceil(int(width / ratio) / tile) * tile
    height = math.ceil(height / tile) * tile
    return math.ceil(int(height * ratio) / tile) * tile, height


def _longest_edge(given: Json, field: str, default: int) -> int:
    value = given.get(field)
    edge = default if value is None else value.get("longest_edge") if isinstance(value, dict) else None
    if not isinstance(edge, int) or isinstance(edge, bool) or edge < 1:
        raise refused(field, value, '{"longest_edge": pixels}')
    return edge
