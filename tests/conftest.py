"""What tests of several folders stand on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import write_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny scripted model."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
