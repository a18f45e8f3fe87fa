"""Where there is no GPU, what the engine does for one is shown on one that is pretended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pretended import Machine, pretended


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine | None]:
    """The device that is not there; None where there is one."""
    pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")
    if torch.cuda.is_available():
        yield None
        return
    with pretended(monkeypatch) as made:
        yield made
