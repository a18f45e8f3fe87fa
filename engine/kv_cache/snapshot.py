"""Snapshots of sequences, and the header by which any K/V image is checked.

A snapshot has a sequence's tokens, its images and the state of its sampling, to resume in another engine of the same
model. Its K/V stays in the tiers' files, found by the tokens. Bytes that are damaged, cut short or of another model are
refused as a whole: tokens must be right. An image of a block is a header and the payload, the K/V of all layers as the
pool has it.
The header has the fingerprint of the layout (model, dtype, shapes), the block's digest and a checksum; an image that
does not fit is refused, and its tokens are recomputed. msgspec is imported where it is used: an engine that takes no
snapshots runs without it.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import BadSnapshot

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.model.numerics import Numerics


MAGIC = b"PonderSq"
VERSION = 1  # of images of blocks
SNAPSHOT_VERSION = 3
_HEADER = struct.Struct("<8sIIQ")  # magic, version, CRC-32 of the body, its bytes
_ACCEPTED = "accepted: what `snapshot` gave for a sequence of this model"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Snapshot of one sequence. `tail`: tokens that had K/V. `stream` and `forks` key the sampling; `generated` has a
    byte for each token."""

    tenant: str
    priority: int
    tokens: tuple[int, ...]
    generated: bytes
    stream: int
    forks: int
    tail: int
    images: tuple[SavedImage, ...] = ()
    adapter: tuple[str, str] = ("", "")  # its name, and the digest of its files


SavedImage = tuple[bytes, int, int, bytes]  # an image's digest, tiles, size and pixels
# The model's fingerprint, then the fields of `Snapshot`; tokens as int64, little-endian.
_Written = tuple[bytes, str, int, bytes, bytes, int, int, int, tuple[SavedImage, ...], tuple[str, str]]
_WrittenBefore = tuple[bytes, str, int, bytes, bytes, int, int, int, tuple[SavedImage, ...]]  # version 2: no adapters


def packed(snapshot: Snapshot, model: bytes) -> bytes:
    """Encodes a snapshot. `model` is the fingerprint of the model's files."""
    import msgspec

    written: _Written = (
        model,
        snapshot.tenant,
        snapshot.priority,
        array("q", snapshot.tokens).tobytes(),
        snapshot.generated,
        snapshot.stream,
        snapshot.forks,
        snapshot.tail,
        snapshot.images,
        snapshot.adapter,
    )
    body = msgspec.msgpack.encode(written)
    return _HEADER.pack(MAGIC, SNAPSHOT_VERSION, zlib.crc32(body), len(body)) + body


def unpacked(data: bytes, model: bytes) -> Snapshot:
    """Decodes a snapshot.

    Raises:
        BadSnapshot: it is damaged, cut short, no snapshot, or of another model.
    """
    import msgspec

    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        raise BadSnapshot(f"These {len(data)} bytes are no snapshot of a sequence; {_ACCEPTED}.")
    _, version, checksum, length = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if version not in (2, SNAPSHOT_VERSION):
        raise BadSnapshot(f"The snapshot has version {version}; accepted: version 2 or {SNAPSHOT_VERSION}.")
    if len(body) != length or zlib.crc32(body) != checksum:
        raise BadSnapshot(f"The snapshot is damaged: it has {len(body)} of {length} bytes or others; {_ACCEPTED}.")
    try:
        written: _Written
        if version == SNAPSHOT_VERSION:
            written = msgspec.msgpack.decode(body, type=_Written)
        else:
            written = (*msgspec.msgpack.decode(body, type=_WrittenBefore), ("", ""))
    except msgspec.DecodeError as error:
        raise BadSnapshot(f"The snapshot cannot be read ({error}); {_ACCEPTED}.") from None
    of, tenant, priority, ids, generated, stream, forks, tail, images, adapter = written
    tokens = array("q", ids)
    if of != model:
        raise BadSnapshot(f"The snapshot is of another model; {_ACCEPTED}.")
    if len(generated) != len(tokens) or not 0 <= tail <= len(tokens):
        raise BadSnapshot(f"The snapshot does not add up; {_ACCEPTED}.")
    return Snapshot(tenant, priority, tuple(tokens), generated, stream, forks, tail, images, adapter)


Bytes = bytes | bytearray | memoryview

IMAGE_MAGIC = b"PonderKV"
_HEADER_IMAGE = struct.Struct("<8sI16s16sIQ")  # magic, version, layout, digest, CRC-32 of the payload, its bytes
HEADER_BYTES = _HEADER_IMAGE.size

# Fields of a configuration that change the keys and values of the same tokens, beside its numerics.
_RELEVANT = ("max_model_len", "block_size")
_SAMPLES = 64  # places of a weight file that are looked at
_SAMPLE_BYTES = 4096
_HEADER_SAMPLE = 1 << 20  # bytes of a GGUF file


class BadImage(Exception):
    """The bytes are no image of the wanted block; the message says why."""


def header(layout: bytes, digest: bytes, payload: Bytes) -> bytes:
    """Returns the header of a payload. `layout` and `digest` have 16 bytes."""
    return _HEADER_IMAGE.pack(IMAGE_MAGIC, VERSION, layout, digest, zlib.crc32(payload), memoryview(payload).nbytes)


def described(head: Bytes) -> tuple[bytes, bytes, int]:
    """Returns the layout, the digest and the payload's bytes that an image's header names.

    Raises:
        BadImage: it is no header of this version.
    """
    magic, version, layout, digest, _, length = _HEADER_IMAGE.unpack_from(head)
    if magic != IMAGE_MAGIC or version != VERSION:
        raise BadImage(f"it is no image of version {VERSION}")
    return layout, digest, length


def digest_of(image: Bytes) -> bytes:
    """Returns the digest of the block that an image's header names."""
    digest: bytes = _HEADER_IMAGE.unpack_from(image)[3]
    return digest


def payload_of(image: Bytes, layout: bytes, digest: bytes, nbytes: int) -> memoryview:
    """Returns a view of the payload of an image, of `nbytes` bytes.

    Raises:
        BadImage: it is cut short, damaged, or of another block, model or layout.
    """
    view = memoryview(image).cast("B")
    if len(view) < HEADER_BYTES:
        raise BadImage(f"it has {len(view)} bytes, and a header has {HEADER_BYTES}")
    magic, version, its_layout, its_digest, checksum, length = _HEADER_IMAGE.unpack_from(view)
    if magic != IMAGE_MAGIC or version != VERSION:
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
    """Returns a 16-byte fingerprint of how a model's K/V is computed and laid out. `shape` describes how to read a
    payload."""
    relevant = {each.name: getattr(config, each.name) for each in fields(config) if each.name in _RELEVANT}
    parts = (VERSION, sorted(relevant.items()), sorted(numerics.recorded().items()), *shape)
    return hashlib.blake2b(repr(parts).encode(), key=model, digest_size=16).digest()


def fingerprint(path: Path) -> bytes:
    """Returns a 16-byte fingerprint of a model's files.

    Weights are told apart by their sizes and by samples of their bytes: a fine-tune of the same shape differs in all of
    them.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = [path]  # a GGUF file
    if path.is_dir():
        digest.update((path / "config.json").read_bytes())
        files = sorted(path.glob("*.safetensors"))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as weights:
            if file is path:
                digest.update(weights.read(_HEADER_SAMPLE))  # its configuration, before a vocabulary
            for at in range(_SAMPLES):
                weights.seek(size * at // _SAMPLES)
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.digest()
