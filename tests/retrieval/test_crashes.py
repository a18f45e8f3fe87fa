"""kill -9 in the middle of an ingest: the job goes on at the next start, with no chunk doubled and none missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.retrieval.crash import PLACES

ROOT = Path(__file__).resolve().parents[2]
TRIALS = 56


@pytest.mark.slow
def test_a_killed_ingest_goes_on_with_nothing_doubled_or_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.retrieval.crash", str(tmp_path), str(TRIALS), "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told["killed"]) >= TRIALS // 2
    assert len(set(told["killed"])) >= len(PLACES) // 2
    made, calm = told["made"], told["calm"]
    assert made["status"] == calm["status"] == "done" and made["stalled"] is None
    assert made["chunks"] == calm["chunks"]
    assert made["dense"] and made["lexical"] and made["vectors"] and made["allowed"]
