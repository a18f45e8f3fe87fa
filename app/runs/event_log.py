"""The event log of a run, and the recorder of an answer's steps.

The log is append-only, and on disk before any reader gets it. Any number of readers follow by sequence number, each at
its own pace, so a reload or a second tab reads the very same log. A step is the model's text, the calls that followed
and their results; a call that never returned is no step, as the model has not read its result.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, TypeVar

from pydantic import BaseModel

from app.db.answer_steps import RESULT_CHARACTERS, AnswerStep, StepCall, StepResult
from app.db.run_store import LoggedEvent, RunAnswer
from app.db.sqlite import RunTaken
from app.runs.events import TERMINAL, AnswerDelta, ThinkingDelta
from tools.outcome import Call
from tools.result import shorten

if TYPE_CHECKING:
    from reasoning.thinking import Part


COALESCE_S = 0.025


def status_of(events: Sequence[LoggedEvent]) -> str:
    """Returns "running", or how the run ended that has these events so far."""
    last = events[-1].type if events else ""
    return last.removeprefix("run.") if last in TERMINAL else "running"


class EventStore(Protocol):
    """The part of a store that a log needs."""

    def write_events(self, run_id: str, events: Sequence[LoggedEvent], answer: RunAnswer | None = None) -> Future[None]:
        """Append to a run's log, in the order of the calls; done when a crash of this process cannot take them.

        `answer`: how the run ends with them. The future fails with `RunTaken` where the run is another server's now.
        """
        ...


class RunLog:
    """Events numbered from 1. It has ended when its last event is terminal; nothing is appended after that.

    Appended events go to the disk at once, and readers get them afterwards: after a crash the log has all that anybody
    saw. While a write is under way more events gather for the next, so a slow disk makes larger pieces, not a queue.
    Where another server has taken the run over, the log is `taken`: it goes on there, and ends here without its end.
    """

    def __init__(
        self,
        run_id: str,
        store: EventStore,
        events: Iterable[LoggedEvent] = (),
        *,
        publish: Callable[[str, Sequence[LoggedEvent]], None] = lambda run_id, events: None,
        on_taken: Callable[[], None] = lambda: None,
    ) -> None:
        """`publish` gets what is on disk, for the readers at other servers."""
        self.run_id = run_id
        self.taken = False
        self._publish = publish
        self._on_taken = on_taken
        self._answer: RunAnswer | None = None  # written with the last event
        self.events = list(events)  # on disk
        self._coming: list[LoggedEvent] = []  # not yet
        self._unwritten = 0  # of those, at the end, that were not handed to the store
        self._writing = 0
        self._store = store
        self._grown = asyncio.Event()
        self._last = self.events[-1] if self.events else None

    @property
    def ended(self) -> bool:
        """True when nothing comes any more; its readers may not have read that yet."""
        return self.taken or (self._last is not None and self._last.type in TERMINAL)

    @property
    def status(self) -> str:
        """ "running" until readers can have the end, then how it ended."""
        return status_of(self.events)

    @property
    def last_seq(self) -> int:
        """The number of the last event that readers can have."""
        return self.events[-1].seq if self.events else 0

    def append(self, event: BaseModel, answer: RunAnswer | None = None) -> None:
        """Add one event; with the terminal one the answer as it ended. Ignored once the log has ended."""
        if self.ended:
            return
        self._answer = answer
        kind: str = getattr(event, "type")  # noqa: B009  # every event of app/runs/events.py has one, BaseModel has not
        self._last = LoggedEvent(1 if self._last is None else self._last.seq + 1, kind, event.model_dump_json())
        self._coming.append(self._last)
        self._unwritten += 1
        if not self._writing or self.ended:
            self.flush()

    def flush(self) -> None:
        """Hand new events to the store, before its later writes."""
        if self._unwritten:
            events, self._unwritten = self._coming[-self._unwritten :], 0
            self._writing += 1
            loop = asyncio.get_running_loop()
            written = self._store.write_events(self.run_id, events, self._answer)
            written.add_done_callback(lambda done: _call_soon(loop, self._written, (len(events), done.exception())))

    def _written(self, outcome: tuple[int, BaseException | None]) -> None:
        """Shows events to readers, also those that could not be written (the store says why in its own log)."""
        count, error = outcome
        self._writing -= 1
        if self.taken:
            return
        if isinstance(error, RunTaken):
            self._coming.clear()
            self._unwritten = 0
            self.taken = True
            self._on_taken()
        else:
            if error is None:
                self._publish(self.run_id, self._coming[:count])
            self.events += self._coming[:count]
            del self._coming[:count]
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()
        if not self._writing:
            self.flush()

    async def follow(self, after: int = 0) -> AsyncGenerator[LoggedEvent, None]:
        """Events with a number above `after`, waiting for new ones until the log ends."""
        at = self._first(after)
        while True:
            while at < len(self.events):
                at += 1
                yield self.events[at - 1]
            if self.ended and not self._coming:
                return
            await self._grown.wait()

    async def there(self, after: int = 0) -> AsyncGenerator[LoggedEvent, None]:
        """Events with a number above `after` that are there now."""
        for event in self.events[self._first(after) :]:
            yield event

    def _first(self, after: int) -> int:
        return next((i for i, e in enumerate(self.events) if e.seq > after), len(self.events))

    async def settled(self) -> None:
        """Wait until readers can have all that was appended."""
        while self._coming:
            await self._grown.wait()


T = TypeVar("T")


def _call_soon(loop: asyncio.AbstractEventLoop, work: Callable[[T], None], given: T) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: there are no readers any more
        loop.call_soon_threadsafe(work, given)


class Deltas:
    """Text on its way into a log, gathered for some 25 ms: the first piece goes at once, the rest in small batches."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._part: Part = "answer"
        self._texts: list[str] = []
        self._length = 0
        self._guessed: list[int] = []  # characters from, to, from, to …
        self._sent_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def add(self, part: Part, text: str, *, guessed: bool = False) -> None:
        if not text:
            return
        self.flush_unless(part)
        self._part = part
        self._texts.append(text)
        began, self._length = self._length, self._length + len(text)
        if guessed and self._guessed[-1:] == [began]:
            self._guessed[-1] = self._length
        elif guessed:
            self._guessed += (began, self._length)
        loop = asyncio.get_running_loop()
        wait_s = self._sent_at + COALESCE_S - loop.time()
        if wait_s <= 0:
            self.flush()
        elif self._timer is None:
            self._timer = loop.call_later(wait_s, self.flush)

    def flush_unless(self, part: Part) -> None:
        """Flush if the pending text is of another part."""
        if part != self._part:
            self.flush()

    def flush(self) -> None:
        """Send the pending text."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._texts:
            return
        text = "".join(self._texts)
        self._texts.clear()
        self._sent_at = asyncio.get_running_loop().time()
        guessed, self._guessed, self._length = self._guessed, [], 0
        thinks = self._part == "thinking"
        self._log.append(ThinkingDelta(text=text) if thinks else AnswerDelta(text=text, guessed=guessed))


class StepRecorder:
    def __init__(self) -> None:
        self._closed: list[AnswerStep] = []
        self._text: list[str] = []
        self._calls: list[StepCall] = []
        self._results: list[StepResult] = []

    def wrote(self, text: str) -> None:
        self.next()
        self._text.append(text)

    def returned(self, call: Call, text: str, *, untrusted: bool) -> None:
        """A call's result as the model reads it."""
        self._calls.append(StepCall(id=call.id, name=call.name, arguments=str(call.arguments)))
        kept, _ = shorten(text, RESULT_CHARACTERS)
        self._results.append(StepResult(call_id=call.id, text=kept, untrusted=untrusted))

    def next(self) -> None:
        """Closes a step that has results: the text and calls to come were made after them."""
        if self._results:
            self._closed.append(AnswerStep(content="".join(self._text), calls=self._calls, results=self._results))
            self._text, self._calls, self._results = [], [], []

    def steps(self) -> list[AnswerStep]:
        """All steps, the answer's own as the last; none where nothing was called."""
        self.next()
        return [*self._closed, AnswerStep(content="".join(self._text))] if self._closed else []
