"""Block images by layout and digest, within budgets of memory and disk, least recently used first out.

Every block is in memory, on disk or in both. A block that memory has no place for any more is written to disk, where
there is one, before the place is given to another: a client that puts faster than the disk writes waits. Knows nothing
of sockets, models or tenants. Called from any thread.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engine.errors import InvalidParameter
from engine.kv_cache.disk_tier import DiskTier
from engine.kv_cache.snapshot import HEADER_BYTES, BadImage, Bytes, described, payload_of

log = logging.getLogger(__name__)

PAUSE_S = 30.0  # without writes after a write failed
ROOT = bytes(16)  # the folder of all files: a store knows no tenants

Key = tuple[bytes, bytes]  # layout and digest


@dataclass(slots=True)
class StoreStats:
    """Bytes that a store holds and may hold; the rest counts blocks since start."""

    memory_bytes: int = 0
    memory_bytes_total: int = 0
    memory_blocks: int = 0
    disk_bytes: int = 0
    disk_bytes_total: int = 0
    disk_blocks: int = 0
    put: int = 0
    refused: int = 0  # larger than the memory, or of another size than the blocks of its layout
    asked: int = 0
    hits_memory: int = 0
    hits_disk: int = 0
    evicted: int = 0  # left memory, and with no disk the store
    written: int = 0  # to disk
    dropped: int = 0  # left the disk, or could not be written to it
    bad: int = 0  # files that were damaged, or images that came damaged


class BlockImages:
    """Images of blocks in `memory_bytes` of memory and, with a directory, `disk_bytes` of files."""

    def __init__(
        self, memory_bytes: int, disk_bytes: int = 0, directory: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Registers the files that an earlier store left in the directory.

        Raises:
            InvalidParameter: the directory cannot be used, or another store uses it.
        """
        self._stats = StoreStats(memory_bytes_total=memory_bytes, disk_bytes_total=disk_bytes)
        self._directory, self._clock = directory, clock
        self._memory: OrderedDict[Key, bytes] = OrderedDict()  # images, least recently used first
        self._files: OrderedDict[Key, int] = OrderedDict()  # bytes of each
        self._writing: set[Key] = set()
        self._disks: dict[bytes, DiskTier] = {}
        self._nbytes: dict[bytes, int] = {}  # of a payload, by layout
        self._paused_until = 0.0
        self._freed = threading.Condition()  # guards all of this
        self._lock_file = None if directory is None else _locked(directory)
        if directory is not None:
            self._register_files(directory)

    def stats(self) -> StoreStats:
        with self._freed:
            return replace(self._stats, memory_blocks=len(self._memory), disk_blocks=len(self._files))

    def exists(self, layout: bytes, digest: bytes) -> bool:
        """Returns whether a block is here, and counts that as a use: who asks is about to load it, or has it too."""
        key = (layout, digest)
        with self._freed:
            if key in self._memory:
                self._memory.move_to_end(key)
            if key in self._files:
                self._files.move_to_end(key)
            return key in self._memory or key in self._files

    def get(self, layout: bytes, digest: bytes) -> bytes | None:
        """Returns a block's image, header and all; None: it is not here. One from disk is in memory again after it."""
        key = (layout, digest)
        with self._freed:
            self._stats.asked += 1
            if (image := self._memory.get(key)) is not None:
                self._memory.move_to_end(key)
                if key in self._files:
                    self._files.move_to_end(key)
                self._stats.hits_memory += 1
                return image
            if key not in self._files:
                return None
            disk = self._disks[layout]
        buffer = bytearray(disk.file_bytes)
        try:
            disk.read(digest, ROOT, buffer)
        except (BadImage, OSError) as error:
            with self._freed:
                self._stats.bad += isinstance(error, BadImage)
                self._forget_file(key)
            return None  # it may have been removed meanwhile
        with self._freed:
            self._stats.hits_disk += 1
            if key in self._files:
                self._files.move_to_end(key)
        self._place(key, image := bytes(buffer))
        return image

    def put(self, layout: bytes, digest: bytes, image: Bytes) -> bool:
        """Keeps an image that was checked, in the place of an earlier one of this digest. Returns whether it was
        accepted. Its checksum stays that of the engine which made it."""
        nbytes = memoryview(image).nbytes - HEADER_BYTES
        with self._freed:
            alike = self._nbytes.setdefault(layout, nbytes) == nbytes
            if not alike or nbytes + HEADER_BYTES > self._stats.memory_bytes_total:
                self._stats.refused += 1
                return False
            self._stats.put += 1
            self._forget_file((layout, digest))  # it is written anew when memory gives it up
        self._place((layout, digest), bytes(image))
        return True

    def damaged(self) -> None:
        """Counts an image that came damaged."""
        with self._freed:
            self._stats.bad += 1

    def close(self, seconds: float) -> None:
        """Writes what is in memory alone to the disk, the most recently used first, for so many seconds. Nothing may be
        put any more."""
        until = self._clock() + seconds
        fits = self._stats.disk_bytes_total
        for key in reversed(self._memory):
            size = len(self._memory[key])
            fits -= size
            if self._directory is None or fits < 0 or self._clock() >= until:
                break
            if key not in self._files:
                self._write(key, self._memory[key])
            else:
                self._files.move_to_end(key)
        for disk in self._disks.values():
            disk.close()
        if self._lock_file is not None:
            os.close(self._lock_file)

    def check(self) -> None:
        """Raises AssertionError unless the budgets are kept and the counts add up."""
        with self._freed:
            stats = self._stats
            assert stats.memory_bytes == sum(map(len, self._memory.values()))
            assert stats.disk_bytes == sum(self._files.values())
            assert stats.memory_bytes <= stats.memory_bytes_total, "there is more in memory than may be"
            assert stats.disk_bytes <= stats.disk_bytes_total, "there is more on disk than may be"

    # -- parts

    def _place(self, key: Key, image: bytes) -> None:
        """Puts an image into memory, once there is a place for it."""
        size = len(image)
        while True:
            with self._freed:
                if (before := self._memory.pop(key, None)) is not None:
                    self._stats.memory_bytes -= len(before)
                if self._stats.memory_bytes + size <= self._stats.memory_bytes_total:
                    self._stats.memory_bytes += size
                    self._memory[key] = image
                    return
                victim = next((each for each in self._memory if each not in self._writing), None)
                if victim is None:  # other threads write all of them
                    self._freed.wait(0.1)
                    continue
                self._writing.add(victim)
                held = self._memory[victim]
            try:
                if self._directory is not None and victim not in self._files:
                    self._write(victim, held)
            finally:
                with self._freed:
                    self._writing.discard(victim)
                    if self._memory.get(victim) is held:  # else it was put anew meanwhile
                        del self._memory[victim]
                        self._stats.memory_bytes -= len(held)
                        self._stats.evicted += 1
                    self._freed.notify_all()

    def _write(self, key: Key, image: bytes) -> None:
        """Writes a file, in the place of the least recently used ones."""
        layout, digest = key
        size = len(image)
        with self._freed:
            if size > self._stats.disk_bytes_total or self._clock() < self._paused_until:
                self._stats.dropped += 1
                return
            while self._stats.disk_bytes + size > self._stats.disk_bytes_total:
                self._forget_file(next(iter(self._files)))
                self._stats.dropped += 1
            self._stats.disk_bytes += size  # a place for it
        try:
            with self._freed:
                disk = self._disk(layout)
            disk.write(digest, ROOT, payload_of(image, layout, digest, size - HEADER_BYTES))
        except BadImage as error:
            log.warning("a block in memory is damaged, and is dropped: %s", error)
            with self._freed:
                self._stats.disk_bytes -= size
                self._stats.bad += 1
            return
        except (OSError, InvalidParameter) as error:
            with self._freed:
                self._stats.disk_bytes -= size
                self._stats.dropped += 1
                self._paused_until = self._clock() + PAUSE_S
            log.warning("a block could not be written (%s); nothing is written for %.0f s", error, PAUSE_S)
            return
        with self._freed:
            self._stats.written += 1
            self._files[key] = size

    def _disk(self, layout: bytes) -> DiskTier:
        assert self._directory is not None
        if layout not in self._disks:
            self._disks[layout] = DiskTier(self._directory, layout, self._nbytes[layout])
        return self._disks[layout]

    def _forget_file(self, key: Key) -> None:
        if (size := self._files.pop(key, None)) is not None:
            self._stats.disk_bytes -= size
            self._disks[key[0]].remove(key[1], ROOT)

    def _register_files(self, directory: Path) -> None:
        for folder in sorted(directory.iterdir()):
            if not folder.is_dir() or (nbytes := _payload_bytes(folder)) is None:
                continue
            layout = bytes.fromhex(folder.name)
            self._nbytes[layout] = nbytes
            for digest, root in list(self._disk(layout).found()):
                if root == ROOT:
                    self._files[(layout, digest)] = nbytes + HEADER_BYTES
                    self._stats.disk_bytes += nbytes + HEADER_BYTES
        while self._stats.disk_bytes > self._stats.disk_bytes_total:
            self._forget_file(next(iter(self._files)))


def _payload_bytes(folder: Path) -> int | None:
    """Returns the bytes of a payload in a layout's folder; None where it has no whole file."""
    try:
        layout = bytes.fromhex(folder.name)
    except ValueError:
        return None
    for file in (folder / ROOT.hex()).glob("*"):
        try:
            with file.open("rb") as opened:
                its_layout, _, nbytes = described(opened.read(HEADER_BYTES))
            if its_layout == layout and file.stat().st_size == HEADER_BYTES + nbytes:
                return nbytes
        except Exception:  # a file that is cut short or gone: another one says it
            log.debug("%s is no whole block", file)
    return None


def _locked(directory: Path) -> int:
    """Returns an open file that keeps other stores out of a directory; makes the directory if need be.

    Raises:
        InvalidParameter: it cannot be used, or another store uses it.
    """
    accepted = "accepted: a directory of its own to write to"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"{directory} cannot be used: {error.strerror or error}; {accepted}."
        raise InvalidParameter("dir", message) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise InvalidParameter("dir", f"{directory} is used by another store; {accepted}.") from None
    return file
