"""Sampled tokens filled into the next step: the kernel and its torch reference against a loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.sampled_tokens import fill_sampled_torch, fill_sampled_triton


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Token ids, some of them the place of a drawn token, and the drawn ones."""
    drawn = draw(st.lists(st.integers(0, 300_000), max_size=9))
    known = st.integers(0, 300_000)
    unknown = st.integers(0, len(drawn) - 1).map(lambda at: -1 - at) if drawn else known
    return draw(st.lists(st.one_of(known, unknown), min_size=1, max_size=300)), drawn


@pytest.mark.parametrize("fill", [fill_sampled_torch, fill_sampled_triton])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@given(steps())
def test_tokens_stand_where_their_places_stood(
    fill: Callable[[torch.Tensor, torch.Tensor], None],
    dtype: torch.dtype,
    device: str,
    step: tuple[list[int], list[int]],
) -> None:
    asked, drawn = step
    around = torch.full((len(asked) + 8,), -1, dtype=dtype, device=device)  # memory beside them is not theirs
    token_ids = around[4:-4]
    token_ids.copy_(torch.tensor(asked))
    fill(token_ids, torch.tensor(drawn, dtype=torch.int64, device=device))
    assert token_ids.tolist() == [drawn[-1 - token] if token < 0 else token for token in asked]
    assert (around[:4] == -1).all() and (around[-4:] == -1).all()
