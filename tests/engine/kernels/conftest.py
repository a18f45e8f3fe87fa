"""Device that kernels run on: a GPU, or the interpreter on the CPU where there is none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")
    return "cuda" if torch.cuda.is_available() else "cpu"
