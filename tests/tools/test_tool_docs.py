"""docs/plugins.md says what is so: its plugin and its test run, and its tables list what there is."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ponder
from tools import plugins
from tools.options import APPROVALS, FEWEST_CHARS, MAX_S, PERMISSIONS

ROOT = Path(ponder.__file__).parent
TEXT = (ROOT / "docs" / "plugins.md").read_text()
BLOCKS = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TEXT, re.DOTALL)


def _lines(source: str) -> int:
    return sum(1 for line in source.splitlines() if line.strip())


def test_the_plugin_and_its_test_are_short_and_run(tmp_path: Path) -> None:
    (plugin, source), (test, tested) = BLOCKS
    assert (plugin, test) == ("weather.py", "test_weather.py")
    assert _lines(source) <= 10 and _lines(tested) <= 5
    for name, text in BLOCKS:
        (tmp_path / name).write_text(text)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout + ran.stderr


def _rows(heading: str) -> dict[str, list[str]]:
    """The first table of a section: the first cell -> the others."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_every_option_is_listed_with_its_default_and_values() -> None:
    rows = {name.strip("`"): cells for name, cells in _rows("Options of `@tool`").items() if name.startswith("`")}
    options = {
        name: each.default
        for name, each in inspect.signature(ponder.tool).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    assert set(rows) == set(options)
    for name in ("timeout", "cache", "max_chars"):
        assert float(rows[name][1]) == options[name]
    assert rows["permission"][1] == f"`{options['permission']}`"
    assert re.findall(r"`(\w+)`", rows["permission"][0]) == list(PERMISSIONS)
    assert re.findall(r"`(\w+)`", rows["approval"][0]) == list(APPROVALS)
    assert str(FEWEST_CHARS) in rows["max_chars"][0] and f"{MAX_S:g}" in rows["timeout"][0]


def test_every_member_of_the_context_is_listed() -> None:
    listed = set(re.findall(r"ctx\.(\w+)", "".join(_rows("Context"))))
    members = {name for name in dir(ponder.FakeContext()) if not name.startswith("_")}
    own = {"steps", "outputs", "questions", "sources", "files", "refused"}  # the fake's, and what a call fills
    assert listed == members - own - {"end"}


def test_the_times_of_the_plugins_folder_are_these() -> None:
    assert f"every {plugins.POLL_S} seconds" in TEXT and f"within {plugins.IMPORT_S:g} seconds" in TEXT


@pytest.mark.parametrize(
    "name", ["run_tool", "call_tool", "FakeContext", "ScriptedModel", "assert_tool_called", "calls"]
)
def test_what_plugins_are_tested_with_is_listed(name: str) -> None:
    assert name in ponder.__all__ and f"{name}(" in "".join(_rows("Testing"))
