"""Log-probabilities of single tokens and of the likeliest, against log-softmax in double precision."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.logprobs import Logprobs, logprobs_torch, logprobs_triton

FUNCTIONS = [pytest.param(logprobs_torch, id="twin"), pytest.param(logprobs_triton, id="kernel")]


@pytest.mark.parametrize("function", FUNCTIONS)
@settings(max_examples=25)
@given(
    rows=st.lists(st.integers(0, 3), max_size=5),
    vocabulary=st.sampled_from([1, 33, 4095, 4096, 4097, 9001]),
    k=st.sampled_from([0, 1, 5, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_they_are_those_of_log_softmax(
    function: object, rows: list[int], vocabulary: int, k: int, dtype: torch.dtype, masked: bool, seed: int, device: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(4, vocabulary + 3, generator=generator) * 8 + 100).to(dtype)[:, 2 : vocabulary + 2]
    if masked:
        logits[:, 1:4500] = -torch.inf
    tokens = torch.randint(vocabulary, (len(rows),), generator=generator)
    asked = torch.tensor(rows, dtype=torch.int32)
    found: Logprobs = function(logits.to(device), asked.to(device), tokens.to(device), k)  # type: ignore[operator]
    wanted = torch.log_softmax(logits.double(), -1)[rows]
    check = partial(torch.testing.assert_close, rtol=1e-6, atol=2e-5)  # of numbers around 100 as fp32 has them
    check(found.chosen.cpu().double(), wanted.gather(1, tokens[:, None]).squeeze(1))
    values = wanted.topk(min(k, vocabulary)).values
    check(found.values.cpu().double(), values)
    check(wanted.gather(1, found.tokens.cpu()), values)


def test_a_rows_numbers_have_the_same_bits_in_any_batch(device: str) -> None:
    logits = torch.randn(5, 9001, generator=torch.Generator().manual_seed(1)).to(device)
    tokens = torch.arange(5, device=device) * 1500
    rows = torch.arange(5, dtype=torch.int32, device=device)
    together = logprobs_triton(logits, rows, tokens, 3)
    for row in range(5):
        alone = logprobs_triton(logits[row : row + 1], rows[:1], tokens[row : row + 1], 3)
        assert alone.chosen.equal(together.chosen[row : row + 1])
        assert alone.values.equal(together.values[row : row + 1])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_chosen_token_has_what_it_has_among_the_likeliest(function: object, device: str) -> None:
    logits = (torch.randn(3, 5000, generator=torch.Generator().manual_seed(4)) * 9).to(device)
    rows, best = torch.arange(3, dtype=torch.int32, device=device), logits.argmax(-1)
    found: Logprobs = function(logits, rows, best, 2)  # type: ignore[operator]
    assert found.chosen.equal(found.values[:, 0])
    assert found.tokens[:, 0].equal(best)
