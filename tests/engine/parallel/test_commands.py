"""Commands of rank 0 arrive whole at the others, and a step is cut into parts that are steps themselves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from engine.model.batch import Batch, Branches
from engine.parallel.collectives import RankGroup, thread_store
from engine.parallel.commands import Allocate, Command, Copies, receive_command, send_command
from engine.parallel.micro_batches import micro_batches

STARTS = (0, 3, 4, 10)  # of three rows


def batch_of(width: int = 5, *, branches: bool = False) -> Batch:
    def drawn(*shape: int) -> Tensor:
        return torch.randint(0, 1 << 40, shape)

    return Batch(
        drawn(10), drawn(10), drawn(10), STARTS, (20, 40, 60), drawn(3, width), torch.tensor([2, 3, 7, 9]),
        windowed=((drawn(3, width), drawn(10)), (drawn(3, width), drawn(10))),
        branches=Branches((18, 40, 57), drawn(3, 4)) if branches else None,
    )  # fmt: skip


def heard(command: Command | None) -> Command | None:
    """The command as rank 1 hears it from rank 0."""
    store = thread_store()
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda rank: RankGroup(store, "all", rank, 2), range(2))
        sent = pool.submit(send_command, one, command)
        found = receive_command(other)
        sent.result()
    return found


def same(one: Batch, other: Batch) -> None:
    for field in fields(Batch):
        if field.name not in ("windowed", "branches"):
            a, b = getattr(one, field.name), getattr(other, field.name)
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, field.name
    for group, told in zip(one.windowed, other.windowed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(group, told, strict=True))
    assert (one.branches is None) == (other.branches is None)
    if one.branches is not None and other.branches is not None:
        assert one.branches.starts == other.branches.starts and torch.equal(one.branches.slots, other.branches.slots)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("width", [5, 3000])
def test_a_batch_arrives_whole(width: int, branches: bool) -> None:
    told = replace(batch_of(width, branches=branches), in_place=False, first_key=3)
    found = heard(told)
    assert isinstance(found, Batch)
    same(told, found)


@pytest.mark.parametrize(
    "command", [Allocate(7), Copies([(1, 2), (3, 4)], slots=False), Copies([(9, 1)], slots=True), None]
)
def test_other_commands_arrive_whole(command: Command | None) -> None:
    assert heard(command) == command


def test_micro_batches_cut_rows_where_they_must() -> None:
    first, second = micro_batches(replace(batch_of(), windowed=()), 2)
    assert (first.query_starts, first.context_lens) == ((0, 3, 4, 5), (20, 40, 55))
    assert (second.query_starts, second.context_lens) == ((0, 5), (60,))
    assert (first.logits_at.tolist(), second.logits_at.tolist()) == ([2, 3], [2, 4])


def test_rows_with_token_trees_stay_whole() -> None:
    parts = micro_batches(replace(batch_of(branches=True), windowed=()), 2)
    assert [part.query_starts for part in parts] == [(0, 3, 4), (0, 6)]
    assert [part.branches.starts for part in parts if part.branches is not None] == [(18, 40), (57,)]


def test_a_lone_decode_is_one_micro_batch() -> None:
    one = torch.ones(1, dtype=torch.int64)
    lone = Batch(one, one, one, (0, 1), (9,), one[None], one - 1)
    (part,) = micro_batches(lone, 4)
    same(part, lone)
