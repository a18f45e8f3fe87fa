"""Fetches pages within limits, over connections pinned to the address that was checked.

Nothing of this machine or its network can be reached this way. Each hop is checked anew: the URL is read strictly, its
host resolved once, every address it has must be public, and the connection goes to one of those very addresses, as a
second resolution may give another answer. The request's Host and the certificate's check keep the name. Bytes (before
and after decompression), headers, redirects and time are limited; an answer with endless headers does end. A body is
decompressed as it arrives, so a bomb is cut, not opened. One layer of gzip or deflate is read; any other encoding is
refused. No cookies, no credentials, no proxies: a site sees the same request for every user.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Generic, Protocol, TypeVar

import certifi
import httpcore

from tools.web import readable
from tools.web import target as addresses
from tools.web.target import AddressRefused, FetchFailed, Target, target

_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's window bits


class Inflate:
    """`feed` gives a piece's decompressed bytes, until `max_bytes` were given; then `full` is true."""

    def __init__(self, encoding: str, max_bytes: int) -> None:
        """
        Raises:
            Refused: the encoding is none of identity, gzip and deflate.
        """
        name = encoding.strip().lower()
        if name not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise AddressRefused(f"The page is encoded as {encoding[:60]!r}; accepted: gzip, deflate or nothing.")
        self._kind = name.removeprefix("x-")
        self._left = max_bytes
        self._stream = zlib.decompressobj(_GZIP) if self._kind == "gzip" else None
        self.full = False

    def feed(self, data: bytes) -> bytes:
        """
        Raises:
            Failed: the data is damaged.
        """
        if self._kind in ("", "identity"):
            return self._give(data)
        if self._stream is None:  # "deflate" is zlib's format by the standard and the bare one by custom
            self._stream = zlib.decompressobj(_ZLIB if data[:1] and data[0] & 0x0F == 8 else _RAW)
        given = list[bytes]()
        try:
            while data and not self.full:
                # One byte more than wanted distinguishes a full page from one that ends here.
                given.append(self._give(self._stream.decompress(data, self._left + 1)))
                data = self._stream.unconsumed_tail
                if self._stream.eof:
                    data = self._stream.unused_data
                    if self._kind != "gzip" or not data.startswith(b"\x1f\x8b"):
                        break
                    self._stream = zlib.decompressobj(_GZIP)  # gzip members may follow one another
        except zlib.error as error:
            raise FetchFailed(f"The page's {self._kind} data is damaged ({error}).") from None
        return b"".join(given)

    def _give(self, data: bytes) -> bytes:
        self.full = len(data) > self._left
        given = data[: self._left]
        self._left -= len(given)
        return given


class Pinned(httpcore.AsyncNetworkBackend):
    """Connects to the first of `addresses` that answers; reads at most `max_bytes` from it."""

    def __init__(self, addresses: Iterable[IPv4Address | IPv6Address], max_bytes: int) -> None:
        self.addresses = list(addresses)
        self.max_bytes = max_bytes
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        last: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in self.addresses:
            try:
                stream = await self._network.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                last = error
            else:
                return _Counted(stream, self.max_bytes)
        raise last

    async def connect_unix_socket(self, path: str, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        raise AddressRefused(f"A fetch does not open sockets in the file system ({path!r}).")

    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)


class _Counted(httpcore.AsyncNetworkStream):
    """A stream that ends with an error where more is read than was agreed."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, left: int) -> None:
        self._stream, self._left, self._most = stream, left, left

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(max_bytes, timeout)
        self._left -= len(data)
        if self._left < 0:
            raise AddressRefused(f"The site sent more than the {self._most:,} bytes that a fetch reads.")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _Counted(await self._stream.start_tls(ssl_context, server_hostname, timeout), self._left)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_SLACK = 256 * 1024  # bytes of chunk framing, and of the piece in which a page turns out to be too long
_ACCEPT = "text/html,application/xhtml+xml,text/plain,application/json;q=0.9,text/*;q=0.8,application/xml;q=0.7"

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host, as text."""


class FetchRefusal(Protocol):
    def __call__(self, address: IPv4Address | IPv6Address, /) -> str | None: ...


@dataclass(frozen=True, slots=True)
class FetchConfig:
    ports: tuple[int, ...] = (80, 443)
    timeout_s: float = 20.0  # for all of it, redirects included
    connect_timeout_s: float = 5.0
    max_bytes: int = 2_000_000  # of a page, decompressed
    max_header_bytes: int = 32_000
    max_chars: int = 100_000  # of the text given back
    max_redirects: int = 5
    user_agent: str = "Ponder/0.1"


@dataclass(frozen=True, slots=True)
class FetchedPage:
    """A page fetched from `url`, the address after redirects. `truncated`: there was more than was read."""

    url: str
    status: int
    media_type: str
    text: str
    title: str
    truncated: bool


Headers = dict[bytes, str]
T = TypeVar("T", FetchedPage, bytes)


@dataclass(frozen=True, slots=True)
class _Wanted(Generic[T]):
    """`read` makes the result of a final answer, of at most `max_bytes`; `accept` is the header."""

    read: Callable[[Target, httpcore.Response, Headers], Awaitable[T]]
    accept: str
    max_bytes: int


async def resolve(host: str, port: int) -> list[str]:
    """The addresses that the system's resolver has for a host."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Fetcher:
    """Fetches pages; `close` it. `resolve`, `refusal` and `tls` are there for tests that stand up their own web."""

    def __init__(
        self,
        config: FetchConfig | None = None,
        *,
        resolve: Resolve = resolve,
        refusal: FetchRefusal = addresses.refusal,
        tls: ssl.SSLContext | None = None,
        reader: readable.PageReader | None = None,
    ) -> None:
        self.config = config or FetchConfig()
        self._resolve, self._refusal, self._tls = resolve, refusal, tls
        self._reader = reader or readable.PageReader()

    def close(self) -> None:
        """Ends the processes in which pages are read."""
        self._reader.close()

    async def fetch(self, url: str) -> FetchedPage:
        """
        Raises:
            Refused: the URL, an address, a redirect or the media type is not one that may be fetched.
            Failed: the site could not be reached, did not answer in time, or not in HTTP.
        """
        return await self._within(url, _Wanted(self._page, _ACCEPT, self.config.max_bytes))

    async def fetch_file(self, url: str, kind: str, max_bytes: int) -> bytes:
        """Fetches a file whose media type begins with `kind`, whole.

        Raises:
            Refused: as `fetch`; or it has more than `max_bytes`, or a status other than 200.
            Failed: as `fetch`.
        """

        async def read(at: Target, response: httpcore.Response, headers: Headers) -> bytes:
            media_type = headers.get(b"content-type", "").partition(";")[0].strip().lower()
            if response.status != 200:
                raise AddressRefused(f"The site answered with status {response.status}; accepted: 200.")
            if not media_type.startswith(kind):
                raise AddressRefused(f"The file is of the type {media_type[:100]!r}; accepted: {kind}….")
            data, truncated = await self._body(response, headers.get(b"content-encoding", ""), max_bytes)
            if truncated:
                raise AddressRefused(f"The file has more than the {max_bytes:,} bytes that are accepted.")
            return data

        return await self._within(url, _Wanted(read, f"{kind}*", max_bytes))

    async def _within(self, url: str, wanted: _Wanted[T]) -> T:
        try:
            async with asyncio.timeout(self.config.timeout_s):
                return await self._follow(target(url, self.config.ports), wanted)
        except TimeoutError:
            raise FetchFailed(f"The site took longer than the limit of {self.config.timeout_s:g} s.") from None

    async def _follow(self, at: Target, wanted: _Wanted[T]) -> T:
        for _ in range(self.config.max_redirects + 1):
            found = await self._request(at, wanted)
            if not isinstance(found, str):
                return found
            at = at.join(found, self.config.ports)
        raise AddressRefused(f"The page redirects more than {self.config.max_redirects} times.")

    async def _checked(self, at: Target) -> list[IPv4Address | IPv6Address]:
        """All addresses of a host, where each of them may be connected to."""
        if at.address is not None:
            found = [at.address]
        else:
            try:
                found = [ip_address(text) for text in await self._resolve(at.host, at.port)]
            except (OSError, ValueError, UnicodeError):
                found = []
        if not found:
            raise FetchFailed(f"The host {at.host!r} has no address.")
        for address in found:
            if kind := self._refusal(address):
                # The address of an inner host stays unsaid: the model may not know it.
                kind = kind.partition(", here ")[0]
                raise AddressRefused(
                    f"The host {at.host!r} has an address that is {kind}; accepted: public addresses alone."
                )
        return sorted(dict.fromkeys(found), key=lambda address: address.version)

    async def _request(self, at: Target, wanted: _Wanted[T]) -> T | str:
        """Requests one address: returns the result, or the address of a redirect."""
        config = self.config
        backend = Pinned(await self._checked(at), wanted.max_bytes + config.max_header_bytes + _SLACK)
        headers = [
            ("User-Agent", config.user_agent),
            ("Accept", wanted.accept),
            ("Accept-Encoding", "gzip, deflate"),
            ("Connection", "close"),
        ]
        limits = {"connect": config.connect_timeout_s, "read": config.timeout_s, "write": config.connect_timeout_s}
        try:
            async with (
                httpcore.AsyncConnectionPool(self._context(at), network_backend=backend) as pool,
                pool.stream("GET", at.url, headers=headers, extensions={"timeout": limits}) as response,
            ):
                headers_read = self._headers(response)
                if response.status in _REDIRECTS and b"location" in headers_read:
                    return headers_read[b"location"]
                return await wanted.read(at, response, headers_read)
        except httpcore.TimeoutException:
            raise FetchFailed(f"The host {at.host!r} did not answer in time.") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError) as error:
            raise FetchFailed(f"The host {at.host!r} could not be read: {error or type(error).__name__}") from None

    def _context(self, at: Target) -> ssl.SSLContext | None:
        if at.scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context(cafile=certifi.where())
        return self._tls

    def _headers(self, response: httpcore.Response) -> Headers:
        size = sum(len(name) + len(value) + 4 for name, value in response.headers)
        if size > self.config.max_header_bytes:
            raise AddressRefused(f"The page has {size:,} bytes of headers; accepted: {self.config.max_header_bytes:,}.")
        return {name.lower(): value.decode("utf-8", "replace") for name, value in response.headers}

    async def _page(self, at: Target, response: httpcore.Response, headers: Headers) -> FetchedPage:
        media_type, _, parameters = headers.get(b"content-type", "").lower().partition(";")
        media_type = media_type.strip()
        if not readable.is_textual(media_type):
            said = f"is of the type {media_type[:100]!r}" if media_type else "does not say what type it is of"
            raise AddressRefused(f"The page {said}; accepted: text, HTML, JSON, XML and the like.")
        data, truncated = await self._body(response, headers.get(b"content-encoding", ""), self.config.max_bytes)
        _, _, charset = parameters.partition("charset=")
        reading = await self._reader.read(data, media_type, charset.split(";")[0].strip("\"' "))
        truncated = truncated or reading.cut or len(reading.text) > self.config.max_chars
        text = reading.text[: self.config.max_chars]
        return FetchedPage(at.url, response.status, media_type, text, reading.title, truncated)

    async def _body(self, response: httpcore.Response, encoding: str, max_bytes: int) -> tuple[bytes, bool]:
        inflate = Inflate(encoding, max_bytes)
        body = bytearray()
        async for piece in response.aiter_stream():
            # A small piece can expand to much: a thread inflates it, not the loop that serves others.
            body += await asyncio.to_thread(inflate.feed, piece)
            if inflate.full:
                return bytes(body), True
        return bytes(body), False
