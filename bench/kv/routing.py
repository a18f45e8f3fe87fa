"""Hit rates of three replicas behind a router on a recorded trace, against one cache of the same size.

Each replica is the engine's own core on a device that computes nothing, with a third of the blocks; the router sees the
K/V events of each and the requests in flight, as `ponder route` does. Requests come at the trace's times; one is in
flight for as long as its answer takes at `ITL_S` a token, beside its prefill at `PREFILL_S` a block that was not found.
"""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

from app.routing.policies import POLICIES, ReplicaState
from app.routing.prefix_index import PrefixIndex, prefix_keys
from bench.kv.hits import SIZE, Nothing, SilentDecoder
from engine.config import EngineConfig
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.kv_event_publisher import events_of
from engine.kv_cache.kv_events import Change, KVEventLog
from engine.params import GREEDY, Span

ITL_S, PREFILL_S = 0.02, 0.02
Request = tuple[float, int, list[int]]  # seconds, tokens of the answer, blocks of the prompt


class SimulatedReplica:
    """A core and what it has told the index."""

    def __init__(self, name: str, blocks: int, index: PrefixIndex) -> None:
        self.name, self._index = name, index
        self._changes: list[Change] = []
        self._pool = BlockPool(blocks)
        self._pool.events = KVEventLog(self._changes.extend, lambda _: None)
        config = EngineConfig("none", block_size=SIZE, max_batch_tokens=1 << 20)
        self._core = EngineCore(config, Nothing(), self._pool, SilentDecoder, (), b"secret")
        self.in_flight = 0
        self.requests = 0

    @property
    def hits(self) -> int:
        return self._core.stats().prefix_hit_tokens // SIZE

    def run(self, number: int, tokens: list[int]) -> int:
        """Runs a prompt; returns its blocks that were found."""
        before = self.hits
        self.requests += 1
        self._core.handle(m.Open(number, (*tokens, -1 - number), "", 0, None))
        self._core.handle(m.Generate(number, number, Span(GREEDY, max_tokens=1), 0, 1))
        while not any(isinstance(reply, m.OutputPiece) for reply in self._core.take_replies()):
            self._core.step()
        self._core.handle(m.Close(number))
        self._pool.flush_events()
        self._index.apply(self.name, events_of(self._changes, SIZE))
        self._changes.clear()
        return self.hits - before


def read(path: Path) -> list[Request]:
    rows = map(json.loads, path.read_text("utf-8").splitlines())
    return [(row["timestamp"] / 1000, row["output_length"], row["hash_ids"]) for row in rows]


def route(requests: list[Request], replicas: int, blocks: int, policy: str) -> dict[str, Any]:  # Any: plain JSON
    """Runs a trace on replicas with `blocks` in all; returns shares of blocks found and of requests."""
    index = PrefixIndex()
    all_of = {f"r{at}": SimulatedReplica(f"r{at}", blocks // replicas, index) for at in range(replicas)}
    choose = next(made for name, made in POLICIES.items() if name == policy)
    ends: list[tuple[float, int, str]] = []
    most = 0
    for number, (at_s, answer, prompt) in enumerate(requests):
        while ends and ends[0][0] <= at_s:
            all_of[heapq.heappop(ends)[2]].in_flight -= 1
        tokens = [block for block in prompt for _ in range(SIZE)]
        states = [ReplicaState(each.name, each.in_flight, index.blocks(each.name)) for each in all_of.values()]
        chosen = all_of[choose(states, index.matches(prefix_keys(tokens, SIZE), all_of), number)]
        found = chosen.run(number, tokens)
        chosen.in_flight += 1
        most = max(most, chosen.in_flight)
        heapq.heappush(ends, (at_s + answer * ITL_S + (len(prompt) - found) * PREFILL_S, number, chosen.name))
    total = sum(len(prompt) for _, _, prompt in requests)
    return {
        "replicas": replicas, "blocks": blocks, "policy": policy,
        "found": sum(each.hits for each in all_of.values()) / total,
        "largest_share": max(each.requests for each in all_of.values()) / len(requests), "most_in_flight": most,
    }  # fmt: skip


def measure(trace: Path, sizes: tuple[int, ...]) -> dict[str, Any]:  # Any: plain JSON
    requests = read(trace)
    rows = []
    for blocks in sizes:
        whole = route(requests, 1, blocks, "round_robin")
        for policy in POLICIES:
            row = route(requests, 3, blocks, policy)
            rows.append({**row, "one_cache": whole["found"], "of_one_cache": row["found"] / whole["found"]})
            print(rows[-1], flush=True)
    return {"trace": trace.name, "requests": len(requests), "rows": rows}
