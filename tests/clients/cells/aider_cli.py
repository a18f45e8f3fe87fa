"""aider, as a command in a folder of its own: the model answers with blocks that search and replace."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients import cell
from tests.clients.cell import Cells, assert_stops
from tests.clients.script import Turn, play

cells = Cells("aider", "aider-chat")
NOTES = "notes.txt"


def edit(before: str, after: str) -> Turn:
    return Turn(f"{NOTES}\n```\n<<<<<<< SEARCH\n{before}\n=======\n{after}\n>>>>>>> REPLACE\n```\n")


def start(url: str, work: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "aider", "--model", "openai/default", "--openai-api-base", f"{url}/v1",
        "--openai-api-key", "none", "--edit-format", "diff", "--yes-always", "--no-git", "--no-check-update",
        "--no-show-model-warnings", "--no-show-release-notes", "--analytics-disable", "--no-pretty", *arguments,
    ]  # fmt: skip
    return subprocess.Popen(
        command, cwd=work, env={**os.environ, "HOME": str(work)}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run(url: str, message: str, *arguments: str) -> tuple[str, str]:
    """Returns what aider says, and the notes afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / NOTES
        notes.write_text("step 0\n")
        said = start(url, Path(folder), "--message", message, *arguments, NOTES).communicate(timeout=300)[0]
        return said, notes.read_text()


@cells("plain")
def plain(url: str) -> None:
    assert run(url, play(edit("step 0", "step 1")), "--no-stream")[1] == "step 1\n"


@cells("stream")
def stream(url: str) -> None:
    assert run(url, play(edit("step 0", "step 1")), "--stream")[1] == "step 1\n"


@cells("errors")
def errors(url: str) -> None:
    said, notes = run(url, "hi", "--model", "openai/gpt-5")
    assert "gpt-5" in said and "not served here" in said and notes == "step 0\n"


@cells("disconnect")
def disconnect(url: str) -> str:
    """Ends it, once the server writes."""

    def leave() -> None:
        before = cell.counters(url)["generation_tokens_total"]
        with tempfile.TemporaryDirectory() as work, start(url, Path(work), "--message", cell.NEVER_ENDS) as running:
            while cell.counters(url)["generation_tokens_total"] < before + 50:
                assert running.poll() is None
            running.kill()

    return assert_stops(url, leave)


if __name__ == "__main__":
    cells.main()
