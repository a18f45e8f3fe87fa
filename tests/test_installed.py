"""An installation for development is this folder, and no copy of a part of it that grows old."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_everything_is_imported_from_here(tmp_path: Path) -> None:
    code = "import app, engine, ponder, reasoning, retrieval, tools\n" + "".join(
        f"print({name}.__file__)\n" for name in ("app", "engine", "ponder", "reasoning", "retrieval", "tools")
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(Path(line).is_relative_to(ROOT) and ".venv" not in line for line in shown.stdout.splitlines())
