"""The kernels in C++ as built for one of the processor's instruction sets, and a check of their int8 tiles."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.kernels.cpu import build
from engine.kernels.cpu.binding import TiledWeight
from tests.engine.model.stepping import apart


@contextmanager
def kernels_for(instructions: str) -> Iterator[str]:
    """Takes these kernels for the processor's; "" for one that has none. Skips the test where it lacks them."""
    if instructions and instructions not in build.instruction_sets():
        pytest.skip(f"the processor has no {instructions}")
    cached = (build._load, build.library, build.unavailable)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "_chosen", lambda: instructions)
        for each in cached:
            each.cache_clear()
        yield instructions
    for each in cached:
        each.cache_clear()


def assert_int8_product(library: ctypes.CDLL, rows: int, out: int, width: int) -> None:
    """A layer of int8 tiles on AMX multiplies the weight that it was rounded to, and 64 rows or fewer in 16 bits."""
    torch.manual_seed(0)
    weight, x = torch.randn(out, width).bfloat16(), torch.randn(rows, width).bfloat16()
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    expected = x.float() @ ((weight.float() / scales).round() * scales).T
    found = TiledWeight(library, weight, eight_bits_from=65)(x)
    assert apart(found.float(), expected) < (5e-3 if rows < 65 else 2e-2)
