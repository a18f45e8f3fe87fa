"""The process that a core runs in: `python -m engine.ipc.child`, started by `supervisor.py` only.

It reads its start from stdin and then watches it: when stdin closes, its parent is gone, and it ends. Signals that a
terminal or a service manager sends to a whole group are for the server, which stops this process itself.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import zmq

from engine.builder import EngineParts, use_threads
from engine.child_process import end_with_parent, read_start
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.core.loop import calm_collector, drive
from engine.errors import EngineError
from engine.ipc import wire
from engine.ipc.core_process import CoreStart, address, identity

_LINGER_MS = 2_000  # for the last replies to leave

log = logging.getLogger(__name__)


class Mail:
    """A mailbox for several clients, which are told apart by the number that their ids begin with.

    Threads of this process post to a queue and then write a byte to a pipe, which wakes `take`. It empties the pipe
    first and the queue after it: a byte that it reads stands for a command that is in the queue already, and one that
    comes later wakes it again, at worst for nothing.
    """

    def __init__(self, socket: zmq.Socket[bytes], loaded: m.Loaded) -> None:
        self._socket = socket
        self._hello = wire.encode_replies([loaded])
        self._own: deque[m.Command] = deque()  # from threads of this process
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)

    def post(self, command: m.Command) -> None:
        """Posts a command from any thread."""
        self._own.append(command)
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake, b"\0")

    def take(self, timeout_s: float | None) -> Iterable[m.Command]:
        if timeout_s != 0:
            self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
        with contextlib.suppress(BlockingIOError):  # empty: the post has not written its byte yet
            os.read(self._woken, 1 << 16)
        commands = self._received()
        while self._own:
            commands.append(self._own.popleft())
        return commands

    def send(self, replies: list[m.Reply]) -> None:
        by_client: dict[int, list[m.Reply | m.Loaded | wire.Failure]] = {}
        for reply in replies:
            by_client.setdefault(m.client_of(reply.request), []).append(reply)
        for client, own in by_client.items():
            self._socket.send_multipart([identity(client), wire.encode_replies(own)])

    def _received(self) -> list[m.Command]:
        commands: list[m.Command] = []
        while True:
            try:
                who, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return commands
            for command in wire.decode_commands(data):
                if isinstance(command, wire.Hello):
                    self._socket.send_multipart([who, self._hello])
                else:
                    commands.append(command)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    source = sys.stdin.buffer
    start = read_start(CoreStart)
    logging.basicConfig(level=start.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    clean = partial(shutil.rmtree, Path(start.directory), ignore_errors=True)
    threading.Thread(target=end_with_parent, args=(source.fileno(), clean), daemon=True).start()
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as socket:
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.set(option, 0)
        socket.set(zmq.LINGER, _LINGER_MS)
        socket.bind(address(start.directory))
        try:
            parts = _assembled(start)
        except EngineError as error:
            _refuse(socket, wire.failure(error))
        else:
            _run(parts, socket)
    context.term()


def _assembled(start: CoreStart) -> EngineParts:
    module, _, name = start.assemble.partition(":")
    parts: EngineParts = getattr(importlib.import_module(module), name)(start.config)
    return parts


def _refuse(socket: zmq.Socket[bytes], failure: wire.Failure) -> None:
    """Tells the waiting client why there is no core."""
    if socket.poll(_LINGER_MS):
        who, _ = socket.recv_multipart()
        socket.send_multipart([who, wire.encode_replies([failure])])


def _run(parts: EngineParts, socket: zmq.Socket[bytes]) -> None:
    mail = Mail(socket, parts.loaded)
    core: EngineCore = parts.core
    core.post_with(mail.post)
    use_threads(parts.loaded.threads, parts.loaded.device)
    calm_collector()
    drive(core, mail)
    parts.compiler.close()
    parts.end()


if __name__ == "__main__":
    main()
