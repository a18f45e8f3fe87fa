"""Packed linear layers compute the same as `F.linear`, by any packing that size and dtype select."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from engine.model.linear import PREPACK_FROM, default_dtype, native_bf16, pack


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("out", "width"), [(24, 40), (PREPACK_FROM // 512 + 8, 512)], ids=["transposed", "prepacked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_plain(dtype: torch.dtype, out: int, width: int, biased: bool, rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(out, width, dtype=dtype), torch.randn(rows, width, dtype=dtype)
    bias = torch.randn(out, dtype=dtype) if biased else None
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    with torch.inference_mode():
        found = pack(weight, bias)(x)
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert float((found.float() - expected).abs().max() / expected.abs().max()) < tolerance


def test_default_dtype_follows_the_hardware() -> None:
    assert default_dtype("cuda") == torch.bfloat16
    assert default_dtype("cpu") == (torch.bfloat16 if native_bf16() else torch.float32)
