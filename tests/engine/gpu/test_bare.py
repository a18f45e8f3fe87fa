"""A GPU's machine often has torch and transformers and little else: `make gpu` needs no more."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ABSENT = (
    "msgspec", "zmq", "llguidance", "fastapi", "starlette", "uvicorn", "pydantic", "pydantic_core",
    "pytest_asyncio", "psutil", "mcp", "playwright", "opentelemetry", "prometheus_client",
)  # fmt: skip
PROGRAM = f"""
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import bench.gpu.__main__, engine.kernels.tune, tests.gpu, pytest
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", *tests.gpu.asked_for()]))
"""


def test_it_imports_where_little_else_is_installed() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "tests collected" in done.stdout
