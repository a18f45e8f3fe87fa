"""The append-only event log of one run, in memory while it grows and on disk soon after.

Writers append; any number of readers follow by sequence number, each at its own pace, so a reload or a second tab
reads the very same log. Knows nothing of how answers are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING

from pydantic import BaseModel

from app.runs.events import TERMINAL, AnswerDelta, ThinkingDelta
from app.store import LoggedEvent

if TYPE_CHECKING:
    from app.store import Store
    from reasoning.thinking import Part

COALESCE_S = 0.025
_FLUSH_S = 0.1


class RunLog:
    """Events numbered from 1. It has ended when its last event is terminal; nothing is appended after that."""

    def __init__(self, run_id: str, store: Store, events: Iterable[LoggedEvent] = ()) -> None:
        self.run_id = run_id
        self.events = list(events)
        self._store = store
        self._unwritten: list[LoggedEvent] = []
        self._grown = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.events[-1].type in TERMINAL

    @property
    def last_seq(self) -> int:
        return self.events[-1].seq if self.events else 0

    def append(self, event: BaseModel) -> None:
        """Add one event and wake every reader. Ignored once the log has ended."""
        if self.ended:
            return
        kind: str = getattr(event, "type")  # noqa: B009  # every event of app/runs/events.py has one, BaseModel has not
        logged = LoggedEvent(self.last_seq + 1, kind, event.model_dump_json())
        self.events.append(logged)
        self._unwritten.append(logged)
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()
        if self.ended:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)

    def flush(self) -> None:
        """Hand what is new to the disk."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unwritten:
            unwritten, self._unwritten = self._unwritten, []
            self._store.write_events(self.run_id, unwritten)

    async def follow(self, after: int = 0) -> AsyncGenerator[LoggedEvent, None]:
        """Events with a number above `after`, waiting for new ones until the log ends."""
        at = next((i for i, e in enumerate(self.events) if e.seq > after), len(self.events))
        while True:
            while at < len(self.events):
                at += 1
                yield self.events[at - 1]
            if self.ended:
                return
            await self._grown.wait()


class Deltas:
    """Text on its way into a log, gathered for some 25 ms: the first piece goes at once, the rest in small batches."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._part: Part = "answer"
        self._texts: list[str] = []
        self._sent_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def add(self, part: Part, text: str) -> None:
        if not text:
            return
        self.flush_unless(part)
        self._part = part
        self._texts.append(text)
        loop = asyncio.get_running_loop()
        wait_s = self._sent_at + COALESCE_S - loop.time()
        if wait_s <= 0:
            self.flush()
        elif self._timer is None:
            self._timer = loop.call_later(wait_s, self.flush)

    def flush_unless(self, part: Part) -> None:
        """Flush if what waits is of another part."""
        if part != self._part:
            self.flush()

    def flush(self) -> None:
        """Send what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._texts:
            return
        text = "".join(self._texts)
        self._texts.clear()
        self._sent_at = asyncio.get_running_loop().time()
        self._log.append(ThinkingDelta(text=text) if self._part == "thinking" else AnswerDelta(text=text))
