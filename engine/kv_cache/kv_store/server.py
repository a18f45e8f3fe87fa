"""K/V store's server: a thread for each connection, which answers requests of one layout from `BlockImages`.

Every image is checked when it comes, and again by the engine that gets it. Imports no torch: a store is a small process
with much memory.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from contextlib import suppress

from engine.errors import InvalidParameter
from engine.kv_cache.kv_store import wire
from engine.kv_cache.kv_store.block_images import BlockImages
from engine.kv_cache.kv_store.wire import ABSENT, DIGEST_BYTES, MAX_BLOCKS, STALL_S, BadRequest, Operation, digests_of
from engine.kv_cache.snapshot import HEADER_BYTES, BadImage, described, payload_of
from engine.kv_cache.transport.peer_handshake import admit, fill, received

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
POLL_S = 0.05  # between looks whether the store stops
END_S = 2.0  # for connections to end when the store stops


class KVStoreServer(socketserver.ThreadingTCPServer):
    """Serves at an address until it is closed. `secret`: what clients prove to know."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, images: BlockImages, secret: bytes, host: str, port: int) -> None:
        """Listens; `port` 0 takes any free one.

        Raises:
            InvalidParameter: the address cannot be listened at.
        """
        self.images, self.secret = images, secret
        self._connected: dict[socket.socket, threading.Thread | None] = {}
        self._guard = threading.Lock()
        self._closing = False
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), _Connection)
        except OSError as error:
            message = f"the store cannot listen at {host}:{port}: {error}; accepted: an address of this machine, and a "
            raise InvalidParameter("port", f"{message}port that nobody uses.") from None
        self.port = int(self.socket.getsockname()[1])
        self._accepting = threading.Thread(
            target=self.serve_forever, args=(POLL_S,), name="kv-store-listen", daemon=True
        )
        self._accepting.start()

    @property
    def connections(self) -> int:
        with self._guard:
            return len(self._connected)

    def verify_request(self, request: object, client_address: object) -> bool:
        """Refuses a connection beyond the limit; socketserver calls it."""
        return self.connections < MAX_CONNECTIONS

    def joined(self, sock: socket.socket) -> None:
        with self._guard:
            if self._closing:
                raise ConnectionError("the store stops")
            self._connected[sock] = threading.current_thread()

    def left(self, sock: socket.socket) -> None:
        with self._guard:
            self._connected.pop(sock, None)

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs an error that no connection expects; socketserver calls it."""
        log.exception("a connection to the K/V store failed")

    def close(self) -> None:
        """Stops listening, and ends all connections."""
        with self._guard:
            self._closing = True
            connected = dict(self._connected)
        self.shutdown()
        self.server_close()
        for sock in connected:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in connected.values():
            if thread is not None:
                thread.join(END_S)
        self._accepting.join(END_S)


class _Connection(socketserver.BaseRequestHandler):
    """One client's requests, in order."""

    request: socket.socket
    server: KVStoreServer

    def handle(self) -> None:
        sock, server = self.request, self.server
        try:
            server.joined(sock)
            sock.settimeout(STALL_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # finds clients whose machine is gone
            layout = admit(sock, server.secret, wire.MAGIC, lambda layout: True)
            while layout is not None:
                sock.settimeout(None)  # between requests a client may be silent
                if not (first := sock.recv(1)):
                    return
                sock.settimeout(STALL_S)
                operation, count = wire.REQUEST.unpack(first + received(sock, wire.REQUEST.size - 1))
                if not 0 < count <= MAX_BLOCKS:
                    raise BadRequest(f"it is of {count} blocks; accepted: 1 to {MAX_BLOCKS}")
                self._answer(operation, layout, digests_of(bytes(received(sock, DIGEST_BYTES * count))))
        except OSError as error:
            log.debug("a connection to the K/V store ended: %s", error)
        except BadRequest as error:
            log.warning("a connection to the K/V store is closed, as a request is not understood: %s", error)
        finally:
            server.left(sock)

    def _answer(self, operation: int, layout: bytes, digests: list[bytes]) -> None:
        sock, images = self.request, self.server.images
        if operation == Operation.EXISTS:
            sock.sendall(bytes(images.exists(layout, each) for each in digests))
        elif operation == Operation.GET:
            for digest in digests:
                sock.sendall(images.get(layout, digest) or ABSENT)
        elif operation == Operation.PUT:
            for digest in digests:
                sock.sendall(bytes([self._put(layout, digest)]))
        else:
            raise BadRequest(f"operation {operation}; accepted: {', '.join(f'{each:d}' for each in Operation)}")

    def _put(self, layout: bytes, digest: bytes) -> bool:
        """Receives an image; returns whether it was kept."""
        sock, images = self.request, self.server.images
        head = received(sock, HEADER_BYTES)
        try:
            named, its_digest, nbytes = described(head)
        except BadImage as error:
            raise BadRequest(str(error)) from None
        if (named, its_digest) != (layout, digest) or nbytes > images.stats().memory_bytes_total:
            raise BadRequest("an image of another block or layout, or larger than the store's memory")
        image = bytearray(HEADER_BYTES + nbytes)
        image[:HEADER_BYTES] = head
        fill(sock, memoryview(image)[HEADER_BYTES:])
        try:
            payload_of(image, layout, digest, nbytes)
        except BadImage as error:
            log.warning("a block that came is not kept: %s", error)
            images.damaged()
            return False
        return images.put(layout, digest, image)
