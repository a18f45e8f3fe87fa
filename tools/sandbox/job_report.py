"""Sends a job to a sandboxed process and reads its report, over pipes that do not block the event loop.

The report comes from code that may say anything, so it is untrusted input: so many bytes and no more, checked in every
field, its names for files judged as names.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tools.sandbox.sandbox_config import SandboxConfig, check_name

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


_LENGTH = struct.Struct(">I")
_HEADER_BYTES = 1 << 20


class UnreadableReport(ValueError):
    """The sandbox sent something that is no report."""


class Report(BaseModel):
    """The head of a report; the files' contents follow it in their order."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    exit: Literal["ok", "error", "memory"]
    value: str | None
    reason: str = Field(max_length=1000)
    files: list[tuple[str, Annotated[int, Field(ge=0)]]]
    left_out: list[tuple[Annotated[str, Field(max_length=1000)], Annotated[str, Field(max_length=200)]]]


def job(code: str, files: Mapping[str, bytes], config: SandboxConfig) -> bytes:
    """The bytes of a job for a sandbox.

    Raises:
        ValueError: there are too many files, they are too large, or a name is none.
    """
    total = sum(map(len, files.values()))
    if len(files) > config.files or total > config.file_bytes:
        raise ValueError(
            f"{len(files)} files of {total} bytes in all are too much for a run; "
            f"accepted: {config.files} files, {config.file_bytes} bytes."
        )
    head = json.dumps({"code": code, "files": [[check_name(name), len(content)] for name, content in files.items()]})
    return b"".join([_LENGTH.pack(len(head)), head.encode(), *files.values()])


async def receive(pipe: Pipe, config: SandboxConfig) -> tuple[Report, dict[str, bytes]]:
    """One report and the files that came with it.

    Raises:
        EOFError: it broke off.
        Unreadable: it is no report, or larger than the limits let it be.
    """
    (length,) = _LENGTH.unpack(await pipe.exactly(_LENGTH.size))
    if length > _HEADER_BYTES:
        raise UnreadableReport(f"a head of {length} bytes")
    try:
        report = Report.model_validate_json(await pipe.exactly(length))
        names = [check_name(name) for name, _ in report.files]
    except ValidationError as error:
        raise UnreadableReport(f"{error.error_count()} wrong fields") from error
    except ValueError as error:
        raise UnreadableReport(str(error)) from error
    total = sum(size for _, size in report.files)
    if len(names) > config.files or len(set(names)) < len(names) or total > config.file_bytes:
        raise UnreadableReport(f"{len(names)} files of {total} bytes")
    if len(report.left_out) > config.files or len(report.value or "") > config.value_chars + 100:
        raise UnreadableReport("more text than is allowed")
    return report, {name: await pipe.exactly(size) for name, size in report.files}
