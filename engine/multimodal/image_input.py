"""An image as a part of a sequence: its pixels, and the token ids that stand for it.

Each token of an image has an id beyond every vocabulary, made of the digest of the image and the token's offset in it
(SGLang's pad values). A sequence of ids is then all that prefix caches, forks, snapshots and journals need: two prompts
with other images have other block digests. Plain data; knows nothing of files or models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.errors import BadSnapshot

FIRST_IMAGE_ID = 1 << 62  # ids from here on are an image's; they fit a signed integer of 64 bits
MAX_IMAGE_TOKENS = 1 << 16
_OFFSET_BITS = 16
_CHUNK_BITS = 46  # of the digest in one id: any three ids in a row have all of it
_CHUNKS = 3
DIGEST_BYTES = 18


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ImageInput:
    """One processed image.

    `pixels` are `tiles` tiles of `size` pixels in height, RGB, uint8: (tiles, size, width, 3). They are squares, or the
    strips of an image that keeps its shape: see `columns_of`. `token_ids` is the image's part of a prompt: the marks
    around its tiles, and `features` placeholders, one for each row of the encoder's output.
    """

    digest: bytes
    tiles: int
    size: int
    features: int
    pixels: bytes
    token_ids: tuple[int, ...]


def columns_of(tiles: int, size: int, nbytes: int) -> int:
    """Returns the squares of `size` pixels a side in a tile, of an image whose pixels are so many bytes."""
    return nbytes // (3 * tiles * size * size)


def image_digest(pixels: bytes, tiles: int, size: int) -> bytes:
    """Returns the digest of an image's pixels and their shape, `DIGEST_BYTES` long."""
    return hashlib.blake2b(pixels, person=f"{tiles} x {size}".encode()[:16], digest_size=DIGEST_BYTES).digest()


def placeholder(digest: bytes, offset: int) -> int:
    """Returns the token id of the image's row `offset`, below `MAX_IMAGE_TOKENS`."""
    return lookup_keys(digest)[offset % _CHUNKS] << _OFFSET_BITS | offset


def lookup_keys(digest: bytes) -> tuple[int, ...]:
    """Returns the keys of an image: `key_of` of each of its ids is one of them."""
    bits, flag = int.from_bytes(digest, "little"), FIRST_IMAGE_ID >> _OFFSET_BITS
    return tuple(flag | (bits >> at * _CHUNK_BITS) & ((1 << _CHUNK_BITS) - 1) for at in range(_CHUNKS))


def key_of(token: int) -> int:
    """Returns the key by which an image is found from one of its ids."""
    return token >> _OFFSET_BITS


def offset_of(token: int) -> int:
    """Returns the row of its image that an id stands for."""
    return token & (MAX_IMAGE_TOKENS - 1)


def has_images(tokens: Sequence[int]) -> bool:
    """Returns whether a placeholder is among the tokens."""
    return bool(tokens) and max(tokens) >= FIRST_IMAGE_ID


def image_tokens(tokens: Iterable[int]) -> Iterator[int]:
    """Yields the placeholders among the tokens, in order."""
    return (token for token in tokens if token >= FIRST_IMAGE_ID)


@dataclass(slots=True)
class ImageSpans:
    """The places of images among a sequence's tokens: [start, end) of each run of consecutive rows of one image. They
    are found once, as the sequence grows."""

    _found: list[tuple[int, int]] = field(default_factory=list)
    _length: int = 0

    def among(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the spans, in order. After a cut `cut` comes first."""
        some = range(self._length, len(tokens) if has_images(tokens[self._length :]) else self._length)
        for at in some:
            token = tokens[at]
            if token < FIRST_IMAGE_ID:
                continue
            if self._found and self._found[-1][1] == at and follows(tokens[at - 1], token):
                self._found[-1] = self._found[-1][0], at + 1
            else:
                self._found.append((at, at + 1))
        self._length = len(tokens)
        return self._found

    def cut(self, length: int) -> None:
        """Forgets what lies beyond the first `length` tokens."""
        self._length = min(self._length, length)
        self._found = [(start, min(end, length)) for start, end in self._found if start < length]


def follows(before: int, token: int) -> bool:
    """Returns whether an id stands for the row after that of `before`, of the same image as far as both can say."""
    return offset_of(token) == offset_of(before) + 1


def without_images(tokens: Sequence[int]) -> Sequence[int]:
    """Returns the tokens that are of a vocabulary."""
    return [token for token in tokens if token < FIRST_IMAGE_ID] if has_images(tokens) else tokens


def restored_image(digest: bytes, tiles: int, size: int, pixels: bytes, features: int) -> ImageInput:
    """Returns an image of a snapshot; `features` rows stand for each square of it. Raises BadSnapshot where the pixels
    are not those of the digest."""
    if image_digest(pixels, tiles, size) != digest:
        raise BadSnapshot("The snapshot has an image that is not the one of its tokens; accepted: as it was made.")
    return ImageInput(digest, tiles, size, tiles * columns_of(tiles, size, len(pixels)) * features, pixels, ())
