"""Device that kernels run on: a GPU, or the interpreter on the CPU where there is none."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tests.interpreted import check_overflow


@pytest.fixture(scope="session")
def device() -> str:
    pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def checked_overflow() -> Iterator[None]:
    """The interpreter tells where an integer of a kernel does not fit its bits."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    check_overflow(True)
    yield
    check_overflow(False)
