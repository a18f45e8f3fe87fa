"""The products of one token and of any number alike: kernels against torch references, and bits against bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import gemv, matmul
from engine.kernels.norm import Norm
from engine.model.model_spec import Activation

BOUND = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-3}  # of the largest number
few = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
widths = st.sampled_from([16, 48, 100, 1024, 1500])


def numbers(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def same(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    error = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    assert error < BOUND[dtype], f"relative error {error}"


@few
@given(
    rows=st.sampled_from([3, 8, 57]), width=widths, dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    normed=st.booleans(), bias=st.booleans(), activation=st.sampled_from([None, "silu", "gelu", "gelu_tanh"]),
    adds=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_one_token(
    device: str, rows: int, width: int, dtype: torch.dtype, normed: bool, bias: bool, activation: Activation | None,
    adds: bool, seed: int,
) -> None:  # fmt: skip
    of_weight = rows * 2 if activation else rows
    x = numbers(1, width, device=device, dtype=dtype, seed=seed) * 3
    weight = numbers(of_weight, width, device=device, dtype=dtype, seed=seed + 1) * width**-0.5
    norm = Norm(numbers(width, device=device, seed=seed + 2), 1e-5) if normed else None
    extra = numbers(of_weight, device=device, dtype=dtype, seed=seed + 3) if bias else None
    residual = numbers(1, rows, device=device, dtype=dtype, seed=seed + 4) if adds else None
    found = []
    for run in (gemv.gemv_triton, gemv.gemv_torch):
        into = None if residual is None else residual.clone()
        result = run(x, weight, extra, norm=norm, activation=activation, add_to=into, multiplier=0.7)
        assert into is None or result.data_ptr() == into.data_ptr()
        found.append(result)
    kernel, twin = found
    same(kernel, twin, dtype)


def test_logits_of_one_token_are_wide(device: str) -> None:
    x, weight = (numbers(*shape, device=device, dtype=torch.float16) for shape in ((1, 64), (40, 64)))
    found = gemv.gemv_triton(x, weight, dtype=torch.float32)
    same(found, gemv.gemv_torch(x, weight, dtype=torch.float32), torch.float32)


@few
@given(
    tokens=st.sampled_from([1, 2, 64, 65]), rows=st.sampled_from([1, 32, 70]), width=widths,
    dtype=st.sampled_from([torch.bfloat16, torch.float16]), bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_number_of_tokens(
    device: str, tokens: int, rows: int, width: int, dtype: torch.dtype, bias: bool, seed: int
) -> None:
    x = numbers(tokens, width + 8, device=device, dtype=dtype, seed=seed)[:, :width]
    weight = numbers(rows, width, device=device, dtype=dtype, seed=seed + 1)
    extra = numbers(rows, device=device, dtype=dtype, seed=seed + 2) if bias else None
    same(matmul.multiply_triton(x, weight, extra), matmul.multiply_torch(x, weight, extra), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_row_is_the_same_bits_beside_any_others(dtype: torch.dtype, device: str) -> None:
    x = numbers(130, 300, device=device, dtype=dtype)
    weight = numbers(72, 300, device=device, dtype=dtype, seed=1)
    together = matmul.multiply_triton(x, weight)
    for first, end in ((0, 1), (3, 40), (100, 130), (129, 130)):
        assert torch.equal(matmul.multiply_triton(x[first:end], weight), together[first:end])
