"""Cells of the table client × feature, and the conversations that every client has in them.

A client's module makes a function a cell with `cells("plain")`; run as a program with a server's address, it prints a
line of JSON for each. It runs in the client's own environment, so this file needs the standard library alone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version

from tests.clients.script import Turn, play

FEATURES = (
    "plain", "stream", "tools", "parallel tools", "typed result", "typed result + tools", "reasoning", "embeddings",
    "errors", "disconnect", "long agent",
)  # fmt: skip
STEPS = 10  # of a long agent

HELLO = "Grüße aus 東京 🚲, said the model."
THOUGHT = "Let me see."
SAYS_HELLO = play(Turn(HELLO, thinking=THOUGHT), Turn("And again."))
WEATHER = {"Oslo": "12 degrees", "Rome": "30 degrees"}  # a tool `get_weather(city)` answers
SUMMARY = "Oslo has 12 degrees."
ASKS_WEATHER = play(Turn("I look.", [("get_weather", {"city": "Oslo"})]), Turn(SUMMARY))
BOTH = "Rome is warmer."
ASKS_BOTH = play(Turn(calls=[("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Rome"})]), Turn(BOTH))
PERSON = {"name": "Ada", "age": 36}
WRITES_PERSON = play(Turn(json.dumps(PERSON)))
READS_AND_WRITES_PERSON = play(Turn(calls=[("get_weather", {"city": "Oslo"})]), Turn(json.dumps(PERSON)))
NEVER_ENDS = play(Turn("word " * 3000))
READ_PART = {
    "type": "function",
    "function": {
        "name": "read_part",
        "description": "Reads a part of the text.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}
GET_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FINISHED = "All ten parts are read."


def works_long() -> str:
    """Returns a task of ten steps below 20,000 characters of advice, as coding agents begin with; new each time, so
    that no other run's prompt is in the cache."""
    rules = "\n".join(f"Rule {number}: read with care, and write down what you read." for number in range(350))
    calls = [Turn(f"Part {number}.", [("read_part", {"number": number})]) for number in range(STEPS)]
    return f"Task {uuid.uuid4()}\n{rules}\n{play(*calls, Turn(FINISHED))}"


def part(number: int) -> str:
    """Returns the result of the long agent's tool `read_part`: ten lines."""
    return "\n".join(f"{number}.{line} the quick brown fox jumps over the lazy dog" for line in range(10))


def conversations() -> str:
    """Returns the conversations as JSON, for clients in other languages."""
    names = (
        "STEPS", "HELLO", "THOUGHT", "SAYS_HELLO", "SUMMARY", "ASKS_WEATHER", "BOTH", "ASKS_BOTH", "PERSON",
        "WRITES_PERSON", "READS_AND_WRITES_PERSON", "NEVER_ENDS", "READ_PART", "GET_WEATHER", "FINISHED",
    )  # fmt: skip
    parts = [part(number) for number in range(STEPS)]
    return json.dumps({**{name: globals()[name] for name in names}, "WORKS_LONG": works_long(), "PARTS": parts})


@dataclass
class Cells:
    """The cells of a client: `name` as the table has it, `package` as it is installed."""

    name: str
    package: str
    program: str = ""  # asked with --version, where the package is none of Python's
    features: dict[str, Callable[[str], str | None]] = field(default_factory=dict)

    def __call__(self, feature: str) -> Callable[[Callable[[str], str | None]], Callable[[str], str | None]]:
        """Makes a function a cell: it takes a server's address, asserts, and may return a remark."""
        assert feature in FEATURES

        def add(function: Callable[[str], str | None]) -> Callable[[str], str | None]:
            self.features[feature] = function
            return function

        return add

    def version(self) -> str:
        if not self.program:
            return version(self.package)
        said = subprocess.run([self.program, "--version"], capture_output=True, text=True, check=True).stdout
        return re.findall(r"\d+\.\d+[\w.]*", said)[0]

    def main(self) -> None:
        """Runs all cells against the server at `sys.argv[1]`; those named after it, or all but `-NAME`."""
        names = sys.argv[2:]
        for feature, run in self.features.items():
            if f"-{feature}" in names or not (feature in names or all(name.startswith("-") for name in names)):
                continue
            began = time.perf_counter()
            line = {"client": self.name, "package": self.package, "version": self.version(), "feature": feature}
            try:
                remark = run(sys.argv[1].rstrip("/"))
                line |= {"result": "works"} if remark is None else {"result": "works", "remark": remark}
            except Exception as error:
                traceback.print_exc()
                line |= {"result": "fails", "remark": f"{type(error).__name__}: {error}"[:600]}
            print(json.dumps(line, ensure_ascii=False), flush=True)
            print(f"{self.name}, {feature}: {time.perf_counter() - began:.1f} s", file=sys.stderr)


def counters(url: str) -> dict[str, float]:
    """Returns the server's metrics by their names without `ponder_`, summed over their labels."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    found: dict[str, float] = defaultdict(float)
    for line in lines:
        if line.startswith("ponder_"):
            name, value = line.removeprefix("ponder_").rsplit(" ", 1)
            found[name.partition("{")[0]] += float(value)
            if name.startswith("requests_total{") and 'outcome="cancelled"' in name:
                found["requests_cancelled"] += float(value)
    return found


class PromptCache:
    """The share of each turn's prompt that came from the prefix cache, by the server's own counters."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._at: list[tuple[float, float]] = []
        self.turn()

    def turn(self) -> None:
        """Marks the end of a turn; a tool's function calls it."""
        found = counters(self._url)
        self._at.append((found["prefix_cache_query_tokens_total"], found["prefix_cache_hit_tokens_total"]))

    @contextmanager
    def polled(self) -> Iterator[None]:
        """Marks turns from outside, while a program runs whose tools are its own: each time that the counters grow."""
        done = threading.Event()

        def poll() -> None:
            while not done.wait(0.01):
                found = counters(self._url)
                at = (found["prefix_cache_query_tokens_total"], found["prefix_cache_hit_tokens_total"])
                if at != self._at[-1]:
                    self._at.append(at)

        poller = threading.Thread(target=poll)
        poller.start()
        try:
            yield
        finally:
            done.set()
            poller.join()

    def remark(self) -> str:
        """Returns what `cached` says of the turns."""
        pairs = zip(self._at, self._at[1:], strict=False)
        grown = [(asked - asked0, hit - hit0) for (asked0, hit0), (asked, hit) in pairs]
        shares = [hit / asked for asked, hit in grown if asked > 100][1:]  # less is no prompt, but a span within a turn
        return cached(shares)


def cached(shares: list[float]) -> str:
    """Returns the shares of the turns from the second on as a remark. Asserts that each is 95% or more."""
    assert len(shares) >= STEPS and min(shares) >= 0.95, shares
    return f"{min(shares):.1%} to {max(shares):.1%} of the prompts from turn 2 on cached"


def assert_stops(url: str, begin_and_leave: Callable[[], object]) -> str:
    """Asserts that the server stops an answer of `NEVER_ENDS` which its client leaves; returns the tokens written."""
    before = counters(url)
    begin_and_leave()
    for found in _until(url):
        if found["sequences_open"] == 0 and found["requests_running"] == 0:
            written = found["generation_tokens_total"] - before["generation_tokens_total"]
            assert found["requests_cancelled"] == before["requests_cancelled"] + 1, f"all {written:.0f} were written"
            return f"cancelled after {written:.0f} tokens"
    raise AssertionError("the answer goes on")


def _until(url: str) -> Iterator[dict[str, float]]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        yield counters(url)
        time.sleep(0.02)
