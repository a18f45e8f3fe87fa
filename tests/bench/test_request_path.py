"""docs/request.md names the files that a chat request really enters."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/request.md").read_text(encoding="utf-8")


def test_the_page_follows_a_request() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.request_path"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    entered = set(found["chat"]["names"]) | set(found["schema"]["names"])
    drawn = PAGE.split("```")[1]
    named = set(re.findall(r"(?:app|engine|reasoning)/[a-z_/]+\.py", drawn))
    streaming_only = {"app/openai/event_stream.py"}
    assert len(named) > 20 and named - entered <= streaming_only
    assert found["schema"]["files"] >= found["chat"]["files"] > 20


def test_every_file_of_the_page_is_there() -> None:
    assert [
        name for name in re.findall(r"`((?:app|engine|reasoning)/[a-z_/]+\.py)`", PAGE) if not (ROOT / name).is_file()
    ] == []
