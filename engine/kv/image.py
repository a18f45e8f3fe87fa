"""A block's keys and values as bytes that can be kept anywhere, and that say what they are.

An image is a header and the payload: the K/V of all layers as the pool has it. The header names the payload's layout
(the model, its dtype and shapes, by fingerprint), the block by its digest, and a checksum. Whatever does not fit is
refused: K/V is a cache, so the tokens are computed again. Knows nothing of files or devices.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.numerics import Numerics

Bytes = bytes | bytearray | memoryview

MAGIC = b"PonderKV"
VERSION = 1
_HEADER = struct.Struct("<8sI16s16sIQ")  # magic, version, layout, digest, CRC-32 of the payload, its bytes
HEADER_BYTES = _HEADER.size

# What of a configuration changes the keys and values of the same tokens, beside its numerics.
_TELLING = ("max_model_len", "block_size")
_SAMPLES = 64  # places of a weight file that are looked at
_SAMPLE_BYTES = 4096


class BadImage(Exception):
    """The bytes are no image of the block that is wanted; the message says why."""


def header(layout: bytes, digest: bytes, payload: Bytes) -> bytes:
    """What stands before a payload. `layout` and `digest` have 16 bytes."""
    return _HEADER.pack(MAGIC, VERSION, layout, digest, zlib.crc32(payload), memoryview(payload).nbytes)


def payload_of(image: Bytes, layout: bytes, digest: bytes, nbytes: int) -> memoryview:
    """The payload of an image, of `nbytes` bytes; a view.

    Raises:
        BadImage: it is cut short, damaged, or of another block, model or layout.
    """
    view = memoryview(image).cast("B")
    if len(view) < HEADER_BYTES:
        raise BadImage(f"it has {len(view)} bytes, and a header has {HEADER_BYTES}")
    magic, version, its_layout, its_digest, checksum, length = _HEADER.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise BadImage(f"it is no image of version {VERSION}")
    if its_layout != layout:
        raise BadImage("it is of another model, dtype or block size")
    if its_digest != digest:
        raise BadImage("it is of another block")
    payload = view[HEADER_BYTES:]
    if length != nbytes or len(payload) != nbytes:
        raise BadImage(f"it has {len(payload)} of {nbytes} bytes")
    if zlib.crc32(payload) != checksum:
        raise BadImage("its checksum is wrong")
    return payload


def layout_of(model: bytes, config: EngineConfig, numerics: Numerics, shape: Sequence[object]) -> bytes:
    """A fingerprint of how a model's K/V is computed and laid out, 16 bytes. `shape` is what says how a payload is to
    be read."""
    told = {each.name: getattr(config, each.name) for each in fields(config) if each.name in _TELLING}
    telling = (VERSION, sorted(told.items()), sorted(numerics.recorded().items()), *shape)
    return hashlib.blake2b(repr(telling).encode(), key=model, digest_size=16).digest()


def fingerprint(path: Path) -> bytes:
    """Of a model's files, 16 bytes.

    Weights are told apart by their sizes and by samples of their bytes: a fine-tune of the same shape differs in all of
    them.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as weights:
            for at in range(_SAMPLES):
                weights.seek(size * at // _SAMPLES)
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.digest()
