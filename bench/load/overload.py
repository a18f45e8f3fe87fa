"""Three times as much as a server can do, for five minutes: its goodput, its refusals, and its recovery.

The load is one process of the same machine, so "capacity" is that of both together, and the same for all rates.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import threading
import time
from pathlib import Path
from random import Random

from bench.load.load_server import BenchServer, serving
from bench.parts import Json
from bench.serve.asks import KINDS, mixed, poisson
from bench.serve.load_client import Load, load
from bench.serve.measured import Objective, percentiles, summary

SECONDS = 300.0
RAMP = (0.6, 0.8, 1.0, 1.2)  # times the rate of a server that is asked for everything at once
RAMP_SECONDS = 20.0
EXTRA = {"ignore_eos": True}
SCALE = 0.4  # of `chat`: about 48 words, 40 tokens
PATIENCE_S = 20.0
OBJECTIVE_S = 1.0  # of a first token
OPTIONS = ("--engine", "process", "--max-wait-s", "0.5")  # a request that would miss it is refused


def overload(options: tuple[str, ...] = OPTIONS, seconds: float = SECONDS) -> Json:
    """Goodput up to capacity and at three times of it, refusals, memory, and the time until an idle server's pace."""
    with tempfile.TemporaryDirectory() as scratch, serving(Path(scratch), *options) as server:
        idle = _probe(server, 8)
        objective = Objective(ttft_s=OBJECTIVE_S)
        full = asyncio.run(load(server.target, mixed([0.0] * 96, [(KINDS["chat"], 1.0)], Random(1), scale=SCALE),
                                extra=EXTRA))  # fmt: skip
        rate = sum(outcome.answered for outcome in full.outcomes) / max(each.ended for each in full.outcomes)
        ramp = []
        for times in RAMP:
            figures = _figures(_load(server, times * rate, RAMP_SECONDS), objective, RAMP_SECONDS)
            ramp.append({"times": times, "rate_per_s": times * rate, **figures})
        peak = max(ramp, key=lambda each: each["goodput_per_s"])
        before = server.held()
        with Watched(server) as watched:
            driven = _load(server, 3 * peak["goodput_per_s"], seconds)
        began = time.monotonic()
        while _probe(server, 1) > 2 * idle and time.monotonic() - began < 60:
            time.sleep(0.1)
        recovery = time.monotonic() - began
        figures = _figures(driven, objective, seconds)
        return {
            "idle_ttft_s": idle,
            "options": options,
            "objective_ttft_s": OBJECTIVE_S,
            "all_at_once_per_s": rate,
            "ramp": ramp,
            "peak_goodput_per_s": peak["goodput_per_s"],
            "overload": figures,
            "goodput_over_peak": figures["goodput_per_s"] / peak["goodput_per_s"],
            "recovery_s_after_the_last_answer": recovery,
            "held_before": before,
            "held_after": server.held(),
            "held_by_minute": watched.by_minute(),
        }


class Watched:
    """A server's memory, seen each second while the load runs."""

    def __init__(self, server: BenchServer) -> None:
        self._server = server
        self._done = threading.Event()
        self._seen: list[Json] = []
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def by_minute(self) -> list[Json]:
        """Medians of each minute."""
        minutes = [self._seen[at : at + 60] for at in range(0, len(self._seen), 60)]
        return [{key: statistics.median(each[key] for each in minute) for key in minute[0]} for minute in minutes]

    def _watch(self) -> None:
        while not self._done.wait(1.0):
            self._seen.append(self._server.held())


def _load(server: BenchServer, rate: float, seconds: float) -> Load:
    rng = Random(round(rate * 1000))
    asks = mixed(poisson(rate, seconds, rng), [(KINDS["chat"], 1.0)], rng, scale=SCALE)
    return asyncio.run(load(server.target, asks, patience_s=PATIENCE_S, extra=EXTRA))


def _figures(driven: Load, objective: Objective, seconds: float) -> Json:
    made = summary(driven, objective)
    del made["kinds"]
    good = sum(map(objective.kept, driven.outcomes))
    other = [outcome for outcome in driven.outcomes if not outcome.answered and outcome.status != 429]
    return {
        **made,
        "goodput_per_s": good / seconds,  # of the time in which requests came
        "neither_answered_nor_refused": len(other),
        "answered_ttft_s": percentiles([each.ttft for each in driven.outcomes if each.answered]),
    }


def _probe(server: BenchServer, count: int) -> float:
    """The median time to a first token of one request after the other."""
    rng = Random(time.monotonic_ns())
    times = []
    for _ in range(count):
        driven = asyncio.run(load(server.target, mixed([0.0], [(KINDS["chat"], 1.0)], rng, scale=SCALE), extra=EXTRA))
        times += [each.ttft if each.answered else 60.0 for each in driven.outcomes]
    return statistics.median(times)
