"""A small web on loopback addresses: real sockets and real HTTP, with a resolver that says what a test wants."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import IPv4Address, IPv6Address

from tools.web import FetchConfig, Fetcher, target

PUBLIC = "127.0.0.77"  # stands for a public address; every other of loopback is refused as always
Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


def response(body: bytes, *headers: str, status: str = "200 OK", media_type: str = "text/plain") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {media_type}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def redirect(location: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


class Site:
    """A server that answers each path with the bytes it was given, and keeps what it was asked."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes | Answer] = {}
        self.requests: list[str] = []
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(request)
            path = request.split(" ")[1]
            page = self.pages.get(path, response(b"nothing here", status="404 Not Found"))
            if isinstance(page, bytes):
                writer.write(page)
                await writer.drain()
            else:
                await page(path, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has read enough
        finally:
            writer.close()


@asynccontextmanager
async def served(address: str = PUBLIC, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    site = Site()
    server = await asyncio.start_server(site.handle, address, port, ssl=tls)
    site.port = server.sockets[0].getsockname()[1]
    try:
        yield site
    finally:
        server.close()


@asynccontextmanager
async def served_twice(inner: str = "127.0.0.1") -> AsyncIterator[tuple[Site, Site]]:
    """A site, and one behind `inner` at the same port, which somebody else may have: then both take another."""
    for attempt in range(20):
        async with AsyncExitStack() as closing:
            site = await closing.enter_async_context(served())
            try:
                secret = await closing.enter_async_context(served(inner, site.port))
            except OSError:
                if attempt == 19:
                    raise
                continue
            yield site, secret
            return


class Names:
    """A resolver: for each host its answers one after another, of which the last stays."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = {name.replace("_", "."): answer for name, answer in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        answers = self.answers.get(host, [[PUBLIC]])
        return answers.pop(0) if len(answers) > 1 else answers[0]


def public_for_tests(address: IPv4Address | IPv6Address) -> str | None:
    return None if str(address) == PUBLIC else target.refusal(address)


def fetcher(
    *ports: int, names: Names | None = None, tls: ssl.SSLContext | None = None, config: FetchConfig | None = None
) -> Fetcher:
    config = config or FetchConfig(ports=ports)
    return Fetcher(config, resolve=names or Names(), refusal=public_for_tests, tls=tls)
