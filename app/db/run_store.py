"""Runs and their events, and the idempotency keys that find them.

A run begins by adding an answer to its chat's tree, and ends by recording the answer's final state there. Where several
servers share the database, a run is one server's (`runs.server`), which alone writes to it until another takes it over;
`Database.member` is this server's name. With an idempotency key a client begins a run at most once, however often it
sends the request; a key is kept for a day, with a digest of the request that it came with.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from sqlalchemy import Connection, Integer, Text, bindparam, case, delete, func, select, update
from sqlalchemy import insert as insert_into

from app.db.answer_steps import AnswerStep, Usage, dump_steps
from app.db.chat_store import Tree, add_message, chat_of, messages_of
from app.db.connection import execute_many, insert, row, rows
from app.db.database import Database
from app.db.file_store import SentFile, send_files
from app.db.postgres import members_connected
from app.db.sqlite import ChatBusy, KeyReused, NotThere, Row, RunTaken, WrongPlace, new_id, steady
from app.db.tables import chats, events, is_running, messages, run_keys, runs, traces

KEPT_S = 24 * 3600.0

_OF_KEY = (
    select(run_keys.c.body, run_keys.c.run_id, run_keys.c.message_id, messages.c.parent_id)
    .join(messages, messages.c.id == run_keys.c.message_id)
    .join(chats, (chats.c.id == messages.c.chat_id) & chats.c.deleted_at.is_(None))
    .where(
        run_keys.c.user == bindparam("user"), run_keys.c.key == bindparam("key"),
        run_keys.c.created_at > bindparam("since"),
    )
)  # fmt: skip
_FORGET_KEYS = delete(run_keys).where(run_keys.c.created_at <= bindparam("until"))
_RUN = (
    select(runs)
    .join(chats, chats.c.id == runs.c.chat_id)
    .where(runs.c.id == bindparam("id"), chats.c.user == bindparam("user"), chats.c.deleted_at.is_(None))
)
_UNFINISHED = select(runs.c.id).where(is_running)
_OWNERS = select(runs.c.server).where(is_running).distinct()
# Holds the row, so that nobody takes the run over before the transaction ends.
_OWNER = select(runs.c.server).where(runs.c.id == bindparam("run")).with_for_update(read=True)
_TAKE = (
    update(runs)
    .where(is_running, runs.c.server.is_not_distinct_from(bindparam("of")))
    .values(server=bindparam("by"))
    .returning(runs.c.id)
)
_RUNNING = (
    select(runs.c.id, runs.c.server, runs.c.chat_id, messages.c.parent_id)
    .join(messages, messages.c.id == runs.c.message_id)
    .where(is_running)
)
_RUNNING_IN = _RUNNING.where(runs.c.chat_id.in_(bindparam("chats", expanding=True)))
_RUNNING_OF = (
    select(runs.c.id).join(chats, chats.c.id == runs.c.chat_id).where(is_running, chats.c.user == bindparam("user"))
)
_ASKS = ("approval.requested", "approval.resolved", "question.asked", "question.answered")
_WAITS = (
    select(events.c.type, func.count().label("count"))
    .where(events.c.run_id == bindparam("run"), events.c.type.in_(_ASKS))
    .group_by(events.c.type)
)
_EVENTS = (
    select(events.c.seq, events.c.type, events.c.data)
    .where(events.c.run_id == bindparam("run"), events.c.seq > bindparam("after"))
    .order_by(events.c.seq)
)
_TRACE = select(traces.c.data).where(traces.c.run_id == bindparam("run"))
# A chat may have been deleted under its run: then there is nothing to append to.
_RUN_EXISTS = select(runs.c.id).where(runs.c.id == bindparam("run")).exists()
_APPEND = insert_into(events).from_select(
    ["run_id", "seq", "type", "data"],
    select(bindparam("run", type_=Text), bindparam("number", type_=Integer), bindparam("kind", type_=Text),
           bindparam("line", type_=Text)).where(_RUN_EXISTS),
)  # fmt: skip
_ADD_TRACE = insert_into(traces).from_select(
    ["run_id", "data"], select(bindparam("run", type_=Text), bindparam("trace", type_=Text)).where(_RUN_EXISTS)
)
_LEAD = (
    update(chats)
    .where(chats.c.id == bindparam("chat"))
    .values(
        updated_at=bindparam("now"), leaf_id=bindparam("leaf"),
        title=case((chats.c.title == "", bindparam("name")), else_=chats.c.title),
    )
)  # fmt: skip
_END_RUN = update(runs).where(runs.c.id == bindparam("run"))
_SOURCES = select(events.c.seq).where(events.c.type == "citation.sources", events.c.run_id == bindparam("run"))
_END_ANSWER = update(messages).where(messages.c.run_id == bindparam("run")).values(grounded=_SOURCES.exists())


@dataclass(frozen=True, slots=True)
class RunKey:
    """A client's key; `body` is a digest of all that was asked with it."""

    key: str
    body: str


class Started(NamedTuple):
    """A run that was begun: its answer's message, and the question's."""

    run_id: str
    message_id: str
    question_id: str


Waiting = Literal["approval", "answer"]


class RunElsewhere(NamedTuple):
    """An unfinished run of another server, and what it waits for from a person."""

    id: str
    server: str | None
    waiting_for: Waiting | None


class RunKeys:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def run_of(self, user: str, key: RunKey) -> Started | None:
        """The run that was begun with this key; None where there is none.

        Raises:
            KeyReused: it was begun with another body.
        """
        since = steady() - KEPT_S
        found = await self._database.read(lambda db: row(db, _OF_KEY, user=user, key=key.key, since=since))
        if found is None:
            return None
        if found["body"] != key.body:
            raise KeyReused(
                f"The Idempotency-Key {key.key!r:.60} was used within a day with another chat or body; accepted: the "
                "very same request, or another key."
            )
        return Started(found["run_id"], found["message_id"], found["parent_id"])


def remember(db: Connection, user: str, key: RunKey, run_id: str, message_id: str) -> None:
    """In the database's thread, where the run begins. What is older than a day is forgotten."""
    now = steady()
    db.execute(_FORGET_KEYS, {"until": now - KEPT_S})
    kept = {"user": user, "key": key.key, "body": key.body, "run_id": run_id, "message_id": message_id}
    insert(db, run_keys, {**kept, "created_at": now})


class KeyTaken(Exception):
    """The run of the key was begun meanwhile; `RunKeys.run_of` finds it."""


MAX_COMPARED = 3  # answers to one question that are made side by side
RESTART_GAP = 1000  # where the disk failed before a crash, readers saw numbers it has not: they are not used again


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One line of a run's log; `data` is the event as JSON."""

    seq: int
    type: str
    data: str


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an answer: below a new question with `content`, or below the question `regenerate`.

    The new question follows `parent_id`, None for a new beginning; with `at_leaf`, the end of the current branch.
    """

    content: str | None
    parent_id: str | None = None
    at_leaf: bool = False
    regenerate: str | None = None
    images: tuple[str, ...] = ()  # of a new question, data: URLs
    files: tuple[SentFile, ...] = ()  # of a new question
    compare: bool = False  # with `regenerate`: while other answers to the question are being made


@dataclass(frozen=True, slots=True)
class Begun:
    """The answer's message, and the branch that it ends: all down to the question. `imported`: the chat was.

    `grounded`: one of its answers was made from documents, or may be. `private`: the chat is kept from remote models.
    """

    message_id: str
    branch: list[Row]
    imported: bool
    grounded: bool
    private: bool = False


@dataclass(frozen=True, slots=True)
class RunAnswer:
    """The final state of an assistant's message."""

    status: str
    content: str
    thinking: str
    thinking_s: float | None = None
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    usage: Usage | None = None
    error: str | None = None
    steps: Sequence[AnswerStep] = ()
    model: str | None = None  # the one that wrote it
    error_code: str | None = None  # not kept with the message: the log has it


class RunRows:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(
        self, user: str, chat_id: str, run_id: str, place: Place, params: Mapping[str, Any], key: RunKey | None = None
    ) -> Begun:
        """Add an answer-to-be, with its question where that is new, and make it the chat's current branch.

        Raises:
            NotThere: there is no such chat, no such message in it, or no such file for it.
            WrongPlace: a question follows an answer, and an answer a question.
            ChatBusy: of several servers, one makes an answer in the chat that this one is not to be compared with.
            KeyTaken: of several servers, another has begun the run of the key.
        """
        member = self._database.member

        def begin(db: Connection) -> Begun:
            if member is not None:
                _check_free(db, user, chat_id, place, key)
            return _begin(db, user, chat_id, run_id, place, params, key, member)

        return await self._database.read(begin)

    async def get(self, user: str, run_id: str) -> Row:
        """
        Raises:
            NotThere: the user has no such run.
        """
        found = await self._database.rows(_RUN, id=run_id, user=user)
        if not found:
            raise NotThere("run", run_id)
        return found[0]

    async def events(self, run_id: str, after: int = 0) -> list[LoggedEvent]:
        """Returns the events of a run's log with a number above `after`."""
        return await self._database.read(lambda db: _events(db, run_id, after))

    def write_events(self, run_id: str, events: Sequence[LoggedEvent], answer: RunAnswer | None = None) -> Future[None]:
        """Append to a run's log, in one transaction; done when a crash of this process cannot take them.

        The future fails with `RunTaken` where another server has the run by now. `answer`: how the run ends with them.
        """

        def write(db: Connection) -> None:
            self._check_owner(db, run_id)
            _append(db, run_id, events)
            if answer is not None:
                _end(db, run_id, answer)

        return self._database.write(write)

    def _check_owner(self, db: Connection, run_id: str) -> None:
        """
        Raises:
            RunTaken: another server has the run.
        """
        if self._database.member is not None:
            owners = db.scalars(_OWNER, {"run": run_id}).all()  # none of a run that was deleted
            if owners and owners[0] != self._database.member:
                raise RunTaken(f"another server has taken over {run_id}")

    def write_trace(self, run_id: str, trace: str) -> None:
        """Keep how a run can be made again, some time soon."""

        def add(db: Connection) -> None:
            db.execute(_ADD_TRACE, {"run": run_id, "trace": trace})

        self._database.write(add)

    async def trace(self, run_id: str) -> str | None:
        found = await self._database.rows(_TRACE, run=run_id)
        return str(found[0]["data"]) if found else None

    async def fail_unfinished(
        self, terminal: LoggedEvent, remains: Callable[[Sequence[LoggedEvent]], RunAnswer]
    ) -> int:
        """End the runs that a stopped or crashed server left running: of their answers, `remains` is kept.

        `terminal.seq` is ignored: the event goes after each log's end.
        """

        def fail(db: Connection) -> int:
            return len([_fail(db, run_id, terminal, remains) for run_id in db.scalars(_UNFINISHED).all()])

        return await self._database.read(fail)

    # -- of several servers

    async def owners(self) -> set[str | None]:
        """Returns the servers that have unfinished runs, but for this one; None for those of a sole server."""
        return set(await self._database.read(lambda db: db.scalars(_OWNERS).all())) - {self._database.member}

    async def connected(self, servers: Sequence[str]) -> set[str]:
        """Returns those of the servers that hold a connection to the database."""
        return await self._database.read(lambda db: members_connected(db, servers))

    async def take_over(
        self, server: str | None, terminal: LoggedEvent, remains: Callable[[Sequence[LoggedEvent]], RunAnswer]
    ) -> dict[str, LoggedEvent]:
        """Ends the unfinished runs of a lost server as `fail_unfinished` does; returns the last event of each.

        Of several servers that try at the same time one gets a run, and its old server can write no more to it.
        """

        def take(db: Connection) -> dict[str, LoggedEvent]:
            taken = db.scalars(_TAKE, {"of": server, "by": self._database.member}).all()
            return {run_id: _fail(db, run_id, terminal, remains) for run_id in taken}

        return await self._database.read(take, immediate=True)

    async def elsewhere(self, chat_ids: Sequence[str]) -> dict[str, list[RunElsewhere]]:
        """Returns the unfinished runs that other servers have, by chat, also of chats that were deleted."""

        def find(db: Connection) -> dict[str, list[RunElsewhere]]:
            found = defaultdict[str, list[RunElsewhere]](list)
            for each in rows(db, _RUNNING_IN, chats=list(chat_ids)):
                if each["server"] != self._database.member:
                    elsewhere = RunElsewhere(each["id"], each["server"], _waits(db, each["id"]))
                    found[each["chat_id"]].append(elsewhere)
            return found

        return {} if self._database.member is None else await self._database.read(find)

    async def unfinished_of(self, user: str) -> list[str]:
        """Returns the ids of a user's unfinished runs, of all servers."""
        return [each["id"] for each in await self._database.rows(_RUNNING_OF, user=user)]


def _begin(
    db: Connection, user: str, chat_id: str, run_id: str, place: Place, params: Mapping[str, Any],
    key: RunKey | None, member: str | None,
) -> Begun:  # fmt: skip
    chat, now = chat_of(db, user, chat_id), time.time()
    tree = Tree(messages_of(db, chat_id))
    if place.content is None:
        question = _question(tree, place.regenerate or "")
    else:
        parent = _answer(tree, chat["leaf_id"], at_leaf=True) if place.at_leaf else _answer(tree, place.parent_id)
        question = new_id("msg")
        asked = {"role": "user", "content": place.content, "status": "completed", "created_at": now}
        asked["images"] = json.dumps(place.images) if place.images else None
        asked["files"] = json.dumps([each.model_dump() for each in place.files]) if place.files else None
        send_files(db, user, chat_id, place.files)
        add_message(db, chat_id, {"id": question, "parent_id": parent, **asked})
        tree = Tree(messages_of(db, chat_id))
    answer = new_id("msg")
    awaited = {"role": "assistant", "content": "", "status": "running", "created_at": now, "run_id": run_id}
    add_message(db, chat_id, {"id": answer, "parent_id": question, **awaited})
    branch = tree.branch(question)
    insert(
        db, runs,
        {
            "id": run_id, "chat_id": chat_id, "message_id": answer, "status": "running", "params": json.dumps(params),
            "created_at": now, "server": member,
        },
    )  # fmt: skip
    db.execute(_LEAD, {"now": now, "leaf": answer, "name": question_title(branch[-1]["content"]), "chat": chat_id})
    if key is not None:
        remember(db, user, key, run_id, answer)
    grounded = any(message["grounded"] for message in branch)
    return Begun(answer, branch, bool(chat["imported"]), grounded, bool(chat["private"]))


def _question(tree: Tree, id: str) -> str:
    if id not in tree:
        raise NotThere("message", id)
    if tree.messages[id]["role"] != "user":
        raise WrongPlace("regenerate", f"regenerate is {id!r:.60}, an answer; accepted: the id of a question.")
    return id


def _answer(tree: Tree, id: str | None, *, at_leaf: bool = False) -> str | None:
    if id is not None and id not in tree:
        raise NotThere("message", id)
    if id is not None and tree.messages[id]["role"] != "assistant":
        what = "absent, and the chat ends with" if at_leaf else f"{id!r:.60},"
        accepted = "accepted: the id of an answer, or null for a new beginning"
        raise WrongPlace("parent_id", f"parent_id is {what} a question; {accepted}. regenerate answers a question.")
    return id


_TITLE_CHARACTERS = 60
_TRAILING = ".,;:!…-– "


def question_title(content: str) -> str:
    """Returns a chat's title: the start of its first question, cut between words, without punctuation at its end but a
    question mark."""
    text = " ".join(content.split())
    if len(text) <= _TITLE_CHARACTERS:
        return text.rstrip(_TRAILING) or text
    cut = text[:_TITLE_CHARACTERS]
    cut = cut.rpartition(" ")[0] or cut
    return f"{cut.rstrip(_TRAILING + '?') or cut}…"


def _check_free(db: Connection, user: str, chat_id: str, place: Place, key: RunKey | None) -> None:
    """Checks what one server knows of its own runs, of all servers'.

    Raises:
        ChatBusy, KeyTaken: as `RunRows.begin` does.
    """
    if key is not None and row(db, _OF_KEY, user=user, key=key.key, since=steady() - KEPT_S) is not None:
        raise KeyTaken
    running = rows(db, _RUNNING_IN, chats=[chat_id])
    comparable = place.compare and all(each["parent_id"] == place.regenerate for each in running)
    if running and not (comparable and len(running) < MAX_COMPARED):
        raise ChatBusy


def _waits(db: Connection, run_id: str) -> Waiting | None:
    counts = {each["type"]: each["count"] for each in rows(db, _WAITS, run=run_id)}
    if counts.get("approval.requested", 0) > counts.get("approval.resolved", 0):
        return "approval"
    return "answer" if counts.get("question.asked", 0) > counts.get("question.answered", 0) else None


def _fail(
    db: Connection, run_id: str, terminal: LoggedEvent, remains: Callable[[Sequence[LoggedEvent]], RunAnswer]
) -> LoggedEvent:
    """Ends a run with `terminal` after its log's end; returns the event with its number."""
    log = _events(db, run_id)
    ending = replace(terminal, seq=(log[-1].seq if log else 0) + RESTART_GAP)
    _append(db, run_id, [ending])
    _end(db, run_id, remains(log))
    return ending


def _events(db: Connection, run_id: str, after: int = 0) -> list[LoggedEvent]:
    return [LoggedEvent(*each) for each in db.execute(_EVENTS, {"run": run_id, "after": after})]


def _append(db: Connection, run_id: str, made: Sequence[LoggedEvent]) -> None:
    if made:
        execute_many(db, _APPEND, [{"run": run_id, "number": e.seq, "kind": e.type, "line": e.data} for e in made])


def _end(db: Connection, run_id: str, answer: RunAnswer) -> None:
    usage = answer.usage.model_dump_json() if answer.usage else None
    db.execute(_END_RUN, {"run": run_id, "status": answer.status, "ended_at": time.time()})
    db.execute(
        _END_ANSWER,
        {
            "run": run_id, "status": answer.status, "content": answer.content, "thinking": answer.thinking,
            "thinking_s": answer.thinking_s, "ttft_s": answer.ttft_s, "tokens_per_s": answer.tokens_per_s,
            "usage": usage, "error": answer.error, "steps": dump_steps(answer.steps), "model": answer.model,
        },
    )  # fmt: skip
