"""Transports to MCP servers: a process's stdio, or streamable HTTP.

A process gets the environment it is given and nothing else, and a process group of its own, which dies with the
connection. A message (one JSON-RPC line) that is too long, a flood of messages, and a line that is no message end the
connection. The official SDK's transport bounds none of these and hands on more of our environment; this one takes its
place. Over HTTP the bytes of one answer are limited. Compressed answers are not asked for and not read, so the bytes
counted are the memory used. Nothing is taken from the environment, neither proxies nor credentials; redirects are
followed within the address's own origin only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from tools.errors import ToolError


class ServerFault(ToolError):
    """The server can't be used as it is: it is not there, died, hangs, floods, or sends something other than MCP."""


def described(error: BaseException) -> str:
    """An error in words, out of the exception groups of task groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "it does not answer"
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, ToolError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


MAX_LENGTH = 4 << 20  # bytes of one message
RATE = 100  # messages a second, however slowly we read them
BURST = 1000  # messages at once
RUBBISH = 10  # lines that are no message: some servers greet
LAST_WORDS = 1000  # bytes kept of its error output
GRACE_S = 1.0  # to end by itself, and again after SIGTERM
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


class StdioTransport:
    """Connects once. `on_end` gets the reason when the server ends the connection or has to be stopped."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path | None, on_end: Callable[[str], None]
    ) -> None:
        self._command = tuple(command)
        self._env = {"PATH": DEFAULT_PATH, **env}
        self._cwd = cwd
        self._on_end = on_end
        self._last_words = b""
        self._tasks = list[asyncio.Task[None]]()

    async def __aenter__(self) -> Streams:
        """
        Raises:
            ServerFault: the program can't be started.
        """
        program = shutil.which(self._command[0], path=self._env["PATH"])
        if program is None:
            raise ServerFault(
                f"the program {self._command[0]!r} was not found in {self._env['PATH']}; give its whole path, or PATH "
                "in env or inherit"
            )
        try:
            self._process = await asyncio.create_subprocess_exec(
                program, *self._command[1:], env=self._env, cwd=self._cwd, limit=MAX_LENGTH, start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            raise ServerFault(f"{program} could not be started: {error.strerror or error}") from None
        self._to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_server, self._from_session = anyio.create_memory_object_stream[SessionMessage](0)
        self._streams = (self._to_session, from_server, to_server, self._from_session)
        self._tasks = [asyncio.create_task(work) for work in (self._read(), self._write(), self._overhear())]
        return from_server, to_server

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stop()
        finally:
            # Nothing of the server's group stays, even if the stopping was interrupted.
            self._signal(signal.SIGKILL)
            for task in self._tasks:
                task.cancel()
            for stream in self._streams:
                stream.close()
        await asyncio.wait(self._tasks)
        with contextlib.suppress(TimeoutError):  # its pipes are read to their ends, or they would never be closed
            async with asyncio.timeout(GRACE_S):
                await self._process.communicate()

    async def _stop(self) -> None:
        """As the protocol has it: its input is closed, then it is asked to end, and then it is killed."""
        assert self._process.stdin is not None
        self._on_end = lambda _: None  # from here on we end it
        self._process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._process.wait()
                return
            self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        clock = asyncio.get_running_loop().time
        before, left, rubbish = clock(), float(BURST), 0
        async with self._to_session:
            while True:
                try:
                    line = await self._process.stdout.readline()
                except ValueError:
                    return self._on_end(f"it sent a message of more than {MAX_LENGTH >> 20} MiB")
                if not line:
                    return self._on_end(await self._ended())
                now = clock()
                before, left = now, min(left + RATE * (now - before), BURST) - 1
                if left < 0:
                    return self._on_end(f"it sends more than {RATE} messages a second")
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    rubbish += 1
                    if rubbish > RUBBISH:
                        shown = line[:80].decode(errors="replace").strip()
                        return self._on_end(f"it writes what is no MCP to its standard output, such as {shown!r}")
                    continue
                try:
                    await self._to_session.send(SessionMessage(message))
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    return None

    async def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        async with self._from_session:
            async for sent in self._from_session:
                stdin.write(sent.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                try:
                    await stdin.drain()
                except OSError:
                    return  # it closed its input; its output says the rest

    async def _overhear(self) -> None:
        assert self._process.stderr is not None
        while heard := await self._process.stderr.read(4096):
            self._last_words = (self._last_words + heard)[-LAST_WORDS:]

    async def _ended(self) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._process.wait()
        await asyncio.wait(self._tasks[2:], timeout=GRACE_S)
        code = self._process.returncode
        how = "it closed its output" if code is None else f"it ended with exit code {code}"
        words = self._last_words.decode(errors="replace").strip().splitlines()
        return f"{how}; its last words: {words[-1][:300]!r}" if words else how


MAX_STREAM_LENGTH = 16 << 20  # bytes of one answer, which may be a stream of messages
CONNECT_S = 10.0


@asynccontextmanager
async def http_transport(url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:  # the SDK's two streams
    # No timeout for reading: a stream of events may be silent for hours, and calls have timeouts of their own.
    client = httpx2.AsyncClient(
        headers={**headers, "Accept-Encoding": "identity"},
        timeout=httpx2.Timeout(CONNECT_S, read=None),
        trust_env=False,
        transport=_Capped(),
    )
    async with client, streamable_http_client(url, http_client=client, max_sse_event_size=MAX_LENGTH) as streams:
        yield streams


class _Capped(httpx2.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.stream.aclose()
            raise httpx2.DecodingError("it compresses its answer, which was not asked for", request=request)
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        response.stream = _CappedStream(response.stream, MAX_STREAM_LENGTH if events else MAX_LENGTH)
        return response


class _CappedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, limit: int) -> None:
        self._inner = inner
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for chunk in self._inner:
            read += len(chunk)
            if read > self._limit:
                raise httpx2.StreamError(f"its answer is longer than {self._limit >> 20} MiB")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()
