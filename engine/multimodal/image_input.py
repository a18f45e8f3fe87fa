"""An image as a part of a sequence: its pixels, and the token ids that stand for it.

Each token of an image has an id beyond every vocabulary, made of the digest of the image and the token's offset in it
(SGLang's pad values). A sequence of ids is then all that prefix caches, forks, snapshots and journals need: two prompts
with other images have other block digests. Plain data; knows nothing of files or models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

FIRST_IMAGE_ID = 1 << 62  # ids from here on are an image's; they fit a signed integer of 64 bits
MAX_IMAGE_TOKENS = 1 << 16
_OFFSET_BITS = 16
_CHUNK_BITS = 46  # of the digest in one id: any three ids in a row have all of it
_CHUNKS = 3
DIGEST_BYTES = 18


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ImageInput:
    """One processed image.

    `pixels` are `tiles` square tiles of `size` pixels a side, RGB, uint8: (tiles, size, size, 3). `token_ids` is the
    image's part of a prompt: the marks around its tiles, and `features` placeholders, one for each row of the encoder's
    output.
    """

    digest: bytes
    tiles: int
    size: int
    features: int
    pixels: bytes
    token_ids: tuple[int, ...]


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


def without_images(tokens: Sequence[int]) -> Sequence[int]:
    """Returns the tokens that are of a vocabulary."""
    return [token for token in tokens if token < FIRST_IMAGE_ID] if has_images(tokens) else tokens
