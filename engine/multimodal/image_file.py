"""Reads an image file of any origin as an upright RGB picture, or refuses it with a reason.

Formats are told by their bytes, whatever a client calls them. Sizes are read from the header and refused before a pixel
is decoded. Orientation (EXIF) is applied; all other metadata is left behind. Transparent pixels lie on white.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import InvalidImage

if TYPE_CHECKING:
    from PIL.Image import Image  # Pillow is loaded with the first image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N", "I")


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of one image file."""

    max_bytes: int = 20 << 20
    max_pixels: int = 40_000_000  # of its width times its height
    max_side: int = 65_500  # pixels: JPEG's own limit


LIMITS = ImageLimits()


def read_image(data: bytes, limits: ImageLimits = LIMITS) -> Image:
    """Returns the picture in `data`, the first frame of an animated one.

    Raises:
        InvalidImage: it is too large, of another format, damaged or cut short.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    accepted = "accepted: a PNG, JPEG, WebP or GIF file"
    if not data:
        raise InvalidImage(f"The image is empty; {accepted}.")
    if len(data) > limits.max_bytes:
        raise InvalidImage(f"The image has {len(data)} bytes; accepted: at most {limits.max_bytes}.")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > limits.max_pixels or max(width, height) > limits.max_side:
                raise InvalidImage(
                    f"The image has {width} x {height} pixels; accepted: at most {limits.max_pixels} in all and "
                    f"{limits.max_side} a side."
                )
            if width < 1 or height < 1:
                raise InvalidImage(f"The image has {width} x {height} pixels; accepted: at least 1 x 1.")
            opened.load()
            return _on_white(ImageOps.exif_transpose(opened))
    except InvalidImage:
        raise
    except UnidentifiedImageError:
        raise InvalidImage(f"The image's {len(data)} bytes are of no known format; {accepted}.") from None
    except Exception as error:  # Pillow's readers raise whatever their parsing fails with
        reason = str(error).rstrip(".") or type(error).__name__
        raise InvalidImage(f"The image cannot be read ({reason}); {accepted} that is whole.") from error


def _on_white(image: Image) -> Image:
    """Returns the picture in RGB; of 16 bits a channel, the upper 8."""
    from PIL import Image

    if image.mode in _SIXTEEN_BITS:
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if "A" in image.getbands() or "transparency" in image.info:
        layer = image.convert("RGBA")
        whole = Image.new("RGBA", layer.size, "white")
        whole.alpha_composite(layer)
        return whole.convert("RGB")
    return image.convert("RGB")
