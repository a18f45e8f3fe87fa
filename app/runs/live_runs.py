"""Runs in progress, and the recovery of runs that a crash cut off.

A run belongs to the server, not to a connection: closing the page does not stop it, `cancel` does. A chat has at most
one at a time, or up to three that answer the same question, to be compared. Runs under way are in memory, ended ones in
the store. After a crash the answer is rebuilt from the run's log. Where several servers share the database, a run of
another is read and cancelled by way of `remote_runs.py`, and one of a server that is lost is ended here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from app.answering.remote_model import RemoteModel
from app.answering.served_model import ServedModel
from app.answering.thinking_summary import ThinkingSummary
from app.answering.tool_selection import ToolSelector
from app.answering.tool_service import DELEGATE
from app.config import AUTO_NAME
from app.db.run_store import (
    MAX_COMPARED,
    Begun,
    KeyTaken,
    LoggedEvent,
    Place,
    RunAnswer,
    RunKey,
    Started,
    Waiting,
)
from app.db.sqlite import ChatBusy, NotThere
from app.db.store import Store
from app.errors import ApiError
from app.observability.metrics import ServerMetrics
from app.runs.chat_titles import FirstExchange, TitleWriter
from app.runs.event_log import RunLog, StepRecorder
from app.runs.events import TERMINAL, RunFailed, RunQueued
from app.runs.memory import RunMemory
from app.runs.prompt_builder import History
from app.runs.rag import GENERATIVE, AnswerWay
from app.runs.remote_runs import RemoteRunLog, RemoteRuns, RunCommand, not_waiting, outcome
from app.runs.research import WEB_SEARCH
from app.runs.run import Run, RunSpec
from app.runs.run_tools import RunTools
from engine.errors import EngineStopped
from tools.outcome import Call
from tools.result import frame

if TYPE_CHECKING:
    from app.answering.tool_service import ToolService
    from app.cluster import Cluster
    from reasoning.agent import Limits
    from retrieval import Library


log = logging.getLogger("ponder")


def _generative(served: ServedModel) -> AnswerWay:
    return GENERATIVE


def recover_runs(events: Sequence[LoggedEvent], error: str) -> RunAnswer:
    """The answer as far as it was logged, as failed with `error`."""
    content, thinking, recorder = list[str](), list[str](), StepRecorder()
    calls: dict[str, Call] = {}
    answering: str | None = None
    for event in events:
        match event.type, json.loads(event.data):
            case (("run.started" | "route.answering"), {"model": model}) if model != AUTO_NAME:
                answering = model
            case "answer.delta", {"text": text}:
                content.append(text)
                recorder.wrote(text)
            case "thinking.delta", {"text": text}:
                thinking.append(text)
            case "tool.call", {"agent": str()}:
                pass  # what a sub-agent calls and reads is no step of the answer
            case "tool.call", {"call_id": id, "name": name, "arguments": arguments}:
                recorder.next()
                calls[id] = Call(id, name, arguments)
            case "tool.result", {"call_id": id, "name": name, "text": text, "untrusted": untrusted} if id in calls:
                recorder.returned(calls.pop(id), frame(text, name) if untrusted else text, untrusted=untrusted)
            case "tool.error", {"call_id": id, "name": name, "message": text} if id in calls:
                # Whether these were the tool's own words is not logged.
                recorder.returned(calls.pop(id), f"The call failed: {frame(text, name)}", untrusted=True)
    return RunAnswer(
        "failed", "".join(content), "".join(thinking), error=error, steps=recorder.steps(), model=answering
    )


STOPPING = RunFailed(
    code="server_stopping", message="The server was stopped before the answer was done.", retryable=True
)
RESTARTED = RunFailed(
    code="server_restarted", message="The server restarted before the answer was done.", retryable=True
)
LOST = RunFailed(
    code="server_lost", message="The server that made the answer was lost before it was done.", retryable=True
)


class Runs:
    """Starts runs, finds them, and ends them with the server."""

    def __init__(
        self,
        served: ServedModel,
        thoughts: Callable[[str], ThinkingSummary],
        meter: ServerMetrics,
        store: Store,
        library: Library,
        tool_service: ToolService,
        limits: Limits,
        *,
        way: Callable[[ServedModel], AnswerWay] = _generative,
        tool_selector: ToolSelector | None = None,
        titles: TitleWriter | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        """`served` is the default model; `thoughts` is the visibility of an answer's thinking. `way` tells how a model
        answers from documents, and is called for questions about them alone. `tool_selector` chooses tools for small
        models. `titles` writes the titles of chats. `cluster`: the other servers of the database."""
        self._cluster = cluster
        self._remote = None if cluster is None else RemoteRuns(cluster, store.runs, RESTARTED)
        self._titles = titles
        self._served = served
        self._way = way
        self._tool_selector = tool_selector
        self._thoughts = thoughts
        self._tool_service = tool_service
        self._limits = limits
        self._library = library
        self._meter = meter
        self._store = store
        self._live: dict[str, Run] = {}
        self._given_up = set[asyncio.Task[None]]()
        # Chat id -> run id -> the id of the question, None until it is known.
        self._busy_chats: defaultdict[str, dict[str, str | None]] = defaultdict(dict)
        self._keyed = asyncio.Lock()
        self._closing = False

    async def recover(self) -> int:
        """End the runs that an earlier server left unfinished; how many there were. From then on, runs of other
        servers are ended when those are lost, and what they send is carried out."""
        if self._cluster is not None:
            ended = await self.take_over()
            self._cluster.serve(self._obey, self.take_over)
            return ended
        terminal = LoggedEvent(0, RESTARTED.type, RESTARTED.model_dump_json())
        return await self._store.runs.fail_unfinished(terminal, lambda events: recover_runs(events, RESTARTED.message))

    async def take_over(self) -> int:
        """Ends the runs of other servers that are lost, with what they had written; how many there were."""
        assert self._cluster is not None
        rows, count = self._store.runs, 0
        if not (owners := await rows.owners()):
            return 0
        lost = await self._cluster.lost([each for each in owners if each is not None], rows.connected)
        for server in [*lost, *([None] if None in owners else [])]:
            ending = LOST if server is not None else RESTARTED
            terminal = LoggedEvent(0, ending.type, ending.model_dump_json())
            ended = await rows.take_over(server, terminal, partial(recover_runs, error=ending.message))
            for run_id, event in ended.items():
                self._cluster.streams.publish(run_id, [event])
            if ended:
                log.warning("the server %s is lost: %d of its runs were ended", server, len(ended))
            count += len(ended)
        return count

    async def start(self, chat_id: str, ask: RunSpec, key: RunKey | None = None) -> Started:
        """Begin an answer. With a key it begins once, however often it is asked for.

        Raises:
            NotThere: there is no such chat, message or file.
            WrongPlace: nothing can be answered there.
            KeyReused: the key was given with another request.
            ChatBusy: the chat has an unfinished run, and this one is not to be compared with it.
            EngineStopped: the server is stopping.
            UnknownTool, UnknownSkill: a tool or a skill is wanted that there is not.
            ApiError: the list of skills is too long for the model.
            NotFound: a collection is wanted that the user may not read.
        """
        if key is None:
            return await self._start(chat_id, ask, None)
        async with self._keyed:  # the second of two waits until the first has begun, and finds its key
            try:
                return await self._store.run_keys.run_of(ask.user, key) or await self._start(chat_id, ask, key)
            except KeyTaken:  # another server's request with it came first
                if (found := await self._store.run_keys.run_of(ask.user, key)) is None:
                    raise
                return found

    async def _start(self, chat_id: str, ask: RunSpec, key: RunKey | None) -> Started:
        remote = isinstance(ask.served, RemoteModel)
        offered = self._tool_service.offered(ask.tools, ask.skills, remote=remote)
        if ask.reasoning_config.searches:  # the others of "all" are the model's to call, and it calls none
            offered = [tool for tool in offered if tool.name == WEB_SEARCH]
        if not isinstance(ask.served, RemoteModel):
            served = ask.served or self._served
            if ask.tools == "all" and self._tool_selector is not None and self._tool_selector.selects(served):
                offered = [tool for tool in offered if tool.name != DELEGATE]  # a task for others fits any question
            self._tool_service.check_skills(offered, served)
        if isinstance(ask.collections, list):
            await asyncio.to_thread(self._library.rights.readable, ask.user, ask.collections)
        chat = await self._store.chats.get(ask.user, chat_id)  # another's chat is not even busy
        if isinstance(ask.served, RemoteModel):
            ask.served.check_leaving(
                private=chat["private"], collections=ask.collections, grounded=bool(ask.place.files),
                tools=[tool.name for tool in offered],
            )  # fmt: skip
        if self._closing:
            raise EngineStopped("The server is stopping.")
        if not self._is_free(chat_id, ask.place):
            raise ChatBusy
        first_question: str | None = None

        def ended(answer: RunAnswer) -> None:
            self._ended(run, answer)
            if self._titles is not None and first_question is not None and answer.status == "completed":
                self._titles.answered(FirstExchange(served, ask.user, chat_id, first_question, answer.content))

        run_id = f"run_{uuid.uuid4().hex}"
        ahead = sum(not other.started for other in self._live.values())
        served = self._served if isinstance(ask.served, RemoteModel) else ask.served or self._served
        run = Run(
            run_id, chat_id, ask.user, served, self._thoughts(ask.user), self._library,
            RunLog(
                run_id, self._store.runs, on_taken=lambda: self._taken(run),
                publish=_to_nobody if self._cluster is None else self._cluster.streams.publish,
            ), self._meter.watch("runs"), on_end=ended,
            way=_generative if ask.auto is not None or remote else self._way,
            tool_selector=self._tool_selector,
        )  # fmt: skip
        # Known before the store knows it: an id found there is found here.
        self._live[run_id], self._busy_chats[chat_id][run_id] = run, ask.place.regenerate
        begun: Begun | None = None
        try:
            begun = await self._store.runs.begin(ask.user, chat_id, run_id, ask.place, ask.params(), key)
        finally:
            if begun is None:
                del self._live[run_id]
                self._free(chat_id, run_id)
                run.watch.end("refused")
        question_id = begun.branch[-1]["id"]
        if run_id in (busy := self._busy_chats.get(chat_id, {})):
            busy[run_id] = question_id
        if len(begun.branch) == 1 and not remote and ask.auto is None and not ask.place.compare:
            first_question = begun.branch[0]["content"]
        run.log.append(RunQueued(position=ahead))
        history = History.of(
            begun.branch, system=ask.system, imported=begun.imported, grounded=begun.grounded, private=begun.private
        )
        tools = RunTools(
            self._tool_service.executor, offered, run.log, run=run_id, chat=chat_id, user=ask.user, limits=self._limits,
            tainted_by=history.read_from, artifacts=self._store.artifacts,
        )  # fmt: skip
        run.begin(history, ask, tools if offered else None, await self._memory(chat_id, ask, begun))
        return Started(run_id, begun.message_id, question_id)

    def _is_free(self, chat_id: str, place: Place) -> bool:
        """Returns whether a run may begin at `place` beside those that the chat has."""
        answering = self.active_in(chat_id)
        if not place.compare:
            return not answering
        return len(answering) < MAX_COMPARED and all(
            self._busy_chats[chat_id][run_id] == place.regenerate for run_id in answering
        )

    def _free(self, chat_id: str, run_id: str) -> None:
        """Counts a run of a chat as ended."""
        if (runs := self._busy_chats.get(chat_id)) is not None:
            runs.pop(run_id, None)
            if not runs:
                del self._busy_chats[chat_id]

    async def _memory(self, chat_id: str, ask: RunSpec, begun: Begun) -> RunMemory:
        memory = self._store.memory
        notes = await memory.for_prompt(ask.user, chat_id, {message["id"] for message in begun.branch})
        new = begun.branch[-1]["id"] if ask.place.content is not None else None
        return RunMemory(memory, self._library.embedder, ask.user, chat_id, notes, new)

    @property
    def live(self) -> Mapping[str, Run]:
        """The runs that are being made, as they come and go."""
        return self._live

    def tools_of(self, run_id: str) -> RunTools | None:
        """The tools of a run that is being made."""
        run = self._live.get(run_id)
        return None if run is None else run.tools

    def active_in(self, chat_id: str) -> tuple[str, ...]:
        """The chat's unfinished runs, several only while answers are compared."""
        return tuple(self._busy_chats.get(chat_id, ()))

    def waiting_for(self, chat_id: str) -> Waiting | None:
        """Returns what an unfinished run of the chat waits for from a person, the first's that does."""
        tools = (self.tools_of(run_id) for run_id in self.active_in(chat_id))
        return next((each.waiting_for for each in tools if each is not None and each.waiting_for is not None), None)

    async def activity(self, chat_ids: Sequence[str]) -> dict[str, Waiting | None]:
        """Returns the chats that have an unfinished run, at any server, and what one waits for from a person."""
        found = {chat_id: self.waiting_for(chat_id) for chat_id in chat_ids if self.active_in(chat_id)}
        for chat_id, elsewhere in (await self._store.runs.elsewhere(chat_ids)).items():
            waits = next((run.waiting_for for run in elsewhere if run.waiting_for is not None), None)
            found[chat_id] = found.get(chat_id) or waits
        return found

    async def cancel_in(self, user: str, chat_id: str) -> None:
        """Ends the chat's unfinished runs, at all servers."""
        for run_id in self.active_in(chat_id):
            await self.cancel(user, run_id)
        if self._remote is not None:
            for run in (await self._store.runs.elsewhere([chat_id])).get(chat_id, []):
                with contextlib.suppress(ApiError):  # a lost server's ends by itself
                    await self._remote.pass_on(run.server, RunCommand(kind="cancel", user=user, run_id=run.id))

    async def cancel_of(self, user: str) -> None:
        """Ends the user's unfinished runs, at all servers."""
        mine = [run.id for run in self._live.values() if run.user == user]
        others = [] if self._cluster is None else await self._store.runs.unfinished_of(user)
        await asyncio.gather(*(self.cancel(user, run_id) for run_id in {*mine, *others}))

    async def decide(self, command: RunCommand) -> None:
        """Makes a person's decision, or gives their answer, which a run waits for, at any server.

        Raises:
            NotThere: the user has no such run.
            ApiError: it waits for no such thing.
        """
        run = self.running(command.user, command.run_id)
        if run is None and self._remote is not None and await self._remote.send(command):
            return
        if run is None or run.tools is None:
            await self._store.runs.get(command.user, command.run_id)
            raise not_waiting(command.run_id)
        if command.kind == "decide":
            run.tools.decide(command.number, command.decision, scope=command.scope, expires_s=command.expires_s)
        else:
            run.tools.answer(command.number, command.text)

    async def _obey(self, text: str) -> str:
        """Carries out a command of another server, and returns the reply."""
        command = RunCommand.model_validate_json(text)
        if command.kind == "cancel":
            return await outcome(self.cancel(command.user, command.run_id))
        return await outcome(self.decide(command))

    async def log(self, user: str, run_id: str) -> RunLog | RemoteRunLog:
        """A run's log, live, of another server, or from the store.

        Raises:
            NotThere: the user has no such run.
        """
        if run := self.running(user, run_id):
            return run.log
        await self._store.runs.get(user, run_id)
        events = await self._store.runs.events(run_id)
        if self._remote is not None and not (events and events[-1].type in TERMINAL):
            return self._remote.log(user, run_id, events)
        log = RunLog(run_id, self._store.runs, events)
        log.append(RESTARTED)  # if a failing disk left it without its end: its readers would wait for ever
        return log

    async def cancel(self, user: str, run_id: str) -> None:
        """End a run and wait until it has; one that has ended stays as it is.

        Raises:
            NotThere: the user has no such run.
        """
        if run := self.running(user, run_id):
            await run.cancel()
        elif self._remote is not None:
            await self._remote.send(RunCommand(kind="cancel", user=user, run_id=run_id))
        else:
            await self._store.runs.get(user, run_id)

    def running(self, user: str, run_id: str) -> Run | None:
        """Returns a run that is being made here; None where it is not.

        Raises:
            NotThere: it is another user's.
        """
        run = self._live.get(run_id)
        if run is not None and run.user != user:
            raise NotThere("run", run_id)
        return run

    async def stop(self) -> None:
        """End every run because the server stops, and let no more begin."""
        self._closing = True
        if self._remote is not None:
            self._remote.closing = True
        if self._titles is not None:
            await self._titles.close()
        await asyncio.gather(*(run.cancel(STOPPING) for run in self._live.values()))

    def _ended(self, run: Run, answer: RunAnswer) -> None:
        # All of it before the readers hear of the end: the next question must find the chat free, and the store takes
        # its writes in order, so a later read of the chat finds the answer, which is written with the last event.
        run.log.flush()
        if run.trace is not None:
            self._store.runs.write_trace(run.id, run.trace.dumps())
        self._free(run.chat_id, run.id)
        if answer.error_code is not None:
            self._meter.windows.error(answer.error_code)
        asyncio.get_running_loop().call_soon(self._live.pop, run.id, None)

    def _taken(self, run: Run) -> None:
        """Lets go of a run that another server has taken over, as it took this one for lost."""
        log.error("another server has taken over %s", run.id)
        self._live.pop(run.id, None)
        self._free(run.chat_id, run.id)
        run.watch.end("failed")
        ending = asyncio.create_task(run.cancel(), name="taken over")
        self._given_up.add(ending)
        ending.add_done_callback(self._given_up.discard)


def _to_nobody(run_id: str, events: Sequence[LoggedEvent]) -> None:
    """Publishes nothing: there are no other servers."""
