"""Without a GPU, the engine's GPU path is tested on a pretended one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine import builder
from tests.pretended import Machine, pretended


@pytest.fixture
def starts_whole() -> bool:
    """Returns whether engines run every kernel once at their start, as they do to have it compiled."""
    return False


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, starts_whole: bool) -> Iterator[Machine | None]:
    """The device that is not there; None where there is one."""
    pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")
    if torch.cuda.is_available():
        yield None
        return
    if not starts_whole:  # nothing is compiled here, and it takes longer than most tests
        for name in ("_warm_up", "warm_up"):
            monkeypatch.setattr(builder, name, lambda *of_all: None)
    with pretended(monkeypatch) as made:
        yield made
