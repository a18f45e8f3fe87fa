"""kill -9 of a server of three: readers go on at the others, and lose and double nothing.

`python -m tests.app.cluster.server_kills FOLDER 50 1` does it fifty times.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.app import postgres
from tests.app.cluster.redis_server import RedisServer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
KILLS = 3


def test_runs_of_a_killed_server_end_and_others_go_on(tmp_path: Path, redis: RedisServer) -> None:
    postgres.programs()  # skips where there are none
    command = [sys.executable, "-m", "tests.app.cluster.server_kills", str(tmp_path), str(KILLS), "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=290, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["faults"] == [] and told["kills"] == KILLS
    assert told["run.failed server_lost"] > 0 and told["run.completed"] > 0 and told["reconnected"] > KILLS
    assert told["events"] > 20 * KILLS, "the kills came too early to show anything"
