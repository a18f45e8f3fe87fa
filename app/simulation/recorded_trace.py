"""Recorded traces of requests: arrival times, lengths of prompts and answers, and the prefixes that prompts share.

Two formats are read: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens; Patel et al. 2024), in which nothing is
shared, and Mooncake's JSON lines (timestamp in ms, input_length, output_length, hash_ids of blocks of 512 tokens; Qin
et al. 2025). A trace grows by copies of itself that share nothing with each other, each begun at another moment.
"""

from __future__ import annotations

import csv
import heapq
import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from random import Random

from engine.kv_cache.block_pool import root_digest

HASH_TOKENS = 512  # of a block of Mooncake's traces
_ROOT = root_digest(b"simulation", "", "", "")


class TraceError(ValueError):
    """A trace cannot be used; the message names the file, the line and what would be accepted."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request at second `at`. `hash_ids` name the blocks of `hash_tokens` tokens of its prompt, the last one maybe
    not full, each with all before it; none where nothing is known to be shared. `copy` tells copies of a trace apart,
    and `number` requests without names."""

    at: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    hash_tokens: int = HASH_TOKENS
    tenant: str = ""
    priority: int = 0
    copy: int = 0
    number: int = 0

    def digests(self, block_size: int) -> list[bytes]:
        """Returns stand-ins for the chained digests of the prompt's full blocks.

        Raises:
            TraceError: a named block is no whole number of blocks.
        """
        full, copy, root = self.prompt_tokens // block_size, self.copy, prefix_root(self.tenant)
        if not self.hash_ids:
            pack, number = struct.Struct("<Iqi").pack, self.number
            return [root + pack(copy, ~number, at) for at in range(full)]
        each, rest = divmod(self.hash_tokens, block_size)
        if rest:
            message = f"blocks of {block_size} tokens do not fill the trace's blocks of {self.hash_tokens}"
            raise TraceError(f"{message}; accepted: a block size that divides {self.hash_tokens}.")
        pack = struct.Struct("<Iqi").pack
        found = [root + pack(copy, id, at) for id in self.hash_ids for at in range(each)]
        del found[full:]
        return found

    @property
    def tail(self) -> int:
        """Returns a number for the tokens after the full blocks: equal for equal prompts."""
        return self.hash_ids[-1] if self.hash_ids else ~self.number


def load_trace(path: Path) -> list[RecordedRequest]:
    """Reads a trace, in order of arrival from second 0 on.

    Raises:
        TraceError: it cannot be read, is empty, or a line of it is of no known format.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}.") from None
    first = lines[0] if lines else ""
    numbered = [(at, line) for at, line in enumerate(lines, 1) if line.strip()]
    if first.lstrip().startswith("{"):
        requests = _checked_chains(path, [(at, _parsed(path, at, line, _mooncake)) for at, line in numbered])
    elif first.split(",")[:3] == ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]:
        requests = [_parsed(path, at, line, _azure) for at, line in numbered[1:]]
    else:
        raise TraceError(
            f"{path}, line 1: {first[:80]!r} begins no known trace; accepted: Azure's CSV with the header "
            "TIMESTAMP,ContextTokens,GeneratedTokens, or Mooncake's JSON lines."
        )
    if not requests:
        raise TraceError(f"{path} has no requests; accepted: a trace with at least one.")
    requests.sort(key=lambda each: each.at)
    began = requests[0].at
    return [replace(each, at=each.at - began, number=at) for at, each in enumerate(requests)]


def duration_s(trace: Sequence[RecordedRequest]) -> float:
    """Returns the seconds of a trace: to its last arrival, and a mean gap after it."""
    last = trace[-1].at
    return last * len(trace) / (len(trace) - 1) if len(trace) > 1 and last > 0 else 1.0


def scaled(
    trace: Sequence[RecordedRequest], copies: int, hours: float | None, peak: float, seed: int
) -> Iterator[RecordedRequest]:
    """Yields `copies` of a trace at once, in order of arrival, each begun at a random moment of it and then repeated
    for `hours`; None: as long as the trace. No two copies or repetitions share a prefix.

    `peak`: the rate of the busiest hour of a day over the mean one. Arrivals are moved so that the rate over a day is
    1 + (peak - 1) sin, lowest at its start.
    """
    period, rng = duration_s(trace), Random(seed)
    end = period if hours is None else hours * 3600
    shifts = [0.0, *(rng.uniform(0, period) for _ in range(copies - 1))]
    warp = day_warp(end, peak)
    for request in heapq.merge(*(_repeated(trace, at, copies, s, period, end) for at, s in enumerate(shifts)), key=_at):
        yield replace(request, at=warp(request.at)) if peak > 1 else request


def day_warp(end: float, peak: float) -> Callable[[float], float]:
    """Returns the map of times of a uniform rate in (0, end) to those of a rate of 1 - (peak - 1) cos(2 pi t / end):
    the inverse of its integral, by bisection."""
    swing = peak - 1

    def warp(at: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            if middle - swing * math.sin(2 * math.pi * middle) / (2 * math.pi) < at / end:
                low = middle
            else:
                high = middle
        return low * end

    return warp


def prefix_root(tenant: str) -> bytes:
    """Returns the root of a tenant's prefixes: tenants share none."""
    return _ROOT if not tenant else root_digest(b"simulation", "", "", tenant)


def _at(request: RecordedRequest) -> float:
    return request.at


def _repeated(
    trace: Sequence[RecordedRequest], copy: int, copies: int, shift: float, period: float, end: float
) -> Iterator[RecordedRequest]:
    """Yields one copy of a trace that begins `shift` seconds into it, again and again, until `end`."""
    first = next((at for at, each in enumerate(trace) if each.at >= shift), len(trace))
    turn, at = 0, first
    while True:
        if at == len(trace):
            turn, at = turn + 1, 0
        moment = trace[at].at - shift + turn * period
        if moment >= end or (at == first and turn and end <= period and moment >= period):
            return
        yield replace(trace[at], at=moment, copy=copy + copies * turn)
        at += 1


def _parsed(path: Path, at: int, line: str, parse: Callable[[str], RecordedRequest]) -> RecordedRequest:
    try:
        request = parse(line)
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError("a prompt and an answer have at least one token")
        named = -(-request.prompt_tokens // HASH_TOKENS)
        if request.hash_ids and len(request.hash_ids) != named:
            raise ValueError(
                f"{len(request.hash_ids)} hash_ids for {request.prompt_tokens} tokens, of {HASH_TOKENS} each"
            )
        return request
    except (ValueError, KeyError, TypeError, IndexError) as error:
        why = f"{type(error).__name__} {error}" if isinstance(error, KeyError | TypeError | IndexError) else str(error)
        raise TraceError(
            f"{path}, line {at}: {why}; accepted: a time, tokens of the prompt and of the answer, each 1 or more"
            f"{', and the hash_ids of its blocks' if parse is _mooncake else ''}."
        ) from None


def _azure(line: str) -> RecordedRequest:
    time, prompt, output = next(csv.reader([line]))[:3]
    return RecordedRequest(datetime.fromisoformat(time[:26]).timestamp(), int(prompt), int(output))


def _mooncake(line: str) -> RecordedRequest:
    row = json.loads(line)
    ids = tuple(int(each) for each in row["hash_ids"])
    if min(ids, default=0) < 0:
        raise ValueError("a negative hash_id")
    return RecordedRequest(float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"]), ids)


def _checked_chains(path: Path, requests: list[tuple[int, RecordedRequest]]) -> list[RecordedRequest]:
    """Checks that a name stands for a block with all before it: it always follows the same name."""
    before: dict[int, int] = {}
    for line, request in requests:
        previous = -1
        for id in request.hash_ids:
            if before.setdefault(id, previous) != previous:
                raise TraceError(
                    f"{path}, line {line}: hash_id {id} follows {previous} here and {before[id]} before; accepted: "
                    "names that stand for a block and all that precede it."
                )
            previous = id
    return [request for _, request in requests]
