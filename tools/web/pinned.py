"""A network that leads to one checked address, whatever name the HTTP client asks it for.

A client that resolves a host itself may get another answer than the one that was checked. Here it gets no say: the
connection goes to the address it was made with, while the request's Host and the certificate's check keep the name.
Also counts bytes, so that an answer whose headers never end does end.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import httpcore

from tools.web.errors import Refused


class Pinned(httpcore.AsyncNetworkBackend):
    """Connects to the first of `addresses` that answers; reads at most `most_bytes` from it."""

    def __init__(self, addresses: Iterable[IPv4Address | IPv6Address], most_bytes: int) -> None:
        self.addresses = list(addresses)
        self.most_bytes = most_bytes
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
                return _Counted(stream, self.most_bytes)
        raise last

    async def connect_unix_socket(self, path: str, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        raise Refused(f"A fetch does not open sockets in the file system ({path!r}).")

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
            raise Refused(f"The site sent more than the {self._most:,} bytes that a fetch reads.")
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
