"""The mask kernel and its torch reference against a loop over bits."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.token_bitmask import apply_token_bitmask_torch, apply_token_bitmask_triton

SHAPES = [(1, 5, 1), (4, 64, 2), (3, 1000, 3), (7, 2049, 4), (3, 151_936, 2)]  # rows, vocabulary, constrained rows


def case(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Logits, bits and rows, and the expected result, by a loop."""
    n, vocabulary, m = shape
    generator = torch.Generator().manual_seed(hash(shape) % 1000)
    logits = torch.randn(n, vocabulary, generator=generator).to(dtype)
    bits = torch.randint(-(2**31), 2**31, (m, -(-vocabulary // 32)), generator=generator).to(torch.int32)
    if vocabulary > 2000:  # few tokens are forbidden, as within a string
        bits[0] = torch.where(torch.arange(bits.shape[1]) % 9 == 0, bits[0], -1)
    if vocabulary > 100_000:
        bits[-1, 20:] = 0  # few tokens are allowed, as within a key
    rows = torch.randperm(n, generator=generator)[:m]
    wanted = logits.clone()
    for i, row in enumerate(rows.tolist()):
        words = [word & 0xFFFFFFFF for word in bits[i].tolist()]
        forbidden = [t for t in range(vocabulary) if not words[t // 32] >> (t % 32) & 1]
        wanted[row, forbidden] = float("-inf")
    return logits.to(device), bits.to(device), rows.to(device), wanted.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_twin_forbids_where_a_bit_is_zero(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    logits, bits, rows, wanted = case(shape, dtype, "cpu")
    for _ in range(3):  # a mask that comes again may be remembered
        again = logits.clone()
        apply_token_bitmask_torch(again, bits, rows)
        assert torch.equal(again, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES[: None if torch.cuda.is_available() else -1], ids=str)
def test_the_kernel_does_the_same(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    logits, bits, rows, wanted = case(shape, dtype, device)
    apply_token_bitmask_triton(logits, bits, rows)
    assert torch.equal(logits, wanted)
    twin, bits, rows, wanted = case(shape, dtype, device)
    apply_token_bitmask_torch(twin, bits, rows)
    assert torch.equal(twin, wanted)
