"""All runs of one server: those being made, in memory; those that ended, in the store.

A run belongs to the server, not to a connection: closing the page does not stop it, `cancel` does. A chat has one at
a time. Knows nothing of HTTP, nor of how an answer is made.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from app.metrics import Meter
from app.runs.events import RunFailed, RunQueued
from app.runs.log import RunLog
from app.runs.run import Ask, Messages, Run
from app.runs.tools import RunTools
from app.served import Served
from app.store import Answer, LoggedEvent, Row, Store
from engine.errors import EngineStopped

if TYPE_CHECKING:
    from app.toolshed import Toolshed
    from reasoning.agent import Limits
    from retrieval import Library

_TITLE_CHARACTERS = 60
STOPPING = RunFailed(
    code="server_stopping", message="The server was stopped before the answer was done.", retryable=True
)
RESTARTED = RunFailed(
    code="server_restarted", message="The server restarted before the answer was done.", retryable=True
)


class ChatBusy(Exception):
    """The chat's last answer is still being made."""


class Runs:
    """Starts runs, finds them, and ends them with the server."""

    def __init__(
        self, served: Served, meter: Meter, store: Store, library: Library, toolshed: Toolshed, limits: Limits
    ) -> None:
        self._served = served
        self._toolshed = toolshed
        self._limits = limits
        self._library = library
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
            UnknownTool: a tool is wanted that there is not.
        """
        offered = [] if ask.tools is None else self._toolshed.offered(ask.tools)
        if self._closing:
            raise EngineStopped("The server is stopping.")
        if chat_id in self._busy_chats:
            raise ChatBusy
        run_id = f"run_{uuid.uuid4().hex}"
        ahead = sum(not other.started for other in self._live.values())
        log = RunLog(run_id, self._store)
        tools = RunTools(
            self._toolshed.executor, offered, log, run=run_id, chat=chat_id, user=ask.user, limits=self._limits
        )
        run = Run(
            run_id, chat_id, self._served, self._library, log, self._meter.watch("runs"), tools if offered else None,
            on_end=lambda answer: self._ended(run, answer),
        )  # fmt: skip
        # Known before the store knows it: whoever finds its id there finds it here.
        self._live[run_id], self._busy_chats[chat_id] = run, run_id
        message_id: str | None = None
        try:
            history = await self._store.messages(chat_id)
            message_id = await self._store.begin_run(chat_id, run_id, ask.content, _title(ask.content), ask.params())
        finally:
            if message_id is None:
                del self._live[run_id], self._busy_chats[chat_id]
                run.watch.end("refused")
        if message_id is None:
            return None
        run.log.append(RunQueued(position=ahead))
        run.begin(_messages(history, ask.content), ask)
        return run_id, message_id

    def tools_of(self, run_id: str) -> RunTools | None:
        """The tools of a run that is being made."""
        run = self._live.get(run_id)
        return None if run is None else run.tools

    def active_in(self, chat_id: str) -> str | None:
        """The chat's unfinished run."""
        return self._busy_chats.get(chat_id)

    async def log(self, run_id: str) -> RunLog | None:
        """A run's log, live or from the store; None when there is no such run."""
        if run := self._live.get(run_id):
            return run.log
        if await self._store.run(run_id) is None:
            return None
        log = RunLog(run_id, self._store, await self._store.events(run_id))
        log.append(RESTARTED)  # if a failing disk left it without its end: its readers would wait for ever
        return log

    async def cancel(self, run_id: str) -> bool:
        """End a run and wait until it has; one that has ended stays as it is. False when there is no such run."""
        if run := self._live.get(run_id):
            await run.cancel()
            return True
        return await self._store.run(run_id) is not None

    async def stop(self) -> None:
        """End every run because the server stops, and let no more begin."""
        self._closing = True
        await asyncio.gather(*(run.cancel(STOPPING) for run in self._live.values()))

    def _ended(self, run: Run, answer: Answer) -> None:
        # All of it before the readers hear of the end: the next question must find the chat free, and the store
        # takes its writes in order, so whoever reads the chat then finds the answer.
        run.log.flush()
        self._store.end_run(run.id, answer)
        if run.trace is not None:
            self._store.write_trace(run.id, run.trace.dumps())
        self._busy_chats.pop(run.chat_id, None)
        asyncio.get_running_loop().call_soon(self._live.pop, run.id, None)


def _messages(history: list[Row], content: str) -> Messages:
    """The chat as its template takes it. A turn without an answer (it failed, or was stopped at once) is left out."""
    turns: Messages = []
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
