"""Moves block images between engines over TCP, one connection for a load.

Both ends prove that they know the shared secret (challenge and response, HMAC with SHA-256, RFC 2104) before anything
is asked for, and that their K/V is laid out and computed alike: the layout's fingerprint has the model's files, the
number format and the kernels. Images carry their digest and a checksum, as files of the disk tier do; so do the
layers of blocks that come while later layers are computed. Nothing is encrypted. Knows nothing of pools: `BlockSource`
has the bytes.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.disk_tier import kept_secret
from engine.kv_cache.kv_connector import Arrived, BlockRequest, BlockSource, KVConnector, StagedBlocks
from engine.kv_cache.layer_parts import LAYERS_MAGIC, LayersHeader, layers_header
from engine.kv_cache.quantized_cache import QuantizedCache
from engine.kv_cache.snapshot import HEADER_BYTES, IMAGE_MAGIC, BadImage, digest_of, header, layout_of, payload_of
from engine.kv_cache.transfers import LayerStore
from engine.model.numerics import Numerics

if TYPE_CHECKING:
    from engine.model.batch import KVCache

log = logging.getLogger(__name__)

CONNECT_S = 2.0
STALL_S = 5.0  # without a byte, after which the other end is given up
HEARTBEAT_S = 1.0
MAX_CONNECTIONS = 256
MAX_BLOCKS = 1 << 20  # of a request

_GREETING = struct.Struct("<8s32s")  # magic, nonce
_PROOF = struct.Struct("<32s16s32s")  # nonce, layout, code
_VERDICT = struct.Struct("<B32s")  # whether the layout is the same, code
_REQUEST = struct.Struct("<II")  # number of the first block, blocks
_PROTOCOL = b"PonderT"
VERSION = 2  # of the protocol; 1 had no layers
_MAGIC = _PROTOCOL + b"%d" % VERSION
_WAIT = b"PonderWt".ljust(HEADER_BYTES, b"\0")  # in the place of an image: it is not computed yet
_GONE = b"PonderNo".ljust(HEADER_BYTES, b"\0")  # the rest will not come


MIN_SECRET = 16  # bytes


class PeerRefused(Exception):
    """The other end is not a peer, or has other K/V; the message says why."""


def _code(secret: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, side + b"".join(parts), "sha256")


def _received(sock: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    _fill(sock, memoryview(buffer))
    return buffer


def _fill(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("the connection ended")
        view = view[count:]


class TcpTransport:
    """Connections of one engine, whose blocks have `layer_nbytes` bytes in each layer, in `layout`."""

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
            if not self._admits(sock):
                return
            first, count = _REQUEST.unpack(_received(sock, _REQUEST.size))
            if not 0 < count <= MAX_BLOCKS:
                return
            data = bytes(_received(sock, 16 * count))
            digests = tuple(data[at : at + 16] for at in range(0, len(data), 16))
            self._send(sock, source, source.serve(first, digests))
        except OSError as error:
            if not self._closing:
                log.info("a K/V transfer to a peer ended: %s", error)
        finally:
            self._drop(sock)

    def _admits(self, sock: socket.socket) -> bool:
        """Returns whether the client has proved the secret and has the same layout; tells it, and proves it too."""
        nonce = secrets.token_bytes(32)
        sock.sendall(_GREETING.pack(_MAGIC, nonce))
        try:
            theirs, layout, code = _PROOF.unpack(_received(sock, _PROOF.size))
        except ConnectionError:
            log.warning("a client left at the greeting: it is no peer, or has another version than %d", VERSION)
            return False
        if not hmac.compare_digest(code, _code(self._secret, b"client", nonce, theirs, layout)):
            log.warning("a K/V transfer was refused: the client does not know the shared secret")
            return False
        alike = layout == self._layout
        verdict = bytes([alike])
        sock.sendall(_VERDICT.pack(alike, _code(self._secret, b"server", theirs, nonce, verdict)))
        return alike

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
            sock.sendall(payload)
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
        self._prove(sock)
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
                _fill(sock, image[HEADER_BYTES:])
                arrived((digest,), payload_of(image, self._layout, digest, self._nbytes))
                del coming[digest]
            else:
                raise BadImage("it is no image of a block")

    def _next_header(self, sock: socket.socket, head: memoryview, until: float) -> None:
        """Receives the header of what comes next."""
        while True:
            if time.monotonic() >= until:
                raise TimeoutError(f"not within timeout_s, {self._timeout_s:g} s")
            _fill(sock, head)
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
        _fill(sock, payload)
        head.check(blocks, payload)
        return blocks, layers, payload

    def _prove(self, sock: socket.socket) -> None:
        """Proves the secret, and has the server prove it.

        Raises:
            PeerRefused: it is no peer, or its K/V is of another model, dtype or layout.
        """
        magic, nonce = _GREETING.unpack(_received(sock, _GREETING.size))
        if not magic.startswith(_PROTOCOL):
            raise PeerRefused("no engine that serves K/V answers there")
        if magic != _MAGIC:
            theirs = magic.removeprefix(_PROTOCOL).decode("ascii", "replace")
            raise PeerRefused(
                f"the peer has version {theirs} of the protocol; accepted: {VERSION}, of the same release"
            )
        mine = secrets.token_bytes(32)
        sock.sendall(_PROOF.pack(mine, self._layout, _code(self._secret, b"client", nonce, mine, self._layout)))
        try:
            alike, code = _VERDICT.unpack(_received(sock, _VERDICT.size))
        except ConnectionError:
            raise PeerRefused("the peer has another shared secret") from None
        if not hmac.compare_digest(code, _code(self._secret, b"server", mine, nonce, bytes([alike]))):
            raise PeerRefused("the peer does not know the shared secret")
        if not alike:
            raise PeerRefused("the peer's K/V is of another model, dtype, block size, max_model_len or processor")


def shared_secret(path: str) -> bytes:
    """Reads the secret that peers share, without the white space around it.

    Raises:
        InvalidParameter: it cannot be read, or is too short.
    """
    accepted = f"accepted: a file of at least {MIN_SECRET} bytes that all peers have alike"
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        message = f"kv_transfer.secret_file {path} cannot be read ({error.strerror or error}); {accepted}."
        raise InvalidParameter("kv_transfer", message) from None
    if len(secret) < MIN_SECRET:
        message = f"kv_transfer.secret_file {path} has {len(secret)} bytes; {accepted}."
        raise InvalidParameter("kv_transfer", message)
    return secret


def digest_key(config: EngineConfig) -> bytes:
    """Returns the key of an engine's block digests: made of the secret that it shares, so that peers name blocks alike;
    else kept with its blocks on the disk, or made anew.

    Raises:
        InvalidParameter: the secret or the directory cannot be used.
    """
    if config.kv_transfer is not None:
        return hmac.digest(shared_secret(config.kv_transfer.secret_file), b"digests", "sha256")
    return kept_secret(Path(config.kv_dir)) if config.kv_dir is not None else secrets.token_bytes(32)


def build_connector(
    config: EngineConfig,
    model: bytes,
    numerics: Numerics,
    pool: BlockPool,
    kv: KVCache | QuantizedCache,
    store: LayerStore,
    device: torch.device,
) -> KVConnector | None:
    """Builds the connector that `config` asks for; None: none. `model` is the fingerprint of the model's files.

    Raises:
        InvalidParameter: the buffer is too small for one block, the secret cannot be used, the address is taken, or a
            prompt of the model cannot go on from the blocks of one table alone.
    """
    if (transfer := config.kv_transfer) is None:
        return None
    if kv.states is not None or kv.groups is not None:
        why = "recurrent layers" if kv.groups is None else "sliding windows in K/V groups of their own"
        message = f"kv_transfer is set, and {config.model} has {why}; accepted: a model whose layers share one block"
        raise InvalidParameter("kv_transfer", f"{message} table.")
    nbytes = kv.block_nbytes
    if transfer.kv_buffer_size < nbytes:
        message = f"kv_transfer.kv_buffer_size is {transfer.kv_buffer_size}; accepted: at least {nbytes}, one block of"
        raise InvalidParameter("kv_transfer", f"{message} this model.")
    layout = layout_of(model, config, numerics, kv.block_shape)
    address = (transfer.kv_ip, transfer.kv_port) if transfer.produces else None
    transport = TcpTransport(
        shared_secret(transfer.secret_file), layout, store.parts.nbytes, address=address, timeout_s=transfer.timeout_s
    )
    return KVConnector(
        pool,
        store,
        transport,
        config.block_size,
        nbytes,
        rows=transfer.kv_buffer_size // nbytes,
        listening=transfer.produces,
        pinned=device.type == "cuda",
        layerwise_tokens=transfer.layerwise_min_tokens if transfer.use_layerwise else None,
    )
