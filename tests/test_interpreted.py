"""Triton's interpreter as these tests change it still finds what it found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")


@triton.jit  # type: ignore[untyped-decorator]  # Triton is untyped
def twice(x: Any, out: Any, way: tl.constexpr) -> None:  # type: ignore[name-defined]
    at = tl.arange(0, 4)
    values = tl.load(x + at)
    if way == "sum":
        found = values + values
    elif way == "product":
        found = values * 2
    else:
        found = -values - values
    tl.store(out + at, found)


@pytest.mark.parametrize("way", ["sum", "product", "difference"])
def test_an_integer_that_does_not_fit_its_bits_is_told(way: str) -> None:
    small = torch.tensor([1, 2, 3, 2**30 - 1], dtype=torch.int32)
    out = torch.empty_like(small)
    twice[(1,)](small, out, way)
    assert torch.equal(out, small * (-2 if way == "difference" else 2))
    with pytest.raises(Exception, match="int32 overflow detected"):
        twice[(1,)](small + 2, out, way)
