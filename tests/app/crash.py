"""Kills a server with tools in the middle of runs, again and again, and looks at what the next one finds.

    python -m tests.app.crash FOLDER KILLS SEED

Its runs call a tool that writes a line to a file. After each kill -9 the next server is asked for every run of the one
before: what a reader saw must stand in the log, once and the same; a call must have written at most once, and exactly
once where its result is in the log; a question that is sent again with its key must not begin another run. Some of the
runs that were completed are made again, and must have the same tokens. Prints one line of JSON.

Servers are forked from a process that has all imports, so a kill costs a start of the engine and not of Python.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 3  # runs that a kill hits
REPLAYED = 40
PLUGIN = '''
import os
from ponder import Context, tool

@tool(permission="write", approval="never")
def calculate(ctx: Context, expression: str) -> str:
    """Work out an arithmetic expression."""
    file = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{{ctx.call_id}}\\n".encode())
    os.close(file)
    return str(eval(expression, {{"__builtins__": {{}}}}))
'''


class Nursery:
    """Starts servers as children of one process, which has imported everything and done nothing.

    Each has a data directory in the folder; `changed` are settings of all of them.
    """

    def __init__(self, folder: Path, **changed: Any) -> None:
        command = [sys.executable, "-m", "tests.app.crash", "--nursery", str(folder), json.dumps(changed)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, data: str = "data") -> tuple[int, str]:
        """A server's process id and address, once it answers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(data, file=self._process.stdin, flush=True)
        told = self._process.stdout.readline()
        assert told, "the nursery died"
        made = json.loads(told)
        return int(made["pid"]), str(made["url"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@dataclass
class Asked:
    """A run as its reader saw it."""

    chat: str
    key: str
    body: dict[str, Any]
    run: str = ""
    seen: list[tuple[int, str]] = field(default_factory=list)

    def ask(self, url: str) -> None:
        """Begin the run and read until it ends or the server does."""
        try:
            with httpx.Client(base_url=url, timeout=30) as http:
                self.begin(http)
                self.follow(http)
        except httpx.HTTPError:
            return

    def follow(self, http: httpx.Client) -> None:
        with http.stream("GET", f"/api/runs/{self.run}/events") as reply:
            seq = 0
            for line in reply.iter_lines():
                if line.startswith("id:"):
                    seq = int(line[3:])
                elif line.startswith("data:"):
                    self.seen.append((seq, line[5:].strip()))

    def begin(self, http: httpx.Client) -> str:
        headers = {"Idempotency-Key": self.key}
        reply = http.post(f"/api/chats/{self.chat}/runs", json=self.body, headers=headers)
        reply.raise_for_status()
        self.run = str(reply.json()["run_id"])
        return self.run


class Trial:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = Random(seed)
        self.counts = collections.Counter[str]()
        self.faults: list[str] = []
        self.written = folder / "written"
        (folder / "data/plugins").mkdir(parents=True)
        (folder / "data/plugins/calculate.py").write_text(PLUGIN.format(path=str(self.written)), "utf-8")
        self.nursery = Nursery(folder)
        self.before: list[Asked] = []
        self.whole_s: float | None = None  # duration of runs that are not killed, on this machine

    def fault(self, what: str) -> None:
        self.faults.append(what)

    def round(self) -> None:
        """A server's life: it is asked for what the last one left, answers new questions, and is killed. The first one
        is killed when its runs have ended, the others at any moment until some time after that."""
        pid, url = self.nursery.start()
        with httpx.Client(base_url=url, timeout=30) as http:
            for asked in self.before:
                self.judge(http, asked)
            self.before = [self.question(http) for _ in range(AT_ONCE)]
        readers = [threading.Thread(target=asked.ask, args=(url,)) for asked in self.before]
        began = time.monotonic()
        for reader in readers:
            reader.start()
        if self.whole_s is None:
            for reader in readers:
                reader.join(60)
            self.whole_s = time.monotonic() - began
        else:
            time.sleep(self.random.uniform(0.0, 1.2 * self.whole_s))
        os.kill(pid, signal.SIGKILL)
        for reader in readers:
            reader.join(30)
        self.counts["kills"] += 1

    def question(self, http: httpx.Client) -> Asked:
        chat = str(http.post("/api/chats", json={}).json()["id"])
        a, b = self.random.randint(2, 99), self.random.randint(2, 99)
        body = {"content": f"What is {a} * {b}?", "tools": ["calculate"], "max_tokens": 120}
        return Asked(chat, f"key-{chat}", body)

    def judge(self, http: httpx.Client, asked: Asked) -> None:
        first = asked.run
        if asked.begin(http) != first and first:
            self.fault(f"{asked.key} made {first} and then {asked.run}")
        if not first:  # killed before it was answered; its key finds the run that was begun, or begins it now
            self.counts["not answered"] += 1
        asked_anew = Asked(asked.chat, asked.key, asked.body)
        asked_anew.run = asked.run
        asked_anew.follow(http)
        log = asked_anew.seen
        numbers = [seq for seq, _ in log]
        events = [json.loads(data) for _, data in log]
        ends = [event["type"] for event in events if event["type"] in ("run.completed", "run.failed", "run.cancelled")]
        if len(ends) != 1 or events[-1]["type"] != ends[0]:
            self.fault(f"{asked.run} ends with {ends}")
        gaps = [b - a for a, b in itertools.pairwise(numbers) if b - a != 1]
        if not asked.seen and len(log) == 1:
            self.counts["killed before its first event"] += 1
        elif numbers[:1] != [1] or (
            gaps and (len(gaps) > 1 or ends != ["run.failed"] or numbers[-1] - numbers[-2] < 2)
        ):
            self.fault(f"{asked.run} has the numbers {numbers}")
        if log[: len(asked.seen)] != asked.seen:
            self.fault(f"{asked.run}: a reader saw {len(asked.seen)} events, of which the log has not all")
        self.counts["events seen"] += len(asked.seen)
        self.counts[ends[0] if ends else "endless"] += 1
        lines = self.lines()
        for event in events:
            if event["type"] == "tool.result" and lines[event["call_id"]] != 1:
                self.fault(f"{asked.run}: {event['call_id']} has a result and did not write once")
        if ends == ["run.completed"] and self.counts["kept"] < REPLAYED:
            self.counts["kept"] += 1
            trace = http.get(f"/api/runs/{asked.run}/trace")
            (self.folder / f"{asked.run}.jsonl").write_text(trace.text, "utf-8")

    def lines(self) -> collections.Counter[str]:
        lines = self.written.read_text("utf-8").splitlines() if self.written.exists() else []
        counted = collections.Counter(lines)
        for line, times in counted.items():
            if times > 1:
                self.fault(f"{line} was written {times} times")
        return counted


def trial(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    made = Trial(folder, seed)
    began = time.monotonic()
    for number in range(kills):
        made.round()
        if number % 25 == 24:
            left = (time.monotonic() - began) / (number + 1) * (kills - number - 1)
            print(
                f"{number + 1} of {kills}, {left / 60:.0f} min left, {dict(made.counts)}", file=sys.stderr, flush=True
            )
    pid, url = made.nursery.start()
    with httpx.Client(base_url=url, timeout=30) as http:
        for asked in made.before:
            made.judge(http, asked)
    os.kill(pid, signal.SIGKILL)
    made.nursery.close()
    writes = made.lines()
    same = asyncio.run(_replayed(sorted(folder.glob("run_*.jsonl"))))
    return {**made.counts, "writes": len(writes), "replayed": same, "faults": made.faults[:20]}


async def _replayed(files: list[Path]) -> dict[str, int]:
    from app.answering.reasoning_config import ReasoningResolver
    from app.answering.served_model import ServedModel
    from app.runs.trace import Trace, replay
    from engine import Engine

    counts = collections.Counter[str]()
    async with await Engine.start(_config()) as engine:
        served = ServedModel(engine, str(ROOT / "models/pebble"), None, "auto")
        recipes = [Trace.loads(file.read_text("utf-8").splitlines()[0]) for file in files]
        replayed = await asyncio.gather(*(replay(served, recipe, ReasoningResolver()) for recipe in recipes))
        for recipe, made in zip(recipes, replayed, strict=True):
            counts["the same" if made.differs_at is None else "differ"] += 1
            counts["with a call"] += bool(recipe.results)
    return dict(counts)


def _config() -> Any:
    from engine import EngineConfig

    limits: dict[str, Any] = {"kv_blocks": 400, "max_running": 8, "threads": 1}
    return EngineConfig(model=str(ROOT / "models/pebble"), device="cpu", dtype="float32", **limits)


def nursery(folder: Path, changed: dict[str, Any]) -> None:
    """Forks a server for each line that is read; the children of children are nobody's to wait for."""
    import app.cli.serve
    import app.server
    import engine.engine  # torch comes with it

    assert app.cli.serve and app.server and engine.engine
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            try:
                asyncio.run(_serve(folder / line.strip(), changed))
            finally:
                os._exit(1)


async def _serve(data: Path, changed: dict[str, Any]) -> None:
    import uvicorn

    from app.cli.serve import bind
    from app.config import Settings
    from app.server import create_app
    from engine import Engine

    # The model chooses its tools: an embedder, which is loaded at the first question, would outlast most of the lives.
    settings = Settings(
        model=str(ROOT / "models/pebble"), data_dir=data, sandbox=False, tool_selection="model", **changed
    )
    listener = bind("127.0.0.1", 0)
    async with await Engine.start(_config()) as engine:
        web = uvicorn.Server(uvicorn.Config(create_app(engine, settings), log_config=None))
        serving = asyncio.create_task(web.serve(sockets=[listener]))
        while not web.started:
            await asyncio.sleep(0.005)
        print(json.dumps({"pid": os.getpid(), "url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
        await serving


if __name__ == "__main__":
    if sys.argv[1] == "--nursery":
        nursery(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        print(json.dumps(trial(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
