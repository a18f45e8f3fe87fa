"""Adapters of a ragged batch: both forms against the torch reference, which goes row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.lora import (
    Adapters,
    add_by_run_torch,
    add_by_run_triton,
    add_by_token_torch,
    add_by_token_triton,
    pack,
)

BOUND = {torch.bfloat16: 8e-3, torch.float16: 2e-3}


def random(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def adapters_of(ranks: list[int], width: int, height: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    return [
        (random(rank, width, seed=rank, dtype=dtype), random(height, rank, seed=rank + 100, dtype=dtype) / rank)
        for rank in ranks
    ]


def case(
    data: st.DataObject, lengths: list[int], device: str
) -> tuple[torch.Tensor, torch.Tensor, Adapters, list[int]]:
    """y, x, adapters, and one of them or -1 for each length."""
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16]), label="dtype")
    width = data.draw(st.sampled_from([5, 64, 257, 700]), label="in")
    height = data.draw(st.sampled_from([1, 33, 128, 150]), label="out")
    ranks = data.draw(st.lists(st.sampled_from([1, 8, 16, 17, 64]), min_size=1, max_size=3), label="ranks")
    which = data.draw(st.lists(st.integers(-1, len(ranks) - 1), min_size=len(lengths), max_size=len(lengths)))
    pairs = adapters_of(ranks, width, height, dtype)
    given = [(a.to(device), b.to(device), 0.5 + at) for at, (a, b) in enumerate(pairs)]
    bank = pack([*given[:-1], None, given[-1]] if data.draw(st.booleans(), label="one without an update") else given)
    x = random(sum(lengths), width + 3, seed=1, dtype=dtype).to(device)[:, 3:]
    y = random(sum(lengths), height + 2, seed=2, dtype=dtype).to(device)[:, :height]
    return y, x, bank, which


def check(found: torch.Tensor, wanted: torch.Tensor, y: torch.Tensor, rows: list[int]) -> None:
    """Near the torch reference, and untouched where there is no adapter."""
    assert not found.isnan().any()
    assert float((found - wanted).float().abs().max()) <= BOUND[y.dtype] * float(wanted.float().abs().max())
    without = [row for row, adapter in enumerate(rows) if adapter < 0]
    assert torch.equal(found[without], y[without])


@settings(max_examples=15)
@given(data=st.data())
def test_tokens_of_several_adapters(device: str, data: st.DataObject) -> None:
    y, x, bank, which = case(data, [1] * data.draw(st.integers(1, 5), label="tokens"), device)
    chosen = torch.tensor(which, dtype=torch.int32, device=device)
    found, wanted = y.clone(), y.clone()
    add_by_token_torch(wanted, x, bank, chosen)
    add_by_token_triton(found, x, bank, chosen)
    check(found, wanted, y, which)


@settings(max_examples=15)
@given(data=st.data())
def test_runs_of_several_adapters(device: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 5, 32, 33]), min_size=1, max_size=4), label="lengths")
    y, x, bank, which = case(data, lengths, device)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    chosen = torch.tensor(which, dtype=torch.int32, device=device)
    found, wanted = y.clone(), y.clone()
    add_by_run_torch(wanted, x, bank, starts, chosen, max(lengths))
    add_by_run_triton(found, x, bank, starts, chosen, max(lengths))
    if len(y):
        check(found, wanted, y, [adapter for adapter, n in zip(which, lengths, strict=True) for _ in range(n)])


def test_the_twin_is_the_formula() -> None:
    (a, b), (c, d) = adapters_of([3, 2], 10, 6, torch.float32)
    bank = pack([(a, b, 2.0), (c, d, 0.5)])
    x, y = random(3, 10, seed=3, dtype=torch.float32), torch.zeros(3, 6)
    add_by_token_torch(y, x, bank, torch.tensor([1, -1, 0], dtype=torch.int32))
    assert torch.allclose(y, torch.stack([x[0] @ c.T @ d.T / 2, torch.zeros(6), x[2] @ a.T @ b.T * 2]), atol=1e-5)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_batch_without_adapters_is_left_alone(rows: int, device: str) -> None:
    (pair,) = adapters_of([4], 32, 16, torch.bfloat16)
    bank = pack([(pair[0].to(device), pair[1].to(device), 1.0)])
    x, y = torch.ones(rows, 32, device=device).bfloat16(), torch.ones(rows, 16, device=device).bfloat16()
    nobody = torch.full((rows,), -1, dtype=torch.int32, device=device)
    add_by_token_triton(y, x, bank, nobody)
    add_by_run_triton(y, x, bank, torch.arange(rows + 1, dtype=torch.int32, device=device), nobody, 1)
    assert torch.equal(y, torch.ones_like(y))
