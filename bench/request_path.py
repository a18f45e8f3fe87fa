"""Counts the files and functions of ours that one warm request enters: `python -m bench.request_path`.

A server with the bundled model runs in this process under a profiler of every thread. Three requests are measured, each
after the same one has warmed it up: a chat, a chat constrained to a JSON schema, and a chat with a thinking budget.
Only functions that every one of `REPEATS` such requests enters count, as the server's timers run beside some of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from bench.report import ROOT

REPEATS = 4
PACKAGES = ("app", "engine", "reasoning", "retrieval", "tools")
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
REQUESTS: dict[str, dict[str, Any]] = {
    "chat": {"reasoning_effort": "none"},
    "schema": {
        "reasoning_effort": "none",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}},
    },
    "thinking": {"thinking": {"max_tokens": 16}},
}


class Recorder:
    """Collects the code objects of ours that are entered while `on`, in any thread."""

    def __init__(self) -> None:
        self.on = False
        self.entered: set[CodeType] = set()
        self._folders = tuple(str(ROOT / package) + os.sep for package in PACKAGES)

    def install(self) -> None:
        """Records calls of this thread and of all that are started from now on."""
        threading.setprofile(self._hear)
        sys.setprofile(self._hear)

    def counts(self) -> dict[str, int]:
        """Returns the numbers of files and of functions entered."""
        return {"files": len(self.files()), "functions": len(self.entered)}

    def files(self) -> list[str]:
        """Returns the entered files, relative to the root, in order."""
        return sorted({str(Path(code.co_filename).relative_to(ROOT)) for code in self.entered})

    def _hear(self, frame: FrameType, event: str, arg: object) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(self._folders):
            self.entered.add(frame.f_code)


def _ask(url: str, fields: dict[str, Any]) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "What is 27 + 58?"}],
        "max_tokens": 48,
    } | fields
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()


def _measure(recorder: Recorder, data: Path, found: dict[str, dict[str, Any]]) -> None:
    sys.setprofile(None)  # the client's side is not part of the path
    url_file = data / "server.url"
    while not url_file.exists():
        time.sleep(0.05)
    url = url_file.read_text(encoding="utf-8").strip()
    for name, fields in REQUESTS.items():
        for _ in range(2):
            _ask(url, fields)
        rounds: list[set[CodeType]] = []
        for _ in range(REPEATS):
            time.sleep(0.5)
            recorder.entered = set()
            recorder.on = True
            _ask(url, fields)
            recorder.on = False
            rounds.append(recorder.entered)
        recorder.entered = set.intersection(*rounds)
        found[name] = {**recorder.counts(), "names": recorder.files()}
    os.kill(os.getpid(), signal.SIGTERM)


def measure() -> dict[str, dict[str, Any]]:
    """Returns for each request the numbers of files and functions, and the files' names."""
    from app.cli.serve import serve
    from app.config import Settings

    found: dict[str, dict[str, Any]] = {}
    recorder = Recorder()
    recorder.install()
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings.model_validate(
            {"model": str(ROOT / "models/pebble"), "data_dir": folder, "port": 0, "device": "cpu"}
        )
        threading.Thread(target=_measure, args=(recorder, Path(folder), found), daemon=True).start()
        serve(settings)
    return found


def main() -> None:
    found = measure()
    names = "--names" in sys.argv
    for name, counted in found.items():
        print(f"{name}: {counted['files']} files, {counted['functions']} functions", file=sys.stderr)
        if names:
            print("\n".join(f"    {file}" for file in counted["names"]), file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
