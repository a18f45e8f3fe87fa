"""A server that answers from a script, so that a test decides when each event comes.

Speaks the HTTP interface of the real one (chats, runs, event logs) and serves the real page. A script is a list of
events and gates; a run stops at a gate until the test opens it. Knows nothing of models.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from app.config.efforts import BUDGETS
from app.db.answer_steps import Usage
from app.page import mount_page
from app.runs.events import (
    TERMINAL,
    AnswerDelta,
    AnswerDone,
    ApprovalRequested,
    ApprovalResolved,
    Event,
    Metrics,
    QuestionAnswered,
    QuestionAsked,
    RunCancelled,
    RunCompleted,
    RunStarted,
    ThinkingDelta,
    ThinkingDone,
    ThinkingStarted,
    ToolCall,
    ToolResult,
)
from tests.e2e.support.fake_artifacts import Artifacts, artifacts_of
from tests.e2e.support.fake_documents import Shelved, documents_of, usual
from tests.e2e.support.fake_presets import Shelf, presets_of

ABOUT = "A small model for tests. It answers what the script says and nothing else."
STARTERS = ["What is 12 × 34?", "Write a haiku about rain", "Explain a hash table"]
USAGE = Usage(prompt_tokens=31, completion_tokens=20, reasoning_tokens=7, cached_tokens=16)


@dataclass(frozen=True)
class Gate:
    """Place of a script at which the run waits for the test."""

    name: str


@dataclass(frozen=True)
class Pace:
    """Place of a script at which the run waits for some seconds."""

    seconds: float


Script = Sequence[Event | Gate | Pace]


def thinking(*pieces: str) -> list[Event | Gate]:
    told = (ThinkingDelta(text=piece) for piece in pieces)
    return [ThinkingStarted(started_at=time.time()), *told, ThinkingDone(duration_s=1.2, tokens=43)]


def answer(*pieces: str | Gate) -> list[Event | Gate]:
    """An answer in pieces, from the first delta to the end of the run."""
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    return [
        *(AnswerDelta(text=piece) if isinstance(piece, str) else piece for piece in pieces),
        AnswerDone(text=text, finish_reason="stop"),
        Metrics(ttft_s=0.21, tokens_per_s=38.4, completion_tokens=20),
        RunCompleted(usage=USAGE),
    ]


@dataclass
class Run:
    id: str
    chat_id: str
    script: Script
    log: list[Event] = field(default_factory=list)
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> str:
        last = self.log[-1].type if self.log else ""
        return last.removeprefix("run.") if last in TERMINAL else "running"

    def write(self, event: Event) -> None:
        self.log.append(event)
        self.grown.set()
        self.grown = asyncio.Event()

    def waiting(self, kind: type[ApprovalRequested] | type[QuestionAsked], number: str) -> Event | None:
        """Returns what was asked under a number and not answered yet."""
        decided = {getattr(event, "approval_id", None) for event in self.log if isinstance(event, ApprovalResolved)}
        decided |= {getattr(event, "question_id", None) for event in self.log if isinstance(event, QuestionAnswered)}
        asked = (event for event in self.log if isinstance(event, kind))
        numbered = {
            getattr(event, "approval_id", None) or getattr(event, "question_id", None): event for event in asked
        }
        return None if number in decided else numbered.get(number)

    def steps(self) -> list[dict[str, Any]]:
        """Returns what the chat keeps of its calls: one step for all of them, and what was written in the end."""
        calls = [event for event in self.log if isinstance(event, ToolCall)]
        results = {event.call_id: event for event in self.log if isinstance(event, ToolResult)}
        if not results:
            return []
        kept = [
            {"call_id": call.call_id, "text": results[call.call_id].text, "untrusted": False}
            for call in calls
            if call.call_id in results
        ]
        made = [{"id": call.call_id, "name": call.name, "arguments": call.arguments} for call in calls]
        last = {"content": self.text(AnswerDelta), "calls": [], "results": []}
        return [{"content": "", "calls": made, "results": kept}, last]

    def text(self, kind: type[AnswerDelta] | type[ThinkingDelta]) -> str:
        return "".join(event.text for event in self.log if isinstance(event, kind))

    async def play(self, gate: Callable[[str], asyncio.Event]) -> None:
        self.write(RunStarted(model="fake", started_at=time.time(), max_tokens=512))
        for step in self.script:
            if isinstance(step, Gate):
                waits = {asyncio.create_task(gate(step.name).wait()), asyncio.create_task(self.stop.wait())}
                _, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in left:
                    task.cancel()
            if isinstance(step, Pace):
                await asyncio.sleep(step.seconds)
            if self.stop.is_set():
                return self.write(RunCancelled(usage=USAGE))
            if not isinstance(step, Gate | Pace):
                self.write(step)
        return None


@dataclass
class Offer:
    """Models, strategies and the like to choose from, as the real server's routes tell them. Any: JSON."""

    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "fake"}, {"id": "default"}])
    strategies: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    off: dict[str, str] = field(default_factory=dict)
    skills: list[dict[str, Any]] = field(default_factory=list)
    collections: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class World:
    """All that the fake knows. A test reads and changes it through FakeServer."""

    script: Script = ()
    chats: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    streams: set[asyncio.Event] = field(default_factory=set)  # setting one drops its connection
    streams_refused: bool = False
    logs_lost: bool = False
    runs_refused: bool = False
    refusal: dict[str, str | None] | None = None  # of the next run's request: its status is 400
    asked: list[dict[str, Any]] = field(default_factory=list)  # bodies of runs, as they came
    offer: Offer = field(default_factory=Offer)
    documents: dict[int, Shelved] = field(default_factory=usual)
    shelf: Shelf = field(default_factory=Shelf)
    artifacts: Artifacts = field(default_factory=dict)
    app_requests: list[dict[str, Any]] = field(default_factory=list)  # of MCP apps to their server, as they came
    decisions_refused: str = ""  # and why
    decisions: list[dict[str, Any]] = field(default_factory=list)  # bodies of approvals and answers, as they came
    cancels: int = 0

    def gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())


def error(status: int, message: str) -> JSONResponse:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
    return JSONResponse(body, status_code=status)


def build_app(world: World) -> FastAPI:
    app = FastAPI()
    app.include_router(documents_of(world.documents))
    app.include_router(artifacts_of(world.artifacts, world.app_requests))

    @app.get("/api/session")
    async def session() -> Any:
        return {"auth": "off", "user": {"id": "local", "name": "local", "role": "operator"}, "expires_at": None}

    @app.get("/api/server")
    async def server() -> dict[str, Any]:
        return {
            "version": "0.1.0", "model": "fake", "max_model_len": 4096, "device": "cpu", "dtype": "bfloat16",
            "about": ABOUT, "starters": STARTERS, "max_upload": 1 << 20,
        }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": world.offer.models}

    @app.get("/api/strategies")
    async def strategies() -> dict[str, Any]:
        efforts = {name: budget.model_dump() for name, budget in BUDGETS.items()}
        return {"strategies": world.offer.strategies, "faults": [], "efforts": efforts}

    @app.get("/api/tools")
    async def tools() -> dict[str, Any]:
        return {"tools": world.offer.tools, "faults": [], "off": world.offer.off, "skills": world.offer.skills}

    @app.get("/api/collections")
    async def collections() -> dict[str, Any]:
        return {"collections": world.offer.collections}

    @app.get("/api/chats")
    async def chats() -> dict[str, Any]:
        there = [chat for chat in reversed(world.chats.values()) if not chat.get("deleted")]
        return {"chats": [summary(chat) | {"running": running(chat["id"])} for chat in there], "next": None}

    @app.get("/api/folders")
    async def folders() -> dict[str, Any]:
        return {"folders": []}

    @app.post("/api/chats", status_code=201)
    async def create(request: Request) -> dict[str, Any]:
        now = time.time()
        chat: dict[str, Any] = {"id": f"chat{len(world.chats) + 1}", "title": "", "created_at": now, "updated_at": now}
        world.chats[chat["id"]] = chat | {"messages": [], **await request.json()}  # `preset_id` as it came
        return summary(world.chats[chat["id"]])

    @app.patch("/api/chats/{chat_id}")
    async def change(chat_id: str, request: Request) -> Any:
        body = await request.json()
        if "settings" in body and world.refusal is not None and str(world.refusal["param"]).startswith("settings."):
            return JSONResponse({"error": world.refusal}, status_code=400)
        world.chats[chat_id] |= body
        return summary(world.chats[chat_id])

    @app.get("/api/chats/search")
    async def search(q: str) -> dict[str, Any]:
        """Finds beginnings of first questions."""
        asked = [(chat, chat["messages"][0]) for chat in world.chats.values() if chat["messages"]]
        return {
            "results": [
                {
                    "chat_id": chat["id"], "title": chat["title"], "message_id": first["id"],
                    "snippet": first["content"], "marks": [{"start": 0, "end": len(q)}],
                }
                for chat, first in asked if first["content"].startswith(q)
            ]
        }  # fmt: skip

    @app.get("/api/chats/{chat_id}")
    async def chat(chat_id: str) -> Any:
        if chat_id not in world.chats or world.chats[chat_id].get("deleted"):
            return error(404, "No such chat.")
        kept = world.chats[chat_id]
        active = [run.id for run in world.runs.values() if run.chat_id == chat_id and run.status == "running"]
        messages = [message if message["role"] == "user" else reply(message) for message in kept["messages"]]
        return summary(kept) | {"messages": messages, "active_run_id": active[0] if active else None}

    def running(chat_id: str) -> bool:
        return any(run.chat_id == chat_id and run.status == "running" for run in world.runs.values())

    def summary(chat: dict[str, Any]) -> dict[str, Any]:
        shown = {key: chat[key] for key in ("id", "title", "created_at", "updated_at", "private")}
        return shown | {"pinned": False, "folder_id": None, "settings": chat.get("settings")}

    def reply(message: dict[str, Any]) -> dict[str, Any]:
        run = world.runs.get(message["run_id"])
        if run is None:
            return message | {"status": "failed", "error": "The server restarted."}
        done = run.status == "completed"
        return message | {
            "content": run.text(AnswerDelta),
            "thinking": run.text(ThinkingDelta),
            "thinking_s": 1.2 if done else None,
            "tokens_per_s": 38.4 if done else None,
            "usage": USAGE.model_dump() if done else None,
            "model": "fake",
            "steps": run.steps(),
            "status": run.status,
        }

    @app.delete("/api/chats/{chat_id}")
    async def delete(chat_id: str) -> dict[str, Any]:
        world.chats[chat_id]["deleted"] = True
        return {"id": chat_id, "restorable_until": time.time() + 600}

    @app.post("/api/chats/{chat_id}/restore")
    async def restore(chat_id: str) -> dict[str, Any]:
        world.chats[chat_id]["deleted"] = False
        return summary(world.chats[chat_id])

    @app.post("/api/chats/{chat_id}/runs", status_code=202)
    async def start(chat_id: str, request: Request) -> Any:
        if world.runs_refused:
            return error(503, "The server is starting.")
        body = await request.json()
        world.asked.append(body)
        if world.refusal is not None:
            refusal, world.refusal = world.refusal, None
            return JSONResponse({"error": refusal}, status_code=400)
        chat = world.chats[chat_id]
        if running(chat_id) and "compare" not in body:
            return error(409, "This chat already has a run.")
        run = Run(f"run{len(world.runs) + 1}", chat_id, world.script)
        world.runs[run.id] = run
        empty = {"thinking": "", "thinking_s": None, "tokens_per_s": None, "usage": None, "error": None}
        question = body.get("regenerate") or f"{run.id}q"
        if "content" in body:
            chat["title"] = chat["title"] or body["content"][:60]
            asked = {"content": body["content"], "run_id": None, "status": "completed"}
            chat["messages"].append({"id": question, "siblings": [question], "role": "user", **asked, **empty})
        else:  # the new answer takes the old one's place, as the branch that is shown
            chat["messages"] = chat["messages"][: [each["id"] for each in chat["messages"]].index(question) + 1]
        made = {"id": f"{run.id}a", "siblings": [f"{run.id}a"], "content": "", "run_id": run.id, "status": "running"}
        chat["messages"].append({"role": "assistant", **made, **empty})
        task = asyncio.create_task(run.play(world.gate))
        world.tasks.add(task)
        task.add_done_callback(world.tasks.discard)
        return {"run_id": run.id, "message_id": f"{run.id}a", "question_id": question}

    @app.get("/api/runs/{run_id}/events")
    async def events(run_id: str, after: int = 0, follow: bool = True) -> Response:
        if world.streams_refused:
            return error(503, "Not now.")
        if run_id not in world.runs or world.logs_lost:
            return error(404, "No such run.")
        stream = sent(world.runs[run_id], after, follow)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def sent(run: Run, after: int, follow: bool) -> AsyncIterator[bytes]:
        dropped = asyncio.Event()
        world.streams.add(dropped)
        try:
            yield b": hello\r\n\r\n"
            while not dropped.is_set():
                grown = run.grown
                for seq, event in enumerate(run.log[after:], start=after + 1):
                    after = seq
                    yield f"id: {seq}\r\nevent: {event.type}\r\ndata: {event.model_dump_json()}\r\n\r\n".encode()
                    if event.type in TERMINAL:
                        return
                if not follow:
                    return
                waits = {asyncio.create_task(grown.wait()), asyncio.create_task(dropped.wait())}
                _, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in left:
                    task.cancel()
        finally:
            world.streams.discard(dropped)

    @app.post("/api/runs/{run_id}/cancel", status_code=202)
    async def cancel(run_id: str) -> dict[str, str]:
        world.cancels += 1
        world.runs[run_id].stop.set()
        return {}

    @app.post("/api/runs/{run_id}/approvals/{number}", status_code=202)
    async def approve(run_id: str, number: str, request: Request) -> Any:
        body = await request.json()
        world.decisions.append(body)
        asked = world.runs[run_id].waiting(ApprovalRequested, number)
        if world.decisions_refused:
            return error(400, world.decisions_refused)
        if not isinstance(asked, ApprovalRequested):
            return error(404, "It waits for nothing.")
        resolved = ApprovalResolved(approval_id=number, call_id=asked.call_id, decision=body["decision"])
        world.runs[run_id].write(resolved)
        world.gate(number).set()
        return {"id": number}

    @app.post("/api/runs/{run_id}/questions/{number}", status_code=202)
    async def answer_question(run_id: str, number: str, request: Request) -> Any:
        body = await request.json()
        world.decisions.append(body)
        asked = world.runs[run_id].waiting(QuestionAsked, number)
        if not isinstance(asked, QuestionAsked):
            return error(404, "It waits for nothing.")
        world.runs[run_id].write(QuestionAnswered(question_id=number, call_id=asked.call_id, text=body["text"]))
        world.gate(number).set()
        return {"id": number}

    app.include_router(presets_of(world.shelf))  # after all others: its paths are patterns
    mount_page(app, about=lambda: ABOUT)
    return app


class FakeServer:
    """The fake in a thread of its own, and what a test may do to it."""

    def __init__(self, url: str, world: World, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.world = world
        self._loop = loop

    def _do(self, action: Callable[[], object]) -> None:
        async def act() -> None:
            action()

        asyncio.run_coroutine_threadsafe(act(), self._loop).result(timeout=10)

    def _set(self, events: Callable[[], Iterable[asyncio.Event]]) -> None:
        """Sets events. `events` is called in the server's loop, which changes what it reads."""

        def each() -> None:
            for event in events():
                event.set()

        self._do(each)

    def play(self, *parts: Script) -> None:
        """Returns what the next runs do."""
        self.world.script = [step for part in parts for step in part]

    def open(self, *gates: str) -> None:
        self._set(lambda: [self.world.gate(name) for name in gates])

    def drop_streams(self) -> None:
        self._set(lambda: self.world.streams)

    def refuse_streams(self, refused: bool) -> None:
        self._do(lambda: setattr(self.world, "streams_refused", refused))

    def refuse_runs(self, refused: bool) -> None:
        self._do(lambda: setattr(self.world, "runs_refused", refused))

    def refuse_next(self, param: str, message: str) -> None:
        """The next run is refused, blaming a field of its request; with one of `settings.`, each change of those."""
        refusal = {"message": message, "type": "invalid_request_error", "param": param, "code": "invalid_value"}
        self._do(lambda: setattr(self.world, "refusal", refusal))

    def asked(self) -> dict[str, Any]:
        """The body of the last run's request, but for where it goes."""
        return {name: value for name, value in self.world.asked[-1].items() if name not in ("parent_id", "regenerate")}

    def refuse_decisions(self, why: str) -> None:
        self._do(lambda: setattr(self.world, "decisions_refused", why))

    def lose_logs(self) -> None:
        """From now on runs have no events any more; the chats keep what they keep."""
        self._do(lambda: setattr(self.world, "logs_lost", True))

    def lose_runs(self) -> None:
        """Returns what a restart without a log on disk would do: the chats are there, the runs are not."""
        self._do(self.world.runs.clear)
        self.drop_streams()

    def cancel_all(self) -> None:
        self._set(lambda: [run.stop for run in self.world.runs.values()])

    def questions(self) -> list[str]:
        messages = [message for chat in self.world.chats.values() for message in chat["messages"]]
        return [message["content"] for message in messages if message["role"] == "user"]


@contextlib.contextmanager
def serve() -> Iterator[FakeServer]:
    world = World()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(build_app(world), log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        ready: threading.Event = threading.Event()
        loops: list[asyncio.AbstractEventLoop] = []

        async def main() -> None:
            loops.append(asyncio.get_running_loop())
            ready.set()
            await server.serve(sockets=[listener])

        thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        listener.listen()  # so that a request made before the server runs waits for it
        thread.start()
        ready.wait()
        fake = FakeServer(url, world, loops[0])
        try:
            yield fake
        finally:
            fake.cancel_all()
            fake.drop_streams()
            server.should_exit = True
            thread.join(timeout=10)
