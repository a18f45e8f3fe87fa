"""Moves block images between engines over TCP, one connection for a load.

Both ends prove that they know the shared secret (challenge and response, HMAC with SHA-256, RFC 2104) before anything
is asked for, and that their K/V is laid out and computed alike: the layout's fingerprint has the model's files, the
number format and the kernels. Images carry their digest and a checksum, as files of the disk tier do; so do the
layers of blocks that come while later layers are computed. Nothing is encrypted. Knows nothing of pools: `BlockSource`
has the bytes.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty

from engine.errors import InvalidParameter
from engine.kv_cache.layer_parts import LAYERS_MAGIC, LayersHeader, layers_header
from engine.kv_cache.snapshot import HEADER_BYTES, IMAGE_MAGIC, BadImage, digest_of, header, payload_of
from engine.kv_cache.transport.kv_transport import Arrived, BlockRequest, BlockSource, StagedBlocks
from engine.kv_cache.transport.peer_handshake import PeerRefused, admit, fill, prove, received

log = logging.getLogger(__name__)

CONNECT_S = 2.0
STALL_S = 5.0  # without a byte, after which the other end is given up
HEARTBEAT_S = 1.0
MAX_CONNECTIONS = 256
MAX_BLOCKS = 1 << 20  # of a request

_REQUEST = struct.Struct("<II")  # number of the first block, blocks
_MAGIC = b"PonderT2"  # with the version of the protocol; 1 had no layers
_WAIT = b"PonderWt".ljust(HEADER_BYTES, b"\0")  # in the place of an image: it is not computed yet
_GONE = b"PonderNo".ljust(HEADER_BYTES, b"\0")  # the rest will not come


class TcpTransport:
    """Connections of one engine, whose blocks have `layer_nbytes` bytes in each layer, in `layout`."""

    magic = _MAGIC  # of the protocol

    def __init__(
        self, secret: bytes, layout: bytes, layer_nbytes: Sequence[int], *, address: tuple[str, int] | None,
        timeout_s: float,
    ) -> None:  # fmt: skip
        """`address`: to listen at; None: nothing is served. `timeout_s`: of a load as a whole."""
        self._secret, self._layout, self._layers, self._nbytes = secret, layout, layer_nbytes, sum(layer_nbytes)
        self._address, self._timeout_s = address, timeout_s
        self._listener: socket.socket | None = None
        self._sockets = set[socket.socket]()
        self._threads = set[threading.Thread]()
        self._lock = threading.Lock()
        self._closing = False
        self.port = 0  # that it listens at

    # -- both sides

    def _begin(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads = {each for each in self._threads if each.is_alive()}  # `close` waits for these
            thread.start()
            self._threads.add(thread)

    def _keep(self, sock: socket.socket) -> None:
        """Registers a connection to be ended by `close`."""
        with self._lock:
            if self._closing:
                raise ConnectionError("the engine stopped")
            self._sockets.add(sock)

    def _drop(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(sock)
        sock.close()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            sockets, threads = list(self._sockets), list(self._threads)
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(CONNECT_S + STALL_S)

    # -- serving

    def listen(self, source: BlockSource) -> None:
        """
        Raises:
            InvalidParameter: the address cannot be listened at.
        """
        assert self._address is not None, "there is no address to listen at"
        host, port = self._address
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            message = f"kv_transfer cannot listen at {host}:{port}: {error}; accepted: kv_ip of this machine, and a "
            raise InvalidParameter("kv_transfer", f"{message}kv_port that nobody uses.") from None
        self.port = self._listener.getsockname()[1]
        self._begin("kv-listen", lambda: self._accept(source))

    def _accept(self, source: BlockSource) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(0.1)  # no file descriptor is free, say
                continue
            with self._lock:
                full = len(self._sockets) >= MAX_CONNECTIONS
            if full:
                sock.close()
                continue
            self._begin("kv-send", lambda sock=sock: self._answer(sock, source))  # type: ignore[misc]  # bound now

    def _answer(self, sock: socket.socket, source: BlockSource) -> None:
        try:
            self._keep(sock)
            sock.settimeout(STALL_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if admit(sock, self._secret, self.magic, self._accepts) is None:
                return
            self._serve_to(sock)
            first, count = _REQUEST.unpack(received(sock, _REQUEST.size))
            if not 0 < count <= MAX_BLOCKS:
                return
            data = bytes(received(sock, 16 * count))
            digests = tuple(data[at : at + 16] for at in range(0, len(data), 16))
            self._send(sock, source, source.serve(first, digests))
        except OSError as error:
            if not self._closing:
                log.info("a K/V transfer to a peer ended: %s", error)
        finally:
            self._drop(sock)

    def _accepts(self, layout: bytes) -> bool:
        return layout == self._layout

    def _send(self, sock: socket.socket, source: BlockSource, request: BlockRequest) -> None:
        try:
            while True:
                try:
                    item = request.ready.get(timeout=HEARTBEAT_S)
                except Empty:
                    sock.sendall(_WAIT)
                    source.poke()
                    continue
                if isinstance(item, bool):
                    if not item:
                        sock.sendall(_GONE)
                    return
                self._send_blocks(sock, source, request, item)
        finally:
            source.release(request)

    def _send_blocks(
        self, sock: socket.socket, source: BlockSource, request: BlockRequest, staged: StagedBlocks
    ) -> None:
        began, seconds = time.perf_counter(), 0.0
        try:
            payload, digests = source.payload(staged), staged.digests
            if staged.layers is None:
                sock.sendall(header(self._layout, digests[0], payload))
            else:
                sock.sendall(layers_header(self._layout, digests, staged.layers, payload))
            self._send_payload(sock, payload)
            seconds = time.perf_counter() - began
        finally:
            source.sent(request, staged, seconds)

    # -- fetching

    def fetch(
        self, peer: tuple[str, int], first: int, digests: tuple[bytes, ...],
        arrived: Arrived, ended: Callable[[str | None], None],
    ) -> Callable[[], None]:  # fmt: skip
        cancelled = threading.Event()
        mine: list[socket.socket] = []

        def run() -> None:
            error: str | None = None
            try:
                sock = socket.create_connection(peer, CONNECT_S)
                mine.append(sock)
                try:
                    self._keep(sock)
                    if cancelled.is_set():
                        raise ConnectionError("nobody waits for it")
                    self._fetch(sock, first, digests, arrived)
                finally:
                    mine.remove(sock)
                    self._drop(sock)
            except (OSError, BadImage, PeerRefused) as failure:
                error = str(failure) or type(failure).__name__
            except Exception as failure:  # of any kind: no sequence may wait for ever
                log.exception("a K/V transfer failed")
                error = repr(failure)
            finally:
                ended(error)

        def cancel() -> None:
            cancelled.set()
            for sock in mine.copy():
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

        self._begin("kv-fetch", run)
        return cancel

    def _fetch(self, sock: socket.socket, first: int, digests: tuple[bytes, ...], arrived: Arrived) -> None:
        until = time.monotonic() + self._timeout_s
        sock.settimeout(STALL_S)
        prove(sock, self._secret, self.magic, self._layout)
        self._fetch_from(sock)
        sock.sendall(_REQUEST.pack(first, len(digests)) + b"".join(digests))
        image = memoryview(bytearray(HEADER_BYTES + self._nbytes))
        coming = dict.fromkeys(digests, 0)  # blocks that are not whole yet, with the layers that have come
        while coming:
            self._next_header(sock, image[:HEADER_BYTES], until)
            if image[: len(LAYERS_MAGIC)] == LAYERS_MAGIC:
                blocks, layers, payload = self._layers_of(sock, image, digests, coming)
                arrived(blocks, payload, layers)
                for digest in blocks:
                    coming[digest] = layers.stop
                    if layers.stop == len(self._layers):
                        del coming[digest]
            elif image[: len(IMAGE_MAGIC)] == IMAGE_MAGIC:
                digest = digest_of(image)
                if coming.get(digest) != 0:
                    raise BadImage("it is of another block")
                self._receive_payload(sock, image[HEADER_BYTES:])
                arrived((digest,), payload_of(image, self._layout, digest, self._nbytes))
                del coming[digest]
            else:
                raise BadImage("it is no image of a block")

    def _next_header(self, sock: socket.socket, head: memoryview, until: float) -> None:
        """Receives the header of what comes next."""
        while True:
            if time.monotonic() >= until:
                raise TimeoutError(f"not within timeout_s, {self._timeout_s:g} s")
            fill(sock, head)
            if head == _GONE:
                raise PeerRefused("the peer has no such blocks, and computes none")
            if head != _WAIT:
                return

    def _layers_of(
        self, sock: socket.socket, image: memoryview, digests: tuple[bytes, ...], coming: dict[bytes, int]
    ) -> tuple[tuple[bytes, ...], range, memoryview]:
        """Receives the layers of blocks that the header in `image` names.

        Raises:
            BadImage: they are damaged, of another layout or of other blocks, or not those that come next.
        """
        head = LayersHeader.read(image[:HEADER_BYTES])
        if head.layout != self._layout:
            raise BadImage("it is of another model, dtype or block size")
        if head.digest not in coming:
            raise BadImage("it is of another block")
        first, layers = digests.index(head.digest), head.layers
        blocks = digests[first : first + head.blocks]
        if len(blocks) != head.blocks or any(coming.get(each) != layers.start for each in blocks):
            raise BadImage(f"it has {head.blocks} blocks from layer {layers.start} on, and others come next")
        nbytes = len(blocks) * sum(self._layers[layers.start : layers.stop])
        if not layers.start < layers.stop <= len(self._layers) or not head.nbytes == nbytes <= self._nbytes:
            raise BadImage(f"it has {head.nbytes} bytes of layers {layers.start} to {layers.stop}")
        payload = image[HEADER_BYTES : HEADER_BYTES + nbytes]
        self._receive_payload(sock, payload)
        head.check(blocks, payload)
        return blocks, layers, payload

    # -- how payloads go; by a transfer engine in subclasses

    def _serve_to(self, sock: socket.socket) -> None:
        """Begins a proven connection, at the side that serves."""

    def _fetch_from(self, sock: socket.socket) -> None:
        """Begins one at the side that fetches."""

    def _send_payload(self, sock: socket.socket, payload: memoryview) -> None:
        sock.sendall(payload)

    def _receive_payload(self, sock: socket.socket, view: memoryview) -> None:
        fill(sock, view)
