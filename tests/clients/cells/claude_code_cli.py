"""Claude Code (`npm install @anthropic-ai/claude-code`) on the path, as `claude -p` with all its tools."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.clients import cell
from tests.clients.cell import Cells, assert_stops
from tests.clients.script import Turn, play

cells = Cells("Claude Code", "@anthropic-ai/claude-code", program="claude")
ENVIRONMENT = {
    "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "default", "ANTHROPIC_DEFAULT_HAIKU_MODEL": "default",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
}  # fmt: skip


def start(url: str, work: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    given = {**os.environ, **ENVIRONMENT, "ANTHROPIC_BASE_URL": url, "HOME": str(work / "home"), **environment}
    (work / "home").mkdir()
    command = ["claude", "-p", *arguments, "--output-format", "stream-json", "--verbose"]
    return subprocess.Popen(
        command, cwd=work, env=given, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def run(url: str, *arguments: str, files: dict[str, str] | None = None, **environment: str) -> list[Any]:
    """Returns the events of a session in a folder with `files`, which a script names as `{work}/NAME`."""
    with tempfile.TemporaryDirectory() as work:
        for name, text in (files or {}).items():
            (Path(work) / name).write_text(text)
        placed = [each.replace("{work}", work) for each in arguments]
        lines = start(url, Path(work), *placed, **environment).communicate(timeout=300)[0].splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def blocks(events: list[Any], kind: str) -> list[Any]:
    messages = [event["message"] for event in events if event["type"] in ("assistant", "user")]
    found = [block for message in messages if isinstance(message["content"], list) for block in message["content"]]
    return [block for block in found if block["type"] == kind]


def answer(events: list[Any]) -> str:
    assert not events[-1]["is_error"], events[-1]
    return str(events[-1]["result"])


def bash(*commands: str) -> Turn:
    return Turn(calls=[("Bash", {"command": command, "description": "Runs it"}) for command in commands])


@cells("plain")
def plain(url: str) -> None:
    assert answer(run(url, cell.SAYS_HELLO)) == cell.HELLO


@cells("stream")
def stream(url: str) -> None:
    events = run(url, cell.SAYS_HELLO, "--include-partial-messages")
    deltas = [
        event["event"]["delta"] for event in events if event["type"] == "stream_event" and "delta" in event["event"]
    ]
    texts = [delta["text"] for delta in deltas if delta.get("type") == "text_delta"]
    assert "".join(texts) == answer(events) == cell.HELLO and len(texts) > 3


@cells("tools")
def tools(url: str) -> None:
    events = run(url, play(bash("echo 12 degrees"), Turn(cell.SUMMARY)), "--allowedTools", "Bash")
    assert [block["content"] for block in blocks(events, "tool_result")] == ["12 degrees"]
    assert answer(events) == cell.SUMMARY


@cells("parallel tools")
def parallel_tools(url: str) -> None:
    events = run(url, play(bash("echo 12", "echo 30"), Turn(cell.BOTH)), "--allowedTools", "Bash")
    assert [block["content"] for block in blocks(events, "tool_result")] == ["12", "30"]
    assert answer(events) == cell.BOTH


@cells("reasoning")
def reasoning(url: str) -> None:
    events = run(url, cell.SAYS_HELLO, MAX_THINKING_TOKENS="2000")
    assert [block["thinking"].strip() for block in blocks(events, "thinking")] == [cell.THOUGHT]
    assert answer(events) == cell.HELLO


@cells("errors")
def errors(url: str) -> None:
    events = run(url, "--model", "claude-5", cell.SAYS_HELLO)
    assert events[-1]["is_error"] and "claude-5" in events[-1]["result"]


@cells("disconnect")
def disconnect(url: str) -> str:
    """Interrupts it as Ctrl-C does, once the server writes."""

    def leave() -> None:
        before = cell.counters(url)["generation_tokens_total"]
        with tempfile.TemporaryDirectory() as work, start(url, Path(work), cell.NEVER_ENDS) as running:
            while cell.counters(url)["generation_tokens_total"] < before + 50:
                assert running.poll() is None
            running.send_signal(signal.SIGINT)
            running.wait(20)

    return assert_stops(url, leave)


@cells("long agent")
def long_agent(url: str) -> str:
    """Reads ten files with its tool Read, and counts its own usage."""
    steps = [Turn(calls=[("Read", {"file_path": f"{{work}}/part_{number}.txt"})]) for number in range(cell.STEPS)]
    files = {f"part_{number}.txt": cell.part(number) for number in range(cell.STEPS)}
    events = run(url, play(*steps, Turn(cell.FINISHED)), files=files)
    results = blocks(events, "tool_result")
    assert answer(events) == cell.FINISHED and len(results) == cell.STEPS
    assert all(f"{number}.9 the quick" in str(result["content"]) for number, result in enumerate(results))
    messages = {event["message"]["id"]: event["message"]["usage"] for event in events if event["type"] == "assistant"}
    shares = [
        usage["cache_read_input_tokens"]
        / (usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] + usage["input_tokens"])
        for usage in messages.values()
    ][1:]
    return cell.cached(shares)


if __name__ == "__main__":
    cells.main()
