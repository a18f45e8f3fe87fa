"""The mailbox of an engine's process: no command is lost, sleeps or kills, however its threads take turns."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq

from engine import GREEDY, Engine, EngineConfig, Span
from engine.builder import EngineParts
from engine.builder import build as assemble_default
from engine.core import messages as m
from engine.ipc.child import Mail
from engine.ipc.supervisor import SupervisedLink
from engine.model.numerics import Numerics
from engine.structured_output import JsonSchema
from engine.structured_output.layout import Constrained

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on

SOON_S = 20.0  # for commands that are there already
LATE_READ_S, LATE_WRITE_S = 0.004, 0.04  # before the system calls of a child
NUMERICS = Numerics("float32", "torch", "none", "auto", "cpu", "", 1, "", batch_invariant=False)
LOADED = m.Loaded("", 1, 1, "cpu", "float32", 1, NUMERICS)


class Watched(deque[m.Command]):
    """A mailbox's queue that calls back: after a command was put in, and when it was found empty."""

    appended: Callable[[], object] = staticmethod(lambda: None)
    found_empty: Callable[[], object] = staticmethod(lambda: None)

    def append(self, command: m.Command, /) -> None:
        super().append(command)
        self.appended()

    def __bool__(self) -> bool:
        if len(self):
            return True
        self.found_empty()
        return False


@pytest.fixture
def mail() -> Iterator[Mail]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        mail = Mail(socket, LOADED)
        mail._own = Watched()
        yield mail
        os.close(mail._woken)
        os.close(mail._wake)


def queue_of(mail: Mail) -> Watched:
    assert isinstance(mail._own, Watched)
    return mail._own


def taken(mail: Mail) -> list[m.Command]:
    """Takes with no limit, in a thread that is left behind if it sleeps for ever."""
    found: list[m.Command] = []
    thread = threading.Thread(target=lambda: found.extend(mail.take(None)), daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive(), "the command was not noticed"
    return found


def test_a_command_is_taken_before_its_wake_byte_is_written(mail: Mail) -> None:
    appended, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        appended.set()
        go_on.wait()

    queue_of(mail).appended = pause
    poster = threading.Thread(target=mail.post, args=(m.TransferDone(),))
    poster.start()
    appended.wait()
    try:
        assert list(mail.take(0.0)) == [m.TransferDone()]
    finally:
        go_on.set()
        poster.join()
    assert taken(mail) == []  # the byte comes late: it wakes for nothing, once
    assert list(mail.take(0.0)) == []


def test_a_command_that_comes_while_others_are_taken_wakes_the_next_take(mail: Mail) -> None:
    queue = queue_of(mail)

    def post_once() -> None:
        del queue.found_empty
        mail.post(m.Leave(2))

    mail.post(m.Leave(1))
    queue.found_empty = post_once
    assert list(mail.take(0.0)) == [m.Leave(1)]
    assert taken(mail) == [m.Leave(2)]


def test_more_commands_than_the_pipe_holds_bytes_are_all_taken(mail: Mail) -> None:
    count = (1 << 16) + 1_000
    for _ in range(count):
        mail.post(m.TransferDone())
    assert len(list(mail.take(None))) == count
    mail.post(m.Leave(1))
    assert taken(mail) == [m.Leave(1)]


def test_many_threads_post_while_one_takes(mail: Mail) -> None:
    threads, each = 8, 500

    def post() -> None:
        for _ in range(each):
            mail.post(m.TransferDone())

    posters = [threading.Thread(target=post, daemon=True) for _ in range(threads)]
    for poster in posters:
        poster.start()
    got = 0
    while got < threads * each:
        got += len(taken(mail))
    assert got == threads * each


def assemble_with_pauses(config: EngineConfig) -> EngineParts:
    """An engine in whose process threads halt between posting a command and waking, and between waking and taking."""
    read, write = os.read, os.write

    def late_read(file: int, most: int) -> bytes:
        time.sleep(LATE_READ_S)
        return read(file, most)

    def late_write(file: int, data: Buffer) -> int:
        if data == b"\0":
            time.sleep(LATE_WRITE_S)
        return write(file, data)

    os.read, os.write = late_read, late_write
    return assemble_default(config)


@pytest.mark.slow
async def test_a_process_whose_threads_are_late_lives_and_answers(random_model: Path) -> None:
    config = EngineConfig(str(random_model), dtype="float32", kv_blocks=256, runs_in="process")
    schemas = [Constrained(JsonSchema(f'{{"type":"integer","minimum":{i}}}')) for i in range(6)]

    async def answer(engine: Engine, span: Span) -> None:
        async with await engine.open([5, 6, 7]) as seq:
            assert (await seq.generate_all(span)).token_ids

    async with await Engine.start(config, assemble_with_pauses) as engine:
        assert isinstance(engine._link, SupervisedLink)
        pid = engine._link.pid
        busy = Span(GREEDY, max_tokens=500, ignore_eos=True)
        spans = [busy, busy, *(Span(GREEDY, max_tokens=20, constraint=schema) for schema in schemas)]
        await asyncio.gather(*(answer(engine, span) for span in spans))
        assert engine.state == "running" and engine._link.pid == pid
