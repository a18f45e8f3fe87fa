"""Codex (`npm install @openai/codex`) on the path, as `codex exec`, through the Responses API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.clients import cell
from tests.clients.cell import Cells, PromptCache, assert_stops
from tests.clients.script import Turn, play

cells = Cells("Codex", "@openai/codex", program="codex")
CONFIG = """
model = "default"
model_provider = "ponder"
[model_providers.ponder]
name = "Ponder"
base_url = "{url}/v1"
wire_api = "responses"
"""


def start(url: str, work: Path, *arguments: str) -> subprocess.Popen[str]:
    home = work / "home"
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.format(url=url))
    command = ["codex", "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", *arguments]
    return subprocess.Popen(
        command, cwd=work, env={**os.environ, "CODEX_HOME": str(home)}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def run(url: str, *arguments: str, files: dict[str, str] | None = None) -> list[Any]:
    """Returns the events of a session in a folder with `files`; those of items as (type, item)."""
    with tempfile.TemporaryDirectory() as work:
        for name, text in (files or {}).items():
            (Path(work) / name).write_text(text)
        lines = start(url, Path(work), *arguments).communicate(timeout=300)[0].splitlines()
    return [json.loads(line) for line in lines]


def items(events: list[Any], kind: str) -> list[Any]:
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in done if item["type"] == kind]


def texts(events: list[Any]) -> list[str]:
    return [item["text"] for item in items(events, "agent_message")]


def shell(*commands: str) -> Turn:
    return Turn(calls=[("exec_command", {"cmd": command}) for command in commands])


@cells("plain")
def plain(url: str) -> None:
    assert texts(run(url, cell.SAYS_HELLO)) == [cell.HELLO]


@cells("tools")
def tools(url: str) -> None:
    events = run(url, play(shell("echo 12 degrees"), Turn(cell.SUMMARY)))
    (command,) = items(events, "command_execution")
    assert command["aggregated_output"] == "12 degrees\n" and texts(events) == [cell.SUMMARY]


@cells("parallel tools")
def parallel_tools(url: str) -> None:
    events = run(url, play(shell("echo 12", "echo 30"), Turn(cell.BOTH)))
    outputs = [command["aggregated_output"] for command in items(events, "command_execution")]
    assert sorted(outputs) == ["12\n", "30\n"] and texts(events) == [cell.BOTH]


@cells("typed result")
def typed_result(url: str) -> None:
    kinds = {"name": {"type": "string"}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": kinds, "required": [*kinds], "additionalProperties": False}
    events = run(url, "--output-schema", "schema.json", cell.WRITES_PERSON, files={"schema.json": json.dumps(schema)})
    assert [json.loads(text) for text in texts(events)] == [cell.PERSON]


@cells("typed result + tools")
def typed_result_and_tools(url: str) -> None:
    kinds = {"name": {"type": "string"}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": kinds, "required": [*kinds], "additionalProperties": False}
    script = play(shell("echo 12 degrees"), Turn(json.dumps(cell.PERSON)))
    events = run(url, "--output-schema", "schema.json", script, files={"schema.json": json.dumps(schema)})
    assert len(items(events, "command_execution")) == 1 and json.loads(texts(events)[-1]) == cell.PERSON


@cells("reasoning")
def reasoning(url: str) -> None:
    events = run(url, "-c", 'model_reasoning_effort="low"', "-c", "show_raw_agent_reasoning=true", cell.SAYS_HELLO)
    assert texts(events) == [cell.HELLO]
    assert events[-1]["usage"]["reasoning_output_tokens"] > 3


@cells("errors")
def errors(url: str) -> None:
    events = run(url, "--model", "gpt-5", cell.SAYS_HELLO)
    assert events[-1]["type"] == "turn.failed" and "gpt-5" in events[-1]["error"]["message"]


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
    steps = [shell(f"cat part_{number}.txt") for number in range(cell.STEPS)]
    cache = PromptCache(url)
    with cache.polled():
        events = run(
            url, play(*steps, Turn(cell.FINISHED)),
            files={f"part_{number}.txt": cell.part(number) for number in range(cell.STEPS)},
        )  # fmt: skip
    outputs = [command["aggregated_output"] for command in items(events, "command_execution")]
    assert outputs == [cell.part(number) for number in range(cell.STEPS)] and texts(events) == [cell.FINISHED]
    return cache.remark()


if __name__ == "__main__":
    cells.main()
