"""Paths of the real data and known answers that are not part of this repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("PONDER_SHARED", Path(__file__).parents[2] / "shared"))


def shared(name: str) -> Path:
    """A file or folder of `PONDER_SHARED` (default `../shared`); the test skips where it is absent."""
    path = SHARED / "data" / name
    if not path.exists():
        pytest.skip(f"needs {name} from PONDER_SHARED")
    return path
