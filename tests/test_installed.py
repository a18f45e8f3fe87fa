"""An installation for development is this folder, and no copy of a part of it that grows old."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from app.config import Settings

ROOT = Path(__file__).resolve().parents[1]


def test_everything_is_imported_from_here(tmp_path: Path) -> None:
    code = "import app, engine, ponder, reasoning, retrieval, tools\n" + "".join(
        f"print({name}.__file__)\n" for name in ("app", "engine", "ponder", "reasoning", "retrieval", "tools")
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(Path(line).is_relative_to(ROOT) and ".venv" not in line for line in shown.stdout.splitlines())


def test_the_image_gets_whatever_the_wheel_is_made_of() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    passed = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert {*build["only-include"], "web", "models", "requirements", "constraints.txt", "hatch_build.py"} <= passed


def test_the_images_variables_are_settings() -> None:
    names = re.findall(r"\bPONDER_([A-Z_]+)=", (ROOT / "Dockerfile").read_text())
    assert names and {name.lower() for name in names} <= set(Settings.model_fields)
