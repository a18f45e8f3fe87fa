"""kill -9 in the middle of runs with tools: nothing that was seen is lost, and no call has its effect twice.

`python -m tests.app.crash FOLDER 1000 1` does it a thousand times.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
KILLS = 9  # the first when its runs have ended


def test_killed_runs_are_whole_or_failed_and_replay_to_the_same_tokens(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.app.crash", str(tmp_path), str(KILLS), "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["faults"] == [] and told["kills"] == KILLS
    assert told["events seen"] > 10 * KILLS and told["writes"] >= KILLS, "the kills came too early to show anything"
    assert told.get("run.failed", 0) + told.get("run.completed", 0) == 3 * KILLS
    assert told["replayed"].get("differ", 0) == 0 and told["replayed"]["with a call"] > 0
