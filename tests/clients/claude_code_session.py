"""Runs Claude Code against a server of the bundled model, over several turns with a calculator of ours as its tool.

    npm install --prefix build/claude-code @anthropic-ai/claude-code
    python -m tests.clients.claude_code_session build/claude-code/node_modules/.bin/claude

Not a test of the suite: it needs a program from npm, and a model of 7.9 million parameters answers as it likes. Prints
one line of JSON for each turn: calls, results, answer, and for each request its prompt's tokens and how many of them
came from the prefix cache. It talks to the loopback interface alone. Claude Code is told a system prompt of its own and
no built-in tools, as its usual ones have more tokens than the bundled model's context.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

QUESTIONS = ["What is 23 * 17?", "What is 40 * 2?", "Thank you!"]
TIMEOUT_S = 180
_PROMPT = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


def calculator() -> None:
    """Serves the tool over stdin and stdout, for Claude Code to start."""
    from mcp.server import MCPServer

    server = MCPServer("calc")

    @server.tool()
    def calculate(expression: str) -> str:
        """Work out an arithmetic expression."""
        left, operator, right = expression.split()
        a, b = float(left), float(right)
        return f"{ {'+': a + b, '-': a - b, '*': a * b, '/': a / b if b else float('nan')}[operator]:g}"

    server.run()


def turn(claude: str, question: str, number: int, url: str, home: Path) -> dict[str, Any]:
    """One question of the session, and all that Claude Code says of its answer."""
    command = [sys.executable, "-m", "tests.clients.claude_code_session", "--calculator"]
    servers = {"mcpServers": {"calc": {"command": command[0], "args": command[1:], "env": {"PYTHONPATH": os.getcwd()}}}}
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(home), "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "default", "ANTHROPIC_DEFAULT_HAIKU_MODEL": "default",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "MAX_THINKING_TOKENS": "0",
        "MCP_CONNECTION_NONBLOCKING": "false", "ENABLE_TOOL_SEARCH": "false",
    }  # fmt: skip
    said = subprocess.run(
        [
            os.path.abspath(claude), "-p", question, *(["--continue"] if number else []), "--output-format",
            "stream-json", "--verbose", "--tools", "", "--system-prompt", "You answer with your tools.",
            "--strict-mcp-config", "--mcp-config", json.dumps(servers), "--allowedTools", "mcp__calc__calculate",
        ],
        env=environment, cwd=home, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    events = [json.loads(line) for line in said.stdout.splitlines() if line.startswith("{")]
    blocks = [
        block
        for event in events
        if event["type"] in ("assistant", "user") and isinstance(event["message"]["content"], list)
        for block in event["message"]["content"]
    ]
    result: dict[str, Any] = next((event for event in events if event["type"] == "result"), {"stderr": said.stderr})
    usages = {
        event["message"]["id"]: event["message"]["usage"] for event in events if event["type"] == "assistant"
    }  # fmt: skip
    return {
        "question": question,
        "calls": [block["input"] for block in blocks if block["type"] == "tool_use"],
        "results": [block["content"] for block in blocks if block["type"] == "tool_result"],
        "answer": result.get("result", result.get("stderr")),
        "is_error": result.get("is_error", True),
        "prompts": [
            (sum(usage[name] for name in _PROMPT), usage["cache_read_input_tokens"]) for usage in usages.values()
        ],
    }


def main() -> None:
    from tests.app.conftest import PEBBLE, serving  # which takes longer than Claude Code waits for its tools

    with tempfile.TemporaryDirectory() as folder, serving(PEBBLE, Path(folder) / "data", tool_selection="auto") as ours:
        home = Path(folder) / "home"
        home.mkdir()
        for number, question in enumerate(QUESTIONS):
            print(json.dumps(turn(sys.argv[1], question, number, ours.url, home)), flush=True)


if __name__ == "__main__":
    calculator() if sys.argv[1:] == ["--calculator"] else main()
