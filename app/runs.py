"""Runs: answers being made for the chat page, each a task that writes a log.

A run belongs to the server, not to a connection: closing the page does not stop it, `cancel` does. Whatever happens,
its log ends with exactly one terminal event, and the chat's message says the same. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from app.errors import from_exception, invalid
from app.events import (
    AnswerDone,
    Metrics,
    RunCancelled,
    RunCompleted,
    RunFailed,
    RunQueued,
    RunStarted,
    ThinkingDone,
    ThinkingStarted,
)
from app.metrics import Meter, Watch
from app.run_log import Deltas, RunLog
from app.served import Served
from app.store import Answer, LoggedEvent, Row, Store
from app.thinking import Piece, Tally, think_and_answer
from engine.params import Span

if TYPE_CHECKING:
    from engine import Sequence as EngineSequence

_METRICS_S = 0.25
_TITLE_CHARACTERS = 60
STOPPING = RunFailed(
    code="server_stopping", message="The server was stopped before the answer was done.", retryable=True
)
RESTARTED = RunFailed(
    code="server_restarted", message="The server restarted before the answer was done.", retryable=True
)


class ChatBusy(Exception):
    """The chat's last answer is still being made."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a person asked for, checked already. None: what the model's authors chose."""

    content: str
    temperature: float | None = None
    max_tokens: int | None = None
    thinking: bool | None = None

    def params(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "max_tokens": self.max_tokens, "thinking": self.thinking}


@dataclass(slots=True, eq=False)
class Run:
    """One answer as it grows. Text already in `content` and `thinking` may still be on its way into the log."""

    id: str
    chat_id: str
    log: RunLog
    watch: Watch
    began: float = field(default_factory=time.perf_counter)
    started: bool = False
    ending: RunFailed | None = None  # what to end with when cancelled; None: run.cancelled
    tally: Tally = field(default_factory=Tally)
    content: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    thinking_began: float | None = None
    thinking_tokens: int = 0
    thinking_s: float | None = None
    first_token_at: float | None = None
    metrics_at: float = 0.0
    task: asyncio.Task[None] | None = None

    def metrics(self) -> Metrics | None:
        if self.first_token_at is None:
            return None
        elapsed = time.perf_counter() - self.first_token_at
        rate = (self.tally.completion_tokens - 1) / elapsed if self.tally.completion_tokens > 1 and elapsed > 0 else 0.0
        ttft_s = self.first_token_at - self.began
        return Metrics(ttft_s=ttft_s, tokens_per_s=rate, completion_tokens=self.tally.completion_tokens)


class Runs:
    """All runs of one server: those being made, in memory; those that ended, in the store."""

    def __init__(self, served: Served, meter: Meter, store: Store) -> None:
        self._served = served
        self._meter = meter
        self._store = store
        self._live: dict[str, Run] = {}
        self._busy_chats: dict[str, str] = {}  # chat id -> run id
        self._closing = False

    async def recover(self) -> int:
        """End the runs that an earlier server left unfinished; how many there were."""
        terminal = LoggedEvent(0, RESTARTED.type, RESTARTED.model_dump_json())
        return await self._store.fail_unfinished(terminal, RESTARTED.message)

    async def start(self, chat_id: str, ask: Ask) -> tuple[str, str] | None:
        """Begin an answer: the run's id and its message's, or None when there is no such chat.

        Raises:
            ChatBusy: the chat has an unfinished run.
            EngineStopped: the server is stopping.
        """
        if self._closing:
            from engine.errors import EngineStopped

            raise EngineStopped("The server is stopping.")
        if chat_id in self._busy_chats:
            raise ChatBusy
        run_id = f"run_{uuid.uuid4().hex}"
        self._busy_chats[chat_id] = run_id
        message_id: str | None = None
        try:
            history = await self._store.messages(chat_id)
            message_id = await self._store.begin_run(chat_id, run_id, ask.content, _title(ask.content), ask.params())
        finally:
            if message_id is None:
                del self._busy_chats[chat_id]
        if message_id is None:
            return None
        run = Run(run_id, chat_id, RunLog(run_id, self._store), self._meter.watch("runs"))
        run.log.append(RunQueued(position=sum(not r.started for r in self._live.values())))
        self._live[run_id] = run
        run.task = asyncio.create_task(self._work(run, _messages(history, ask.content), ask), name=run_id)
        run.task.add_done_callback(lambda _: self._ended(run))
        return run_id, message_id

    def live(self, run_id: str) -> Run | None:
        return self._live.get(run_id)

    def active_in(self, chat_id: str) -> str | None:
        return self._busy_chats.get(chat_id)

    async def log(self, run_id: str) -> RunLog | None:
        """A run's log, live or from the store; None when there is no such run."""
        if run := self._live.get(run_id):
            return run.log
        if await self._store.run(run_id) is None:
            return None
        # A log that a failing disk left without its end gets one here, or its readers would wait for ever.
        log = RunLog(run_id, self._store, await self._store.events(run_id))
        if run := self._live.get(run_id):
            return run.log
        log.append(RESTARTED)
        return log

    async def cancel(self, run_id: str) -> None:
        """End a run and wait until it has. One that has ended already stays as it is."""
        if (run := self._live.get(run_id)) and run.task:
            run.task.cancel()
            await asyncio.wait({run.task})

    async def stop(self) -> None:
        """End every run because the server stops, and let no more begin."""
        self._closing = True
        tasks = set()
        for run in self._live.values():
            run.ending = STOPPING
            if run.task:
                run.task.cancel()
                tasks.add(run.task)
        if tasks:
            await asyncio.wait(tasks)

    # -- one run

    async def _work(self, run: Run, messages: list[Row], ask: Ask) -> None:
        deltas = Deltas(run.log)
        try:
            finish = await self._generate(run, messages, ask, deltas)
            deltas.flush()
            self._close_thinking(run)
            run.log.append(AnswerDone(text="".join(run.content), finish_reason=finish))
            if metrics := run.metrics():
                run.log.append(metrics)
            self._end(run, RunCompleted(usage=run.tally.usage()))
        except asyncio.CancelledError:
            deltas.flush()
            self._end(run, run.ending or RunCancelled(usage=run.tally.usage()))
        except Exception as error:
            deltas.flush()
            explained = from_exception(error)
            retryable = explained.status in (429, 500, 503)
            self._end(
                run, RunFailed(code=explained.code or "error", message=explained.message, retryable=retryable)
            )

    async def _generate(self, run: Run, messages: list[Row], ask: Ask, deltas: Deltas) -> Any:
        """Make the answer; its finish reason, "stop" or "length"."""
        served = self._served
        variables = {} if ask.thinking is None else {"enable_thinking": ask.thinking}
        prompt = await served.chat_tokens(messages, variables)
        room = served.engine.max_tokens - len(prompt)
        if room < 1:
            raise invalid(
                "content", f"This conversation has {len(prompt)} tokens and the model's context "
                f"{served.engine.max_tokens}. Start a new chat, or ask a shorter question.", "context_length_exceeded",
            )  # fmt: skip
        limit = min(ask.max_tokens or room, room)
        sampling = served.sampling if ask.temperature is None else replace(served.sampling, temperature=ask.temperature)
        run.tally.prompt_tokens = len(prompt)
        seq: EngineSequence
        async with await served.engine.open(prompt) as seq:
            run.started = True
            run.log.append(RunStarted(model=served.name, started_at=time.time(), max_tokens=limit))
            span = Span(sampling=sampling, max_tokens=limit)
            opened = served.opens_thinking(prompt)
            finish = "length"
            async with aclosing(think_and_answer(seq, span, served.markers, opened=opened)) as pieces:
                async for piece in pieces:
                    self._take(run, piece, deltas)
                    if piece.finish_reason is not None:
                        finish = "stop" if piece.finish_reason == "stop" else "length"
        return finish

    def _take(self, run: Run, piece: Piece, deltas: Deltas) -> None:
        now = time.perf_counter()
        if run.first_token_at is None:
            run.tally.cached_tokens = piece.cached_tokens
            if piece.spent:
                run.first_token_at = run.metrics_at = now
        run.watch.tokens(0, piece.spent)
        run.tally.add(piece)
        if piece.part == "thinking":
            run.thinking_tokens += piece.spent
            if piece.text and run.thinking_began is None:
                deltas.flush()
                run.thinking_began = now
                run.log.append(ThinkingStarted(started_at=time.time()))
            run.thinking.append(piece.text)
        elif piece.text:
            if run.thinking_began is not None:
                deltas.flush()
                self._close_thinking(run)
            run.content.append(piece.text)
        deltas.add(piece.part, piece.text)
        if now - run.metrics_at >= _METRICS_S and (metrics := run.metrics()):
            run.metrics_at = now
            run.log.append(metrics)

    def _close_thinking(self, run: Run) -> None:
        if run.thinking_began is None:
            return
        duration_s = time.perf_counter() - run.thinking_began
        run.thinking_s = (run.thinking_s or 0.0) + duration_s
        run.log.append(ThinkingDone(duration_s=duration_s, tokens=run.thinking_tokens))
        run.thinking_began = None
        run.thinking_tokens = 0

    def _end(self, run: Run, terminal: RunCompleted | RunFailed | RunCancelled) -> None:
        """Write the one terminal event and the chat's message. The message is on its way to the store first."""
        if run.log.ended:
            return
        if run.thinking_began is not None:
            run.thinking_s = (run.thinking_s or 0.0) + time.perf_counter() - run.thinking_began
        status = terminal.type.removeprefix("run.")
        metrics = run.metrics()
        self._store.end_run(
            run.id,
            Answer(
                status=status,
                content="".join(run.content),
                thinking="".join(run.thinking),
                thinking_s=run.thinking_s,
                ttft_s=metrics.ttft_s if metrics else None,
                tokens_per_s=metrics.tokens_per_s if metrics else None,
                usage=run.tally.usage(),
                error=terminal.message if isinstance(terminal, RunFailed) else None,
            ),
        )
        # Before the readers hear of the end: the next question must find the chat free.
        self._busy_chats.pop(run.chat_id, None)
        run.log.append(terminal)
        run.watch.end(status)

    def _ended(self, run: Run) -> None:
        # A task that is cancelled before its first step never runs: its log still ends.
        self._end(run, run.ending or RunCancelled(usage=run.tally.usage()))
        self._live.pop(run.id, None)


def _messages(history: list[Row], content: str) -> list[Row]:
    """The chat as its template takes it. A turn without an answer (it failed, or was stopped at once) is left out."""
    turns: list[Row] = []
    for question, answer in zip(history[::2], history[1::2], strict=False):
        if answer["content"]:
            turns.append({"role": "user", "content": question["content"]})
            turns.append({"role": "assistant", "content": answer["content"]})
    return [*turns, {"role": "user", "content": content}]


def _title(content: str) -> str:
    """A chat's name: the start of its first question, cut between words."""
    text = " ".join(content.split())
    if len(text) <= _TITLE_CHARACTERS:
        return text
    cut = text[:_TITLE_CHARACTERS]
    return f"{cut.rpartition(' ')[0] or cut}…"
