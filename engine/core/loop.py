"""The loop of a core: commands from a mailbox, a step, replies to the mailbox, until a `Stop` comes.

When nothing runs it waits in the mailbox and uses no CPU. Knows nothing of threads or sockets.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from engine.core import messages as m

if TYPE_CHECKING:
    from engine.core.engine_core import (
        EngineCore,  # it imports torch, and a process without a core calms its collector, too
    )


class Mailbox(Protocol):
    """The core's side of the link to its clients."""

    def take(self, timeout_s: float | None) -> Iterable[m.Command]:
        """Takes the commands that have come, in order. Waits for the first for so many seconds; None: for ever."""
        ...

    def send(self, replies: list[m.Reply]) -> None: ...


def calm_collector() -> None:
    """Makes Python's garbage collector skip all present objects, above all torch's, and run less often, in a process
    that serves. Else each full collection halts every stream for some 60 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def drive(core: EngineCore, mail: Mailbox) -> None:
    """Runs until a `Stop` comes; by then it has been handled, and its replies are sent."""
    while True:
        for command in mail.take(0.0 if core.has_work else _patience(core)):
            core.handle(command)
            if isinstance(command, m.Stop):
                core.settle()
                _send(core, mail)
                return
        core.step()
        _send(core, mail)


def _send(core: EngineCore, mail: Mailbox) -> None:
    replies = core.take_replies()
    if replies:
        mail.send(replies)


def _patience(core: EngineCore) -> float | None:
    deadline = core.next_deadline()
    return None if deadline is None else max(0.0, deadline - time.monotonic())
