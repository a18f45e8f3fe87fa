"""A sequence as bytes, to go on with in another engine of the same model: its tokens, and where its draws are.

K/V is not in it: that is in the tiers' files, found by the tokens. Bytes that are damaged, cut short or of another
model are refused as a whole: tokens must be right. Knows nothing of files or engines. msgspec is imported where it is
used: whoever takes no snapshots runs without it.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from dataclasses import dataclass

from engine.errors import BadSnapshot

MAGIC = b"PonderSq"
VERSION = 1
_HEADER = struct.Struct("<8sIIQ")  # magic, version, CRC-32 of what follows, its bytes
_ACCEPTED = "accepted: what `snapshot` gave for a sequence of this model"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`tail`: tokens that had K/V. `stream` and `forks` key the random draws; `generated` has a byte for each token."""

    tenant: str
    priority: int
    tokens: tuple[int, ...]
    generated: bytes
    stream: int
    forks: int
    tail: int


# The model's fingerprint, then the fields of `Snapshot`; tokens as int64, little-endian.
_Written = tuple[bytes, str, int, bytes, bytes, int, int, int]


def packed(snapshot: Snapshot, model: bytes) -> bytes:
    """`model` is the fingerprint of the model's files."""
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
    )
    body = msgspec.msgpack.encode(written)
    return _HEADER.pack(MAGIC, VERSION, zlib.crc32(body), len(body)) + body


def unpacked(data: bytes, model: bytes) -> Snapshot:
    """
    Raises:
        BadSnapshot: it is damaged, cut short, no snapshot, or of another model.
    """
    import msgspec

    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        raise BadSnapshot(f"These {len(data)} bytes are no snapshot of a sequence; {_ACCEPTED}.")
    _, version, checksum, length = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if version != VERSION:
        raise BadSnapshot(f"The snapshot has version {version}; accepted: version {VERSION}.")
    if len(body) != length or zlib.crc32(body) != checksum:
        raise BadSnapshot(f"The snapshot is damaged: it has {len(body)} of {length} bytes or others; {_ACCEPTED}.")
    try:
        of, tenant, priority, ids, generated, stream, forks, tail = msgspec.msgpack.decode(body, type=_Written)
    except msgspec.DecodeError as error:
        raise BadSnapshot(f"The snapshot cannot be read ({error}); {_ACCEPTED}.") from None
    tokens = array("q", ids)
    if of != model:
        raise BadSnapshot(f"The snapshot is of another model; {_ACCEPTED}.")
    if len(generated) != len(tokens) or not 0 <= tail <= len(tokens):
        raise BadSnapshot(f"The snapshot does not add up; {_ACCEPTED}.")
    return Snapshot(tenant, priority, tuple(tokens), generated, stream, forks, tail)
