"""Tests what the README shows runs as it stands, on the bundled model, and what it names is there."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def snippet(heading: str) -> str:
    """The Python code under a heading."""
    return first_code(README.split(f"\n## {heading}\n")[1].split("\n## ")[0])


def first_code(text: str) -> str:
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]  # type: ignore[index]  # there is one


def run(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_engine_alone() -> None:
    out = run(snippet("The engine alone"))
    first, forks = out[: out.rindex("[")], ast.literal_eval(out[out.rindex("[") :].strip())
    assert "24" in first
    assert len(forks) == 4 and len(set(forks)) > 1  # one prompt, different draws


@pytest.mark.slow
def test_the_engine_with_a_constraint() -> None:
    person = json.loads(run(first_code((ROOT / "docs/constraints.md").read_text(encoding="utf-8"))))
    assert list(person) == ["name", "age"] and len(person["name"]) <= 20 and person["age"] >= 0


@pytest.mark.slow
def test_with_an_openai_client(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "app.cli", "serve", "--port", "0", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = next(line for line in server.stdout if "ready at" in line).split()[-1]
            assert "85" in run(snippet("With an OpenAI client").replace("http://127.0.0.1:8000", address))
        finally:
            server.terminate()
        assert server.wait(timeout=20) == 0


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [t for t in targets if not ((ROOT / page).parent / t).exists()] == []


def test_every_make_target_is_a_target() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", README, re.MULTILINE)) <= targets


def test_every_dependency_has_its_line() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w.@/-]+", page))
    wanted = [re.split(r"[><=\[]", d)[0] for d in (*project["dependencies"], *project["optional-dependencies"]["dev"])]
    assert [name for name in wanted if name not in named] == []
