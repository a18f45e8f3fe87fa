"""`ponder` is all that a plugin imports: complete, and light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ponder

ROOT = Path(ponder.__file__).parent


@pytest.mark.parametrize("name", ponder.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(ponder, name) is not None


def test_a_name_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match="has no 'tol'; it has .*tool"):
        _ = ponder.tol
    assert dir(ponder) == sorted(ponder.__all__)


def test_a_plugin_loads_no_engine() -> None:
    code = """
import sys
from ponder import Context, Depends, Retry, Source, Toolset, tool

@tool
def add(a: int, b: int) -> int:
    "Adds."
    return a + b

assert add.validate({"a": 1, "b": 2}) == {"a": 1, "b": 2}
print(*sorted(set(sys.modules) & {"torch", "numpy", "fastapi", "mcp", "jsonschema", "tools.executor", "engine"}))
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []
