"""Protocol of a K/V store: requests over one proven connection, for as long as the client likes.

A request is an operation, a number of blocks and their digests. EXISTS is answered with a byte for each block; GET with
an image, as in a file of the disk tier, or `ABSENT` for each; after PUT the images follow, and a byte for each comes
back. There is no request that lists blocks: a client has those alone whose digest it can compute, which takes the
tenant's root and the tokens. A connection is of one layout, so engines of other models never see each other's blocks.
"""

from __future__ import annotations

import socket
import struct
import time
from enum import IntEnum

from engine.kv_cache.snapshot import HEADER_BYTES

MAGIC = b"PonderS1"
REQUEST = struct.Struct("<BI")  # operation, blocks
ABSENT = b"PonderAb".ljust(HEADER_BYTES, b"\0")  # in the place of an image's header
DIGEST_BYTES = 16
MAX_BLOCKS = 1 << 16  # of a request
STALL_S = 5.0  # without a byte, after which the other end is given up


class Operation(IntEnum):
    EXISTS = 1
    GET = 2
    PUT = 3


class BadRequest(Exception):
    """The bytes are no request of this protocol; the message says why."""


def request(operation: Operation, digests: list[bytes]) -> bytes:
    return REQUEST.pack(operation, len(digests)) + b"".join(digests)


def digests_of(data: bytes) -> list[bytes]:
    return [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]


def fill_until(sock: socket.socket, view: memoryview, until: float) -> None:
    """Receives as many bytes as `view` has, by the time `until` of the monotonic clock.

    Raises:
        OSError: they did not come.
    """
    while len(view):
        sock.settimeout(remaining(until))
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("the connection ended")
        view = view[count:]


def remaining(until: float) -> float:
    """Returns the seconds until then, at most `STALL_S`.

    Raises:
        TimeoutError: there are none.
    """
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    return min(left, STALL_S)
