"""Estimates how long a new request would wait: the work that is left for a model, at the throughput seen.

The wait is for prompts that are not read yet, each without the share that is likely in the prefix cache, and, where all
places are taken, for the answers that must end first, each of the length that answers have had lately. It is corrected
by the real waits of earlier requests. A step's time is a fixed part, one for each token read and one for each written,
fitted to the engine's counters by weighted least squares with forgetting; no part may be negative. Before any step was
seen, a guess for a small machine counts.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from engine.outputs import Stats


Three = tuple[float, float, float]

GUESS: Three = (0.005, 0.0005, 0.0005)  # seconds of a step, of a token read in it, of a token written in it
_TRUST: Three = (8.0, 300.0, 30.0)  # how many of each, in a second of steps, count as much as the guess
_MEMORY_S = 20.0  # of steps, after which an observation counts a third


class ThroughputEstimate:
    """`step_s`, `read_s` and `write_s`, all in seconds."""

    def __init__(self) -> None:
        self._before: Stats | None = None
        self._products = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self.step_s, self.read_s, self.write_s = GUESS

    def seen(self, stats: Stats) -> None:
        """The engine's counters at this moment."""
        before, self._before = self._before, stats
        if before is None or (seconds := stats.step_seconds - before.step_seconds) <= 0:
            return
        written = stats.generated_tokens - before.generated_tokens
        read = max(0, stats.step_tokens - before.step_tokens - written)
        counts = np.array([stats.steps - before.steps, read, written], dtype=np.float64)
        kept = math.exp(-seconds / _MEMORY_S)
        self._sums = kept * self._sums + counts  # the weight is 1 / seconds: a variance grows with time
        self._products = kept * self._products + np.outer(counts, counts) / seconds
        self._fit()

    def answers_s(self, tokens: float, side_by_side: float) -> float:
        """Seconds in which answers that are written `side_by_side` gain so many tokens, all together."""
        return tokens * (self.step_s / max(1.0, side_by_side) + self.write_s)

    def _fit(self) -> None:
        """Non-negative least squares: a part that would be negative is 0, and the others explain the rest."""
        trust = np.square(_TRUST)
        products, sums = self._products + np.diag(trust), self._sums + trust * GUESS
        parts, found = [0, 1, 2], np.zeros(3)
        while parts:
            found[:] = 0.0
            found[parts] = np.linalg.solve(products[np.ix_(parts, parts)], sums[parts])
            if found.min() >= 0:
                break
            parts.remove(int(found.argmin()))
        self.step_s, self.read_s, self.write_s = map(float, found)


_FIRST_OUTPUT = 256.0  # tokens of an answer, before any has ended
_LEARN = 0.1  # weight of a new observation, once there are some
_TENANTS = 1024  # with remembered cached shares
_STRETCH = 1.8 / 0.8  # prefill beside decodes: the steps' time, over the part of it left for prefill
_TELLING_S = 0.1  # waits that are shorter say nothing of how good the estimate is
_MAX_SKEW = 4.0
_LONGER, _SHORTER = 0.2, 0.05  # weight of a wait that was longer than expected, or shorter: rather too long a guess


class AdmittedWork:
    """One request that was let in: `answers` of it, to prompts of so many tokens that must be read."""

    def __init__(
        self, queue_estimate: QueueEstimate, tenant: str, prompt: int, unread: int, output: int, answers: int
    ) -> None:
        self.tenant = tenant
        self.prompt = prompt
        self.unread = unread
        self.output = output  # tokens that are likely, of all its answers together
        self.answers = answers
        self.written = 0
        self.reading = True
        self._queue_estimate = queue_estimate

    def got(self, tokens: int, cached: int) -> None:
        """`tokens` more were written; of the prompt, `cached` needed no reading."""
        self._queue_estimate.got(self, tokens, cached)

    def end(self, *, whole: bool) -> None:
        """It is over. `whole`: its answers came to their ends."""
        self._queue_estimate.end(self, whole=whole)


@dataclass(slots=True)
class _Sums:
    """Sums over admitted, unfinished work, updated incrementally: a refusal must cost the same for any queue. Whole
    numbers, so that rounding leaves nothing behind."""

    answers: int = 0
    reading: int = 0  # requests with prompts not prefilled yet
    unread: int = 0  # tokens of theirs
    held: int = 0  # tokens that all will have in the KV cache
    output: int = 0  # tokens that are likely to be written

    def add(self, work: AdmittedWork, sign: int) -> None:
        self.answers += sign * work.answers
        self.held += sign * (work.prompt * work.answers + work.output)
        self.output += sign * work.output
        if work.reading:
            self.read(work, -sign)

    def read(self, work: AdmittedWork, sign: int = 1) -> None:
        """The work's prompt was read."""
        self.reading -= sign
        self.unread -= sign * work.unread


class QueueEstimate:
    """At most `places` sequences run at once, and no more than fit into the KV cache, once that was `seen`."""

    def __init__(self, places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.pace = ThroughputEstimate()
        self._places = places
        self._pool_tokens = math.inf
        self._clock = clock
        self._works: dict[
            AdmittedWork, tuple[float, float]
        ] = {}  # since when, and the wait that was expected, unskewed
        self._sums = _Sums()
        self._output = _FIRST_OUTPUT
        self._ended = 0
        self._cached = OrderedDict[str, float]()  # by tenant: the share of a prompt that is likely cached
        self._skew = 0.0  # log of how much longer waits were than expected

    def __len__(self) -> int:
        """Answers that are written or wait."""
        return self._sums.answers

    @property
    def tokens(self) -> int:
        """Tokens to read and to write, as far as is known."""
        return sum(w.unread * w.reading + max(0, w.output - w.written) for w in self._works)

    def seen(self, stats: Stats) -> None:
        """The engine's counters at this moment."""
        self.pace.seen(stats)
        self._pool_tokens = stats.blocks_total // stats.kv_groups * stats.block_size or math.inf

    def wait_s(self) -> float:
        """Estimates how long a request that comes now waits before its own prompt is read."""
        return self._expected_s() * math.exp(self._skew)

    def admit(self, tenant: str, prompt: int, limit: int, answers: int = 1) -> AdmittedWork:
        """Admit a request, with so many tokens of prompts and at most `limit` for each answer."""
        unread = round(prompt * (1 - self._cached.get(tenant, 0.0)))
        work = AdmittedWork(self, tenant, prompt, unread, round(min(limit, self._output) * answers), answers)
        self._works[work] = self._clock(), self._expected_s() + unread * self.pace.read_s
        self._sums.add(work, 1)
        return work

    def got(self, work: AdmittedWork, tokens: int, cached: int) -> None:
        work.written += tokens
        if not work.reading or work not in self._works or not tokens:
            return
        self._sums.read(work)
        work.reading = False
        since, expected_s = self._works[work]
        if expected_s > _TELLING_S and (waited_s := self._clock() - since) > 0:
            seen = math.log(min(_MAX_SKEW, max(1 / _MAX_SKEW, waited_s / expected_s)))
            self._skew += (_LONGER if seen > self._skew else _SHORTER) * (seen - self._skew)
        if work.prompt:
            before = self._cached.pop(work.tenant, 0.0)
            self._cached[work.tenant] = before + _LEARN * (min(1.0, cached / work.prompt) - before)
            if len(self._cached) > _TENANTS:
                self._cached.popitem(last=False)

    def end(self, work: AdmittedWork, *, whole: bool) -> None:
        if self._works.pop(work, None) is None:
            return
        self._sums.add(work, -1)
        if whole:
            self._ended += 1
            self._output += max(_LEARN, 1 / self._ended) * (work.written / work.answers - self._output)

    def _expected_s(self) -> float:
        sums = self._sums
        if not sums.answers:
            return 0.0
        reading_s = sums.unread * self.pace.read_s
        places = max(1.0, min(self._places, self._pool_tokens * sums.answers / sums.held if sums.held else math.inf))
        ahead = sums.answers + 1 - places
        if ahead <= 0:
            return reading_s * (1.0 if sums.reading == len(self._works) else _STRETCH)
        return reading_s + self.pace.answers_s(ahead * sums.output / sums.answers, places)
