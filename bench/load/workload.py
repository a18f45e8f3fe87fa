"""Recorded traces as requests of token ids, scaled to a small model: users, arrival times, and shared prefixes."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from random import Random

from tests.known_answers import SHARED

AZURE = SHARED / "data/traces/azure_conv_2023.csv"
MOONCAKE = SHARED / "data/traces/mooncake_synthetic.jsonl"
BLOCK = 16  # tokens that a block of a Mooncake trace becomes; 512 when it was recorded
TENANTS = 8  # the first asks most: shares fall with the rank
CLASSES = ((0, 0.2), (1, 0.6), (2, 0.2))  # priority, share


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`tokens` of a prompt at second `at`, to be answered with `new_tokens`, by a tenant and in a class."""

    at: float
    tokens: tuple[int, ...]
    new_tokens: int
    tenant: str = ""
    priority: int = 1


def azure(count: int, vocab: int, *, scale: float = 0.25, longest: int = 1000) -> list[TraceRequest]:
    """The first `count` conversations of the Azure trace, their lengths times `scale`. Nothing is shared.

    Raises:
        FileNotFoundError: there is no PONDER_SHARED.
    """
    rng = Random(1)
    with AZURE.open(newline="", encoding="utf-8") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(count), strict=False)]
    began = datetime.fromisoformat(rows[0]["TIMESTAMP"][:26])
    requests = []
    for row in rows:
        length = max(1, min(longest, round(int(row["ContextTokens"]) * scale)))
        tokens = tuple(rng.choices(range(10, vocab), k=length))
        at = (datetime.fromisoformat(row["TIMESTAMP"][:26]) - began).total_seconds()
        requests.append(_by_somebody(at, tokens, max(1, round(int(row["GeneratedTokens"]) * scale)), rng))
    return requests


def mooncake(count: int, vocab: int, *, scale: float = 0.1, longest: int = 1500) -> list[TraceRequest]:
    """The first `count` requests of the Mooncake trace, a block of 512 tokens as one of 16, answers times `scale`.

    Raises:
        FileNotFoundError: there is no PONDER_SHARED.
    """
    blocks: dict[int, tuple[int, ...]] = {}
    requests = []
    for line in MOONCAKE.read_text("utf-8").splitlines()[:count]:
        row = json.loads(line)
        kept = row["hash_ids"][: longest // BLOCK]
        for id in kept:
            if id not in blocks:
                blocks[id] = tuple(Random(id).choices(range(10, vocab), k=BLOCK))
        tokens = tuple(token for id in kept for token in blocks[id])
        answer = max(1, round(row["output_length"] * scale))
        somebody = Random(kept[min(1, len(kept) - 1)])  # a conversation's turns are one tenant's
        requests.append(_by_somebody(row["timestamp"] / 1000, tokens, answer, somebody))
    return requests


TRACES = {"azure": azure, "mooncake": mooncake}


def at_rate(requests: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """The same in the same rhythm, faster or slower: `rate` a second on average."""
    speed = rate * requests[-1].at / len(requests)
    return [replace(request, at=request.at / speed) for request in requests]


def _by_somebody(at: float, tokens: tuple[int, ...], new_tokens: int, rng: Random) -> TraceRequest:
    tenant = rng.choices(range(TENANTS), [1 / (rank + 1) for rank in range(TENANTS)])[0]
    priority = rng.choices([each for each, _ in CLASSES], [share for _, share in CLASSES])[0]
    return TraceRequest(at, tokens, new_tokens, f"tenant {tenant}", priority)
