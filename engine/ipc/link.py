"""Interfaces between a handle and the core: pending requests, a handle's view of its engine, and the link that carries
commands and replies.

Knows nothing of threads or processes; `engine.Engine` implements the handle's view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from engine.config import Fallback
from engine.core import messages as m
from engine.errors import EngineError
from engine.multimodal.image_input import ImageInput
from engine.params import Speculation

State = Literal["running", "restarting", "stopped"]


class PendingRequest:
    """Replies to one request on their way to its awaiter."""

    def __init__(self, id: int) -> None:
        self.id = id
        self._arrived: list[m.Reply] = []
        self._failure: EngineError | None = None
        self._wake = asyncio.Event()

    async def replies(self) -> list[m.Reply]:
        """Returns all replies that have come since the last call, at least one.

        Raises:
            EngineStopped: the engine ended before it answered.
        """
        await self._wake.wait()
        self._wake.clear()
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            if self._failure is not None:  # it came with them, and is for the next call
                self._wake.set()
            return arrived
        assert self._failure is not None
        self._wake.set()
        raise self._failure

    def deliver(self, reply: m.Reply) -> None:
        self._arrived.append(reply)
        self._wake.set()

    def fail(self, error: EngineError) -> None:
        self._failure = error
        self._wake.set()


class Client(Protocol):
    """An engine as its handles see it."""

    max_model_len: int
    fallback: Fallback | None
    value_head: bool

    def next_id(self) -> int: ...

    def post(self, command: m.Command) -> None: ...

    def request(self, *, queued: bool = True) -> PendingRequest: ...

    def forget(self, request: PendingRequest) -> None: ...

    def check_tokens(self, tokens: Iterable[int]) -> None: ...

    def check_prompt(self, tokens: Sequence[int]) -> None: ...

    def check_whole(self, tokens: Sequence[int]) -> None: ...

    def add_images(self, tokens: Sequence[int]) -> tuple[ImageInput, ...]: ...

    def check_length(self, length: int) -> None: ...

    def check_queue(self) -> None: ...

    def check_speculation(self, speculation: Speculation | None) -> None: ...


class Link(Protocol):
    """The way to a core. Replies go to the `Listener` it was made with, on the event loop."""

    @property
    def state(self) -> State: ...

    async def start(self) -> m.Loaded:
        """Loads the model. Raises the errors of `Engine.start`."""
        ...

    def send(self, command: m.Command) -> None:
        """Sends a command; commands keep their order."""
        ...

    async def close(self) -> None:
        """Ends the core. Idempotent."""
        ...


class Listener(Protocol):
    """Receives the replies of a link."""

    def deliver(self, replies: list[m.Reply]) -> None: ...

    def given_up(self, request: int, error: EngineError) -> None:
        """Is called when the request will have no more replies."""
        ...

    def ended(self, error: EngineError) -> None:
        """Is called when no reply will come any more."""
        ...


@dataclass(frozen=True, slots=True)
class CoreListener:
    """The `Listener` of one core of several."""

    deliver: Callable[[list[m.Reply]], None]
    given_up: Callable[[int, EngineError], None]
    ended: Callable[[EngineError], None]
