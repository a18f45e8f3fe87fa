"""Moves payloads between engines by NIXL, NVIDIA's transfer library: RDMA where UCX has it, else shared memory or TCP.

A `TcpTransport` whose connections carry the proof, the requests, and each payload's header and address; the side that
fetches reads the payload from the other's registered staging rows (as vLLM's NixlConnector pulls) into a registered
buffer, and says so: the row is free then. Each payload is checked as one over TCP is. Imported where it is configured
alone: the package `nixl` is no dependency.
"""

from __future__ import annotations

import importlib
import logging
import socket
import struct
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.errors import InvalidParameter
from engine.kv_cache.tcp_transport import STALL_S, TcpTransport
from engine.kv_cache.transport.kv_transport import BlockSource
from engine.kv_cache.transport.peer_handshake import PeerRefused, received

log = logging.getLogger(__name__)

MAX_METADATA = 1 << 20  # bytes of an agent's description
_AGENT = struct.Struct("<I")  # bytes of the description that follows
_ADDRESS = struct.Struct("<QQ")  # of a payload in the sender's memory, and its bytes
_READ = b"r"  # the payload was read: its row is free
_SPINS = 64  # looks at a transfer before the thread sleeps between them
_PAUSE_S = 1e-4


def nixl_api() -> Any:  # the package has no types
    """Imports NIXL.

    Raises:
        InvalidParameter: it cannot be imported.
    """
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        message = f"kv_transfer.kv_connector is NixlConnector, and nixl cannot be imported ({error}); accepted: the "
        raise InvalidParameter("kv_transfer", f"{message}package nixl beside Ponder, or TcpConnector.") from None


@dataclass(frozen=True, slots=True)
class _Session:
    """A connection at the side that fetches: the other side's agent, and a registered buffer."""

    agent: str
    buffer: Tensor


class NixlTransport(TcpTransport):
    """Connections of one engine, whose payloads go by NIXL. Arguments as of `TcpTransport`."""

    magic = b"PonderN2"

    def __init__(
        self, secret: bytes, layout: bytes, layer_nbytes: Sequence[int], *, address: tuple[str, int] | None,
        timeout_s: float,
    ) -> None:  # fmt: skip
        """
        Raises:
            InvalidParameter: NIXL cannot be imported, or has no UCX.
        """
        super().__init__(secret, layout, layer_nbytes, address=address, timeout_s=timeout_s)
        api = nixl_api()
        try:
            self._agent = api.nixl_agent(f"ponder-{uuid.uuid4().hex}", api.nixl_agent_config(backends=["UCX"]))
        except Exception as error:  # of the library's own kinds
            message = f"kv_transfer.kv_connector is NixlConnector, and NIXL does not start with UCX ({error}); "
            raise InvalidParameter("kv_transfer", f"{message}accepted: TcpConnector.") from None
        self._calls = threading.Lock()  # one call of the agent at a time
        self._sessions: dict[socket.socket, _Session] = {}
        self._buffers: list[Tensor] = []  # registered, and free
        self._registered: list[Any] = []  # descriptors of the library's

    # -- serving

    def listen(self, source: BlockSource) -> None:
        self._register(source.memory)
        with self._calls:
            self._described: bytes = self._agent.get_agent_metadata()
        super().listen(source)

    def _serve_to(self, sock: socket.socket) -> None:
        sock.sendall(_AGENT.pack(len(self._described)) + self._described)

    def _send_payload(self, sock: socket.socket, payload: memoryview) -> None:
        row = torch.frombuffer(payload, dtype=torch.uint8)
        sock.sendall(_ADDRESS.pack(row.data_ptr(), row.nbytes))
        if received(sock, len(_READ)) != _READ:
            raise ConnectionError("the peer does not say that it has read a block")

    # -- fetching

    def _fetch_from(self, sock: socket.socket) -> None:
        (count,) = _AGENT.unpack(received(sock, _AGENT.size))
        if not 0 < count <= MAX_METADATA:
            raise PeerRefused("the peer does not describe its agent of NIXL")
        described = bytes(received(sock, count))
        try:
            with self._calls:
                name = self._agent.add_remote_agent(described)
                buffer = self._buffers.pop() if self._buffers else None
        except Exception as error:  # of the library's own kinds
            raise PeerRefused(f"the peer's agent of NIXL cannot be reached: {error!r}") from None
        if buffer is None:
            self._register(buffer := torch.empty(self._nbytes, dtype=torch.uint8))
        self._sessions[sock] = _Session(name.decode() if isinstance(name, bytes) else str(name), buffer)

    def _receive_payload(self, sock: socket.socket, view: memoryview) -> None:
        address, nbytes = _ADDRESS.unpack(received(sock, _ADDRESS.size))
        session = self._sessions[sock]
        if nbytes != len(view):
            raise ConnectionError(f"the peer has {nbytes} bytes, and {len(view)} are awaited")
        self._read(session, address, nbytes)
        torch.frombuffer(view, dtype=torch.uint8).copy_(session.buffer[:nbytes])
        sock.sendall(_READ)

    def _read(self, session: _Session, address: int, nbytes: int) -> None:
        """Reads the other side's memory into a session's buffer.

        Raises:
            OSError: the peer is gone, or takes too long.
        """
        handle, until = None, time.monotonic() + STALL_S
        try:
            with self._calls:
                local = self._agent.get_xfer_descs([(session.buffer.data_ptr(), nbytes, 0)], "DRAM")
                remote = self._agent.get_xfer_descs([(address, nbytes, 0)], "DRAM")
                handle = self._agent.initialize_xfer("READ", local, remote, session.agent)
                state = self._agent.transfer(handle)
            looks = 0
            while state == "PROC":
                if time.monotonic() >= until:
                    raise TimeoutError(f"NIXL has not read a block within {STALL_S:g} s")
                if (looks := looks + 1) > _SPINS:
                    time.sleep(_PAUSE_S)
                with self._calls:
                    state = self._agent.check_xfer_state(handle)
        except OSError:
            raise
        except Exception as error:  # of the library's own kinds
            raise ConnectionError(f"NIXL cannot read from the peer: {error!r}") from None
        finally:
            if handle is not None:
                with self._calls:
                    self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise ConnectionError(f"NIXL ended a transfer with {state}")

    # -- both sides

    def _register(self, memory: Tensor) -> None:
        with self._calls:
            self._registered.append(self._agent.register_memory([(memory.data_ptr(), memory.nbytes, 0, "")], "DRAM"))

    def _drop(self, sock: socket.socket) -> None:
        if (session := self._sessions.pop(sock, None)) is not None:
            with self._calls:
                self._buffers.append(session.buffer)
        super()._drop(sock)

    def close(self) -> None:
        super().close()
        with self._calls:
            for each in self._registered:
                self._agent.deregister_memory(each)
            self._registered.clear()
            del self._agent
