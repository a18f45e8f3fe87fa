"""The HTTP client of one remote model: a request out, the items of its stream in, within bounds of time and size.

Redirects are not followed, proxies and `.netrc` are not read, a compressed body is refused, and the key is taken out
of whatever comes back. A failure before the first item is retried with backoff where another try may help; after it, it
ends the stream. Messages of errors begin with the remote's name and quote at most `MAX_QUOTED` characters of it.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

import httpx

from app.config.remote_settings import RemoteSettings
from app.remote.wire_formats import CallPart, Json, RemoteError, RemoteItem, RemotePrompt, WireFormat
from app.request_body import json_value
from reasoning.turn import Content, Reasoning

T = TypeVar("T")

MAX_BYTES = 16 << 20  # of one answer's stream
MAX_LINE_BYTES = 1 << 20
MAX_ERROR_BYTES = 1 << 16
MAX_QUOTED = 300
REDACTED = "[redacted]"
_BACKOFF_S, _MAX_WAIT_S = 0.5, 10.0
_LONG_TEXT = 1 << 16  # characters; encoding more than this would be felt by other streams
_KEY_LIKE = re.compile(r"(?i)\b(sk|pk|key|bearer|token)[-_ ](?=\S*[\d*])[\w*.+/=-]{8,}")


class DeadlinePassed(Exception):
    """The request's own deadline came while the answer was being read."""


class RemoteClient:
    """Asks one remote model. `key` is its secret, None where it wants none."""

    def __init__(self, settings: RemoteSettings, format: WireFormat, key: str | None) -> None:
        self._settings = settings
        self._format = format
        self._key = key
        self._http = httpx.AsyncClient(
            follow_redirects=False, trust_env=False, verify=httpx.create_ssl_context(),
            timeout=httpx.Timeout(None, connect=settings.connect_s, write=settings.connect_s),
        )  # fmt: skip

    async def close(self) -> None:
        await self._http.aclose()

    async def items(self, prompt: RemotePrompt, until: float | None = None) -> AsyncGenerator[RemoteItem, None]:
        """Yields the answer's items. Closing it closes the connection, and so ends the remote's work.

        Args:
            until: the loop's time of the request's deadline.

        Raises:
            RemoteError: it cannot be reached, refuses, is too slow, or breaks off.
            DeadlinePassed: `until` came first.
        """
        long = prompt.characters > _LONG_TEXT or prompt.images > 0
        content = await asyncio.to_thread(self._encoded, prompt) if long else self._encoded(prompt)
        for left in reversed(range(self._settings.retries + 1)):
            begun = False
            try:
                async with aclosing(self._once(content, until)) as items:
                    async for item in items:
                        begun = True
                        yield item
                return
            except RemoteError as error:
                wait_s = _BACKOFF_S * 2 ** (self._settings.retries - left) * random.uniform(0.5, 1.5)
                wait_s = max(wait_s, error.wait_s or 0)
                if begun or not left or not error.again or wait_s > _MAX_WAIT_S:
                    raise self._explained(error) from None
            await asyncio.sleep(wait_s)

    def _encoded(self, prompt: RemotePrompt) -> bytes:
        return json.dumps(self._format.body(self._settings, prompt), ensure_ascii=False).encode()

    def _explained(self, error: RemoteError) -> RemoteError:
        """The same with the remote's name, without the key, and cut."""
        text = self.redacted(error.message)
        text = text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]} …"
        message = f"The remote model {self._settings.name!r} {text}"
        message += "" if message.endswith((".", "…")) else "."
        return RemoteError(error.status, message, error.code or "", wait_s=error.wait_s)

    def redacted(self, text: str) -> str:
        """Returns a text without the key, and without what looks like one."""
        return redacted(text, self._key)

    async def _once(self, content: bytes, until: float | None) -> AsyncGenerator[RemoteItem, None]:
        redactor = _StreamRedactor(self._key)
        try:
            async with aclosing(self._received(content, until)) as items:
                async for item in items:
                    for shown in redactor.push(item):
                        yield shown
        except (RemoteError, DeadlinePassed):
            for shown in redactor.rest():
                yield shown
            raise
        for shown in redactor.rest():
            yield shown

    async def _received(self, content: bytes, until: float | None) -> AsyncGenerator[RemoteItem, None]:
        settings = self._settings
        headers = {
            "User-Agent": "ponder", "Content-Type": "application/json", "Accept": "text/event-stream",
            "Accept-Encoding": "identity", **self._format.headers(self._key),
        }  # fmt: skip
        request = self._http.build_request("POST", settings.url + self._format.path, headers=headers, content=content)
        clock = _Clock(until)
        clock.reset(settings.first_token_s, "sent nothing")
        try:
            response = await clock.within(self._http.send(request, stream=True))
            try:
                if response.status_code != 200:
                    raise await self._refusal(response, clock)
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise _broken("sent a compressed body, which was not asked for")
                async with aclosing(_events(response, clock)) as events:
                    async for event in events:
                        items = self._format.items(event)
                        for item in items:
                            yield item
                        if items:
                            clock.reset(settings.next_token_s, "stopped sending")
            finally:
                await response.aclose()
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise RemoteError(503, "cannot be reached", "remote_unavailable", again=True) from None
        except httpx.HTTPError as error:
            what = f"broke off: {type(error).__name__}"
            raise RemoteError(502, what, "remote_dropped", again=True) from None

    async def _refusal(self, response: httpx.Response, clock: _Clock) -> RemoteError:
        status, body = response.status_code, bytearray()
        if 300 <= status < 400:
            return RemoteError(502, f"answered {status}, a redirect, and none is followed", "remote_redirected")
        chunks = response.aiter_raw()
        while len(body) < MAX_ERROR_BYTES and (chunk := await clock.within(anext(chunks, None))) is not None:
            body += chunk[:MAX_ERROR_BYTES]
        # Before it is cut: half of a key is no text that could be found.
        said = " ".join(self.redacted(body[:MAX_ERROR_BYTES].decode(errors="replace")).split())
        what = f"answered {status}: {said}" if said else f"answered {status}"
        match status:
            case 429:
                return RemoteError(429, what, "remote_rate_limited", again=True, wait_s=retry_after(response))
            case 401 | 403:
                return RemoteError(502, f"does not take this server's key: {what}", "remote_unauthorized")
            case 503 | 529:
                return RemoteError(503, what, "remote_overloaded", again=True, wait_s=retry_after(response))
            case _ if status >= 500:
                return RemoteError(502, what, "remote_failed", again=True)
        return RemoteError(502, f"refused the request: {what}", "remote_refused")


def redacted(text: str, key: str | None) -> str:
    """Returns a text without the key, and without what looks like one."""
    return _KEY_LIKE.sub(REDACTED, text.replace(key, REDACTED) if key else text)


class _StreamRedactor:
    """Takes the key out of streamed text, also where it is spread over pieces: the beginning of one is held back."""

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._held: Content | Reasoning | CallPart | None = None

    def push(self, item: RemoteItem) -> Iterator[RemoteItem]:
        if self._key is None:
            yield item
            return
        held, self._held = self._held, None
        if not isinstance(item, Content | Reasoning | CallPart):
            if held is not None:
                yield held
            yield item
            return
        if held is not None and _place(held) == _place(item):
            item = replace(item, text=held.text + item.text)
        elif held is not None:
            yield held
        text = item.text.replace(self._key, REDACTED)
        begun = next((n for n in range(len(self._key) - 1, 0, -1) if text.endswith(self._key[:n])), 0)
        shown = text[: len(text) - begun]
        if shown or (isinstance(item, CallPart) and item.name is not None):
            yield replace(item, text=shown)
        if begun:
            rest = CallPart(item.index, None, "") if isinstance(item, CallPart) else item
            self._held = replace(rest, text=text[-begun:])

    def rest(self) -> Iterator[RemoteItem]:
        """Yields what is held back."""
        if self._held is not None:
            yield self._held


def _place(item: Content | Reasoning | CallPart) -> tuple[type, int]:
    return type(item), item.index if isinstance(item, CallPart) else 0


class _Clock:
    """The moment until which the next bytes may take, and the request's deadline."""

    def __init__(self, until: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = until
        self._at, self._text = 0.0, ""

    def reset(self, seconds: float, fault: str) -> None:
        self._at, self._text = self._loop.time() + seconds, f"{fault} for {seconds:g} s"

    async def within(self, awaited: Awaitable[T]) -> T:
        """
        Raises:
            RemoteError: 504: it took too long.
            DeadlinePassed: the request's deadline came first.
        """
        at = self._at if self._until is None else min(self._at, self._until)
        try:
            async with asyncio.timeout_at(at):
                return await awaited
        except TimeoutError:
            if self._until is not None and at == self._until:
                raise DeadlinePassed from None
            raise RemoteError(504, self._text, "remote_timeout") from None


async def _events(response: httpx.Response, clock: _Clock) -> AsyncGenerator[Json, None]:
    """The stream's events as JSON objects, up to `[DONE]` or its end. Comments and other fields are passed over."""
    buffer, data, size = bytearray(), list[str](), 0
    chunks = response.aiter_raw()
    while (chunk := await clock.within(anext(chunks, None))) is not None:
        size += len(chunk)
        buffer += chunk
        if size > MAX_BYTES:
            raise _broken(f"sent more than {MAX_BYTES} bytes; accepted: at most that many")
        *lines, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        if len(buffer) > MAX_LINE_BYTES or any(len(line) > MAX_LINE_BYTES for line in lines):
            raise _broken(f"sent a line of more than {MAX_LINE_BYTES} bytes; accepted: at most that many")
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line[5:].strip().decode(errors="replace"))
            elif not line.strip() and data:
                text = "\n".join(data)
                data.clear()
                if text == "[DONE]":
                    return
                yield _object(text)
    if data and (text := "\n".join(data)) != "[DONE]":
        yield _object(text)


def _object(text: str) -> Json:
    try:
        value = json_value(text)
    except ValueError as error:
        raise _broken(f"sent an event that is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _broken("sent an event that is no JSON object")
    return value


def _broken(what: str) -> RemoteError:
    return RemoteError(502, what, "remote_invalid")


def retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() and len(value) < 6 else None
