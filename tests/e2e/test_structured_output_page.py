"""Tests what docs/structured-output.md shows runs as it stands, against `ponder serve` with the bundled model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/structured-output.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = str(tmp_path_factory.mktemp("data"))
    command = [sys.executable, "-m", "app.cli", "serve", "--port", "0", "--data-dir", folder]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield next(line for line in server.stdout if "ready at" in line).split()[-1]
        server.terminate()


def run(heading: str, address: str) -> dict[str, Any]:
    """The names that the code under a heading leaves behind. Any: they are of all types."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    left: dict[str, Any] = {"__name__": "snippet"}
    exec(code[1].replace("http://127.0.0.1:8000", address), left)
    return left


def test_a_pydantic_model(address: str) -> None:
    left = run("A pydantic model, with OpenAI's client", address)
    assert isinstance(left["person"], left["Person"])


def test_a_choice(address: str) -> None:
    reply = run("An expression, a choice, a grammar", address)["reply"]
    assert reply["choices"][0]["message"]["content"] in ("yes", "no")


def test_a_loop_of_tools(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    left = run("Tools", address)
    assert [one["role"] for one in left["messages"] if isinstance(one, dict)] == ["user", "tool"]
    assert "408" in capsys.readouterr().out  # 12 * 34


def test_pydantic_ai(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    left = run("pydantic-ai", address)
    assert isinstance(left["person"], left["Person"]) and isinstance(left["same"], left["Person"])
    assert "408" in capsys.readouterr().out
