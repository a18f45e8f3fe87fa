"""Disk tier: offloaded block images as files, `<directory>/<layout>/<root>/<digest>`, one a block, so that a bad one
costs one block.

A directory belongs to one engine at a time. Files appear whole or not at all (written beside, then renamed); nothing is
synced, since a checksum finds files that a power cut left incomplete. Knows nothing of eviction. `write`, `read` and
`remove` are called from the tiers' thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from engine.errors import InvalidParameter
from engine.kv_cache.snapshot import HEADER_BYTES, Bytes, header, payload_of

log = logging.getLogger(__name__)

SECRET = "secret"  # the file with the key of the blocks' digests
_WRITING = "writing"  # suffix of a file until it is whole


def kept_secret(directory: Path) -> bytes:
    """Returns the key of block digests, kept in `directory` so that blocks on disk are found again; made if need be.

    Raises:
        InvalidParameter: the directory cannot be used.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = directory / SECRET
        with contextlib.suppress(FileExistsError):
            made = path.with_name(f"{SECRET}.{os.getpid()}.{secrets.token_hex(4)}")
            made.touch(mode=0o600, exist_ok=False)
            made.write_bytes(secrets.token_bytes(32))
            try:
                os.link(made, path)  # fails where another was first
            finally:
                made.unlink()
        key = path.read_bytes()
    except OSError as error:
        raise _unusable(directory, error) from None
    if len(key) != 32:
        raise InvalidParameter(
            "kv_dir", f"{path} is no key of 32 bytes; accepted: that file removed, or another kv_dir."
        )
    return key


def _unusable(directory: Path, error: OSError) -> InvalidParameter:
    return InvalidParameter(
        "kv_dir", f"{directory} cannot be used: {error.strerror or error}; accepted: a directory to write to."
    )


class DiskTier:
    """Files of one layout. `nbytes` is a payload's size."""

    def __init__(self, directory: Path, layout: bytes, nbytes: int) -> None:
        """Locks the directory of the layout.

        Raises:
            InvalidParameter: the directory cannot be used, or another engine uses it.
        """
        self.file_bytes = HEADER_BYTES + nbytes
        self._layout = layout
        self._nbytes = nbytes
        self._directory = directory / layout.hex()
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(directory, error) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            message = f"{directory} is used by another engine with this model; accepted: a directory of its own."
            raise InvalidParameter("kv_dir", message) from None

    def found(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields (digest, root) of every file, least recently used first, and removes strays."""
        files: list[tuple[float, bytes, bytes]] = []
        for folder in os.scandir(self._directory):
            if not folder.is_dir(follow_symlinks=False):
                continue
            for file in os.scandir(folder):
                try:
                    digest, root = bytes.fromhex(file.name), bytes.fromhex(folder.name)
                    stat = file.stat(follow_symlinks=False)
                    if len(digest) == len(root) == 16 and stat.st_size == self.file_bytes:
                        files.append((stat.st_mtime, digest, root))
                        continue
                except (ValueError, OSError):
                    pass
                with contextlib.suppress(OSError):
                    os.unlink(file)
        return ((digest, root) for _, digest, root in sorted(files))

    def write(self, digest: bytes, root: bytes, payload: Bytes) -> None:
        """Writes a block. Raises OSError, with nothing left behind."""
        path = self._path(digest, root)
        temporary = path.with_name(f"{path.name}.{_WRITING}")
        path.parent.mkdir(exist_ok=True, mode=0o700)
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                for part in (header(self._layout, digest, payload), payload):
                    left = memoryview(part).cast("B")
                    while len(left):
                        left = left[os.write(file, left) :]
            finally:
                os.close(file)
            os.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def read(self, digest: bytes, root: bytes, buffer: bytearray) -> memoryview:
        """Reads a block's payload into `buffer` (of `file_bytes` bytes), and marks the file as used now.

        Raises:
            BadImage: the file is not whole, or is something else.
            OSError: it cannot be read.
        """
        path = self._path(digest, root)
        with path.open("rb", buffering=0) as file:
            count = 0
            while count < len(buffer) and (more := file.readinto(memoryview(buffer)[count:])):
                count += more
            os.utime(file.fileno())
        return payload_of(memoryview(buffer)[:count], self._layout, digest, self._nbytes)

    def remove(self, digest: bytes, root: bytes) -> None:
        """Removes a block's file, if it is there."""
        with contextlib.suppress(OSError):
            self._path(digest, root).unlink()

    def close(self) -> None:
        os.close(self._lock)

    def _path(self, digest: bytes, root: bytes) -> Path:
        return self._directory / root.hex() / digest.hex()


def is_full(error: Exception) -> bool:
    """Returns whether the disk is full, as opposed to a fault of one file."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
