"""Reading and writing pipes without blocking the event loop, and waiting for a process to end.

Knows nothing of what goes through them.
"""

from __future__ import annotations

import asyncio
import os

_PIECE = 1 << 16


class Pipe:
    """One end of a pipe, which it owns."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor

    async def read(self, most: int = _PIECE) -> bytes:
        """Up to `most` bytes, none at the end."""
        while True:
            try:
                return os.read(self.descriptor, most)
            except BlockingIOError:
                await ready(self.descriptor)

    async def exactly(self, count: int) -> bytes:
        """That many bytes.

        Raises:
            EOFError: it ended before.
        """
        content = bytearray()
        while len(content) < count:
            piece = await self.read(min(count - len(content), _PIECE))
            if not piece:
                raise EOFError(f"{len(content)} of {count} bytes came")
            content += piece
        return bytes(content)

    async def write(self, content: bytes) -> None:
        """All of it.

        Raises:
            BrokenPipeError: nobody reads any more.
        """
        rest = memoryview(content)
        while rest:
            try:
                rest = rest[os.write(self.descriptor, rest) :]
            except BlockingIOError:
                await ready(self.descriptor, writing=True)

    def close(self) -> None:
        """Closes it; again does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


async def ready(descriptor: int, *, writing: bool = False) -> None:
    """Returns when it can be read or written; for a pidfd, when the process has ended. One waiter at a time."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    watch, unwatch = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    watch(descriptor, lambda: None if done.done() else done.set_result(None))
    try:
        await done
    finally:
        unwatch(descriptor)
