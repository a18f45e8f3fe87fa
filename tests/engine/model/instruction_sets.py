"""The kernels in C++ as they are built for one of the instruction sets that the processor has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.kernels.cpu import build


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
