"""Kills one of three servers of one database in the middle of runs, again and again; readers go on elsewhere.

    python -m tests.app.cluster.server_kills FOLDER KILLS SEED

Each round, users begin runs at random servers, some of them again with the same key at another one. Readers follow at
random servers and reconnect to others when they are cut off, with the number of the last event that they have; some
runs are cancelled by way of another server. Then one server is killed (SIGKILL) and started again, every other time
after all its runs have ended. What a reader saw must be each event once and in order; the log must be that, at every
server; a run of a server that lives goes on to its end, and one of the killed server fails with all that was read kept
in its message, unless it had ended. Nobody finds another's run at any server. Prints one line of JSON.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from app.db.account_store import Accounts
from app.runs.events import TERMINAL
from tests.app import postgres
from tests.app.cluster.redis_server import redis_server
from tests.app.crash import Nursery

SERVERS = ("a", "b", "c")
USERS = ("ana", "bob", "eve")
AT_ONCE = 6  # runs that a kill meets
LONGEST_S = 90.0  # of one run, with the kill
_TEXTS = {"answer.delta": "content", "thinking.delta": "thinking"}


@dataclass
class Servers:
    """The addresses of the servers that there are, as they come and go."""

    nursery: Nursery
    at: dict[str, tuple[int, str]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        self.at[name] = self.nursery.start(name)

    def kill(self, name: str) -> None:
        pid, _ = self.at.pop(name)
        os.kill(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        for name in list(self.at):
            self.kill(name)

    def url(self, random: Random) -> str:
        return random.choice([url for _, url in list(self.at.values())])


@dataclass
class Asked:
    """A run, as its user's one reader sees it."""

    user: str
    key: str  # of the API
    number: int
    servers: Servers
    random: Random
    cancelled_after: int | None  # events
    chat: str = ""
    run: str = ""
    server: str | None = None  # the one that makes it, where that is known
    seen: list[tuple[int, str]] = field(default_factory=list)
    reconnected: int = 0
    faults: list[str] = field(default_factory=list)

    def client(self, url: str) -> httpx.Client:
        return client_of(url, self.key)

    @property
    def ended(self) -> bool:
        return bool(self.seen) and json.loads(self.seen[-1][1])["type"] in TERMINAL

    def ask(self) -> None:
        until = time.monotonic() + LONGEST_S
        while not self.begun() or not self.read():
            if time.monotonic() > until:
                self.faults.append(f"{self.run or self.chat}: no end within {LONGEST_S:g} s, {len(self.seen)} events")
                return
            time.sleep(self.random.uniform(0, 0.1))

    def begun(self) -> bool:
        """Begins the run, once however often it is tried."""
        if self.run:
            return True
        name, (_, url) = self.random.choice(list(self.servers.at.items()))
        try:
            with self.client(url) as http:
                if not self.chat:
                    self.chat = str(http.post("/api/chats", json={}).raise_for_status().json()["id"])
                    first = True
                else:
                    first = False
                body = {"content": f"Use 3, 5, 7 and {self.number % 90 + 2} to make 24.", "max_tokens": 120}
                headers = {"Idempotency-Key": f"key {self.number}"}
                address = f"/api/chats/{self.chat}/runs"
                reply = http.post(address, json=body, headers=headers).raise_for_status()
                self.run = str(reply.json()["run_id"])
                self.server = name if first else None
            if self.random.random() < 0.3:
                with self.client(self.servers.url(self.random)) as http:
                    again = http.post(address, json=body, headers=headers).raise_for_status().json()["run_id"]
                    if again != self.run:
                        self.faults.append(f"the key of {self.run} began {again}")
        except httpx.HTTPError:
            return bool(self.run)
        return True

    def read(self) -> bool:
        """Reads on at a server until it is cut off; returns whether it has the end."""
        last = self.seen[-1][0] if self.seen else 0
        self.reconnected += bool(self.seen)
        try:
            with (
                self.client(self.servers.url(self.random)) as http,
                http.stream("GET", f"/api/runs/{self.run}/events", headers={"Last-Event-ID": str(last)}) as reply,
            ):
                reply.raise_for_status()
                seq = 0
                for line in reply.iter_lines():
                    if line.startswith("id:"):
                        seq = int(line[3:])
                    elif line.startswith("data:"):
                        self.seen.append((seq, line[5:].strip()))
                        if self.ended:
                            return True
                        self.cancel()
                    if self.random.random() < 0.005:  # the reader's own connection breaks
                        return False
        except httpx.HTTPError:
            return False
        return False

    def cancel(self) -> None:
        if self.cancelled_after is not None and len(self.seen) >= self.cancelled_after:
            self.cancelled_after = None
            with contextlib.suppress(httpx.HTTPError), self.client(self.servers.url(self.random)) as http:
                http.post(f"/api/runs/{self.run}/cancel")


def client_of(url: str, key: str) -> httpx.Client:
    """Returns a client that reads no certificates, which takes longer than all the rest."""
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=20, verify=False)


class Trial:
    def __init__(self, servers: Servers, keys: dict[str, str], seed: int) -> None:
        self.servers = servers
        self.keys = keys
        self.random = Random(seed)
        self.counts = collections.Counter[str]()
        self.faults: list[str] = []
        self.asked = 0

    def round(self) -> None:
        runs = [self.question() for _ in range(AT_ONCE)]
        readers = [threading.Thread(target=asked.ask) for asked in runs]
        for reader in readers:
            reader.start()
        time.sleep(self.random.uniform(0.0, 2.0))
        makers = [asked.server for asked in runs if asked.server is not None and not asked.ended]
        killed = self.random.choice(makers or SERVERS)
        self.servers.kill(killed)
        self.counts["kills"] += 1
        late = self.counts["kills"] % 2 == 1  # the others end its runs; else perhaps its successor does
        if not late:
            self.servers.start(killed)
        until = time.monotonic() + LONGEST_S
        for reader in readers:
            reader.join(max(0.0, until - time.monotonic()))
        waiting = [asked.run for asked, reader in zip(runs, readers, strict=True) if reader.is_alive()]
        self.faults += [f"{run} has no end after {LONGEST_S:g} s" for run in waiting]
        if late:
            self.servers.start(killed)
        for asked in runs:
            if asked.run not in waiting:
                self.judge(asked, killed)

    def question(self) -> Asked:
        self.asked += 1
        user = self.random.choice(USERS)
        after = self.random.randint(1, 30) if self.random.random() < 0.15 else None
        return Asked(user, self.keys[user], self.asked, self.servers, Random(self.random.random()), after)

    def judge(self, asked: Asked, killed: str) -> None:
        self.faults += asked.faults
        if asked.faults:
            return
        numbers = [seq for seq, _ in asked.seen]
        events = [json.loads(data) for _, data in asked.seen]
        end = events[-1]
        kind = f"{end['type']} {end['code']}" if end["type"] == "run.failed" else end["type"]
        self.counts[kind] += 1
        self.counts["events"] += len(events)
        self.counts["reconnected"] += asked.reconnected
        whose = "unknown" if asked.server is None else "killed" if asked.server == killed else "living"
        self.counts[f"of a server that was {whose}"] += 1
        if kind not in ("run.completed", "run.cancelled", "run.failed server_lost"):
            self.faults.append(f"{asked.run} ended with {kind}")
        if kind == "run.failed server_lost" and whose == "living":
            self.faults.append(f"{asked.run} of a server that lives was ended by another")
        steps = [b - a for a, b in itertools.pairwise([0, *numbers])]
        if any(step != 1 for step in steps[:-1]) or (steps[-1] != 1 and end["type"] != "run.failed"):
            self.faults.append(f"{asked.run}: the reader has the numbers {numbers}")
        texts: collections.defaultdict[str, str] = collections.defaultdict(str)
        for event in events:
            if event["type"] in _TEXTS:
                texts[_TEXTS[event["type"]]] += event["text"]
        for _, url in self.servers.at.values():
            with asked.client(url) as http:
                lines = http.get(f"/api/runs/{asked.run}/events").text.splitlines()
                if [line[5:].strip() for line in lines if line.startswith("data:")] != [d for _, d in asked.seen]:
                    self.faults.append(f"{asked.run}: the log is not what its reader saw")
                answer = http.get(f"/api/chats/{asked.chat}").json()["messages"][-1]
                if answer["status"] != end["type"].removeprefix("run."):
                    self.faults.append(f"{asked.run} ended with {kind}, and its message says {answer['status']}")
                if any(answer[part] != texts[part] for part in _TEXTS.values()):
                    self.faults.append(f"{asked.run}: its message has not the text that its reader saw")
            other = next(user for user in USERS if user != asked.user)
            with client_of(url, self.keys[other]) as http:
                for address in (f"/api/runs/{asked.run}", f"/api/runs/{asked.run}/events", f"/api/chats/{asked.chat}"):
                    if http.get(address).status_code != 404:
                        self.faults.append(f"{other} finds {address} of {asked.user}")


def trial(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    began = time.monotonic()
    with postgres.cluster() as address, redis_server() as redis, contextlib.ExitStack() as closing:
        folder.mkdir(parents=True, exist_ok=True)
        accounts = Accounts.open(folder / SERVERS[0], address)
        keys = dict[str, str]()
        for user in USERS:
            accounts.ensure_user(user, "user")
            keys[user] = accounts.create_key(user)[1]
        accounts.close()
        nursery = Nursery(folder, database=address, redis=redis.address, auth="keys")
        closing.callback(nursery.close)
        servers = Servers(nursery)
        closing.callback(servers.kill_all)
        for name in SERVERS:
            servers.start(name)
        made = Trial(servers, keys, seed)
        for number in range(kills):
            made.round()
            if number % 10 == 9:
                print(f"{number + 1} of {kills}, {dict(made.counts)}, {made.faults}", file=sys.stderr, flush=True)
    return {**made.counts, "seconds": round(time.monotonic() - began), "faults": made.faults[:20]}


if __name__ == "__main__":
    print(json.dumps(trial(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
