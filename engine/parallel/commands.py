"""Commands of rank 0 to the others, as tensors: make the cache, copy parts of it, run a step.

Each is broadcast as 64-bit integers, a decode in one message. Knows batches and nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from engine.model.batch import Batch, Branches
from engine.parallel.collectives import RankGroup

_FIRST = 2048  # integers of a first message; the rest, if any, is a second one


class _Kind(IntEnum):
    ALLOCATE = 0
    COPY_BLOCKS = 1
    COPY_SLOTS = 2
    RUN = 3
    STOP = 4


@dataclass(frozen=True, slots=True)
class Allocate:
    """Make the cache of K/V, of so many blocks."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies within the cache, (source, destination): of blocks, or of single tokens' slots."""

    pairs: list[tuple[int, int]]
    slots: bool


Command = Allocate | Copies | Batch


def send_command(ranks: RankGroup, command: Command | None) -> None:
    """Sends a command from rank 0 to all others, which `receive_command`; None stops them."""
    match command:
        case None:
            kind, sizes, parts = _Kind.STOP, list[int](), list[Tensor]()
        case Allocate(blocks):
            kind, sizes, parts = _Kind.ALLOCATE, [blocks], []
        case Copies(pairs, slots):
            kind = _Kind.COPY_SLOTS if slots else _Kind.COPY_BLOCKS
            sizes, parts = [], [torch.tensor(pairs, dtype=torch.int64).flatten()]
        case Batch():
            kind, (sizes, parts) = _Kind.RUN, _numbers(command)
    body = torch.cat([torch.tensor(sizes, dtype=torch.int64), *parts])
    first = torch.zeros(_FIRST, dtype=torch.int64)
    first[0], first[1] = kind, len(body)
    head, rest = body[: _FIRST - 2], body[_FIRST - 2 :]
    first[2 : 2 + len(head)] = head
    ranks.broadcast(first)
    if len(rest):
        ranks.broadcast(rest)


def receive_command(ranks: RankGroup) -> Command | None:
    """Waits for the next command of rank 0; None: to stop."""
    first = ranks.broadcast(torch.empty(_FIRST, dtype=torch.int64))
    kind, length = first[:2].tolist()
    body = first[2 : 2 + length]
    if length > len(body):
        body = torch.cat([body, ranks.broadcast(torch.empty(length - len(body), dtype=torch.int64))])
    if kind == _Kind.STOP:
        return None
    if kind == _Kind.ALLOCATE:
        return Allocate(int(body[0]))
    if kind == _Kind.RUN:
        return _batch(body)
    pairs = [(source, destination) for source, destination in body.view(-1, 2).tolist()]
    return Copies(pairs, slots=kind == _Kind.COPY_SLOTS)


def _numbers(batch: Batch) -> tuple[list[int], list[Tensor]]:
    """Returns the sizes of a batch's parts, and the parts, flat."""
    assert batch.features is None and not batch.adapters, "see `check_parallel`"
    branches = batch.branches
    rows, width = batch.block_tables.shape
    wide = 0 if branches is None else branches.slots.shape[1]
    sizes = [len(batch.token_ids), rows, width, len(batch.logits_at), len(batch.windowed), branches is not None, wide]
    parts = [batch.token_ids, batch.positions, batch.slots, batch.block_tables, batch.logits_at]
    parts += [torch.tensor(batch.query_starts), torch.tensor(batch.context_lens)]
    parts += [each for group in batch.windowed for each in group]
    if branches is not None:
        parts += [torch.tensor(branches.starts), branches.slots]
    return [*sizes, batch.in_place, batch.first_key], [part.flatten() for part in parts]


def _batch(body: Tensor) -> Batch:
    tokens, rows, width, wanted, windowed, branched, wide, in_place, first_key = body[:9].tolist()
    rest = body[9:]

    def taken(*shapes: Sequence[int]) -> Iterator[Tensor]:
        nonlocal rest
        for shape in shapes:
            count = torch.Size(shape).numel()
            part, rest = rest[:count], rest[count:]
            yield part.view(*shape)

    ids, positions, slots, tables, logits_at, starts, contexts = taken(
        (tokens,), (tokens,), (tokens,), (rows, width), (wanted,), (rows + 1,), (rows,)
    )
    groups = tuple((table, slot) for table, slot in (taken((rows, width), (tokens,)) for _ in range(windowed)))
    branches = None
    if branched:
        begins, places = taken((rows,), (rows, wide))
        branches = Branches(tuple(begins.tolist()), places)
    return Batch(
        ids, positions, slots, tuple(starts.tolist()), tuple(contexts.tolist()), tables, logits_at,
        in_place=bool(in_place), windowed=groups, first_key=first_key, branches=branches,
    )  # fmt: skip
