"""Handshake of the connections that carry K/V: both ends prove that they know the shared secret.

Challenge and response, HMAC with SHA-256 (RFC 2104), before anything is asked for. The client says how its K/V is laid
out; the server accepts that or not. Nothing is encrypted afterwards. Knows nothing of blocks.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from engine.errors import InvalidParameter

log = logging.getLogger(__name__)

GREETING = struct.Struct("<8s32s")  # magic, of which the last byte is the version; nonce
PROOF = struct.Struct("<32s16s32s")  # nonce, layout, code
VERDICT = struct.Struct("<B32s")  # whether the layout is accepted, code
MIN_SECRET = 16  # bytes


class PeerRefused(Exception):
    """The other end is not a peer, or has other K/V; the message says why."""


def code(secret: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, side + b"".join(parts), "sha256")


def received(sock: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    fill(sock, memoryview(buffer))
    return buffer


def fill(sock: socket.socket, view: memoryview) -> None:
    """Receives as many bytes as `view` has.

    Raises:
        OSError: they did not come.
    """
    while len(view):
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("the connection ended")
        view = view[count:]


def admit(sock: socket.socket, secret: bytes, magic: bytes, accepts: Callable[[bytes], bool]) -> bytes | None:
    """Returns the layout of a client that has proved the secret and has one that `accepts` takes; None: it has not.
    Proves the secret to such a client, and tells it the verdict.

    Raises:
        OSError: the connection failed.
    """
    nonce = secrets.token_bytes(32)
    sock.sendall(GREETING.pack(magic, nonce))
    try:
        theirs, layout, proof = PROOF.unpack(received(sock, PROOF.size))
    except ConnectionError:
        version = magic[-1:].decode()
        log.warning("a client left at the greeting: it is no peer, or has another version than %s", version)
        return None
    if not hmac.compare_digest(proof, code(secret, b"client", nonce, theirs, layout)):
        log.warning("a K/V transfer was refused: the client does not know the shared secret")
        return None
    alike = accepts(layout)
    sock.sendall(VERDICT.pack(alike, code(secret, b"server", theirs, nonce, bytes([alike]))))
    return layout if alike else None


def prove(sock: socket.socket, secret: bytes, magic: bytes, layout: bytes) -> None:
    """Proves the secret, and has the server prove it.

    Raises:
        PeerRefused: it is no peer, or its K/V is of another model, dtype or layout.
        OSError: the connection failed.
    """
    theirs, nonce = GREETING.unpack(received(sock, GREETING.size))
    if theirs[:-1] != magic[:-1]:
        raise PeerRefused("no engine that serves K/V answers there")
    if theirs != magic:
        found, accepted = theirs[-1:].decode("ascii", "replace"), magic[-1:].decode()
        raise PeerRefused(f"the peer has version {found} of the protocol; accepted: {accepted}, of the same release")
    mine = secrets.token_bytes(32)
    sock.sendall(PROOF.pack(mine, layout, code(secret, b"client", nonce, mine, layout)))
    try:
        alike, proof = VERDICT.unpack(received(sock, VERDICT.size))
    except ConnectionError:
        raise PeerRefused("the peer has another shared secret") from None
    if not hmac.compare_digest(proof, code(secret, b"server", mine, nonce, bytes([alike]))):
        raise PeerRefused("the peer does not know the shared secret")
    if not alike:
        raise PeerRefused("the peer's K/V is of another model, dtype, block size, max_model_len or processor")


def shared_secret(path: str, name: str = "kv_transfer.secret_file") -> bytes:
    """Reads the secret that peers share, without the white space around it. `name`: of the setting, for errors.

    Raises:
        InvalidParameter: it cannot be read, or is too short.
    """
    accepted = f"accepted: a file of at least {MIN_SECRET} bytes that all peers have alike"
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        message = f"{name} {path} cannot be read ({error.strerror or error}); {accepted}."
        raise InvalidParameter("kv_transfer", message) from None
    if len(secret) < MIN_SECRET:
        raise InvalidParameter("kv_transfer", f"{name} {path} has {len(secret)} bytes; {accepted}.")
    return secret
