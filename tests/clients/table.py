"""Fills the table client × feature: each client in an environment of its own, against one server with a scripted model.

    python -m tests.clients.table --install DIR [CLIENT ...]   # makes the environments, which takes minutes
    python -m tests.clients.table DIR [CLIENT ...]             # runs the cells, writes results.json
    python -m tests.clients.table --markdown                   # prints the table of docs/clients.md

A CLIENT is a module of `tests.clients.cells`; all of them by default. Beside the cells it notes what the server refused
while no cell asked for an error: what a client sends unasked has to be accepted. Programs from npm want a Node of
version 22 or newer on the path; the one that builds the page will do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.clients.cell import FEATURES, conversations

if TYPE_CHECKING:
    from tests.clients.scripted_model import Requests

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.json"
Json = dict[str, Any]


@dataclass(frozen=True)
class Client:
    """A module of cells, and the packages of its environment: PyPI's, or npm's for JavaScript and for programs."""

    module: str
    packages: tuple[str, ...]
    npm: bool = False
    in_ci: bool = False  # its package is among the development dependencies

    def install(self, folder: Path) -> None:
        if self.npm:
            command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *self.packages]
        else:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            command = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *self.packages]
        subprocess.run(command, check=True)

    def run(self, url: str, folder: Path | None, *features: str) -> list[Json]:
        """Returns a line for each cell. Without a `folder` the client is of this environment."""
        python = sys.executable if folder is None or self.npm else str(folder / "bin/python")
        command = [python, "-m", f"tests.clients.cells.{self.module}"]
        path = os.environ["PATH"]
        if self.npm and folder is not None:
            path = f"{folder / 'node_modules/.bin'}{os.pathsep}{path}"
            if (script := HERE / f"cells/{self.module}.mjs").exists():
                for file in (script, HERE / "cells/cell.mjs"):
                    shutil.copy(file, folder)
                command = ["node", str(folder / script.name)]
        with tempfile.TemporaryDirectory() as home:
            environment = {
                "PATH": path, "HOME": home, "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT),
                "CONVERSATIONS": conversations(),
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it waits for a site of its own, which is not here
            }  # fmt: skip
            ran = subprocess.run(
                [*command, url, *features], cwd=home, env=environment, stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
        return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"client"')]


CLIENTS = (
    Client("openai_python", ("openai",), in_ci=True),
    Client("anthropic_python", ("anthropic",), in_ci=True),
    Client("ollama_python", ("ollama",), in_ci=True),
    Client("openai_agents", ("openai-agents",), in_ci=True),
    Client("pydantic_ai_python", ("pydantic-ai-slim[openai]",), in_ci=True),
    Client("mcp_python", ("mcp",), in_ci=True),
    Client("llm_python", ("llm",), in_ci=True),
    Client("langchain_python", ("langchain", "langchain-openai", "langchain-anthropic", "langchain-ollama")),
    Client(
        "llama_index_python",
        ("llama-index-core", "llama-index-llms-openai-like", "llama-index-embeddings-openai-like"),
    ),
    Client("litellm_python", ("litellm",)),
    Client("instructor_python", ("instructor", "anthropic")),
    Client("aider_cli", ("aider-chat",)),
    Client("claude_agent_sdk_python", ("claude-agent-sdk",)),
    Client("claude_code_cli", ("@anthropic-ai/claude-code",), npm=True),
    Client("codex_cli", ("@openai/codex",), npm=True),
    Client("openai_node", ("openai", "zod"), npm=True),
    Client("ai_sdk", ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod"), npm=True),
)


def filled(client: Client, url: str, requests: Requests, folder: Path | None) -> Json:
    """Returns the client's row: package, version, cells, and requests that were refused while no cell asked for it."""
    requests.seen.clear()
    lines = client.run(url, folder, "-errors")
    refused = sorted({f"{method} {path} {status}" for method, path, status in requests.seen if status >= 400})
    lines += client.run(url, folder, "errors")
    cells = {line["feature"]: {name: line[name] for name in ("result", "remark") if name in line} for line in lines}
    return {
        **{name: lines[0][name] for name in ("client", "package", "version")},
        "module": client.module, "in_ci": client.in_ci, "date": datetime.now(UTC).date().isoformat(),
        "cells": {feature: cells[feature] for feature in FEATURES if feature in cells}, "refused": refused,
    }  # fmt: skip


def rows() -> list[Json]:
    """Returns the committed rows, in the order of `CLIENTS`."""
    return list(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else []


def markdown(found: Iterable[Json]) -> str:
    """Returns the table of docs/clients.md."""
    marks = {"works": "yes", "fails": "no"}
    lines = [f"| client | version | {' | '.join(FEATURES)} |", f"|---|---|{'---|' * len(FEATURES)}"]
    for row in found:
        cells = [marks[row["cells"][feature]["result"]] if feature in row["cells"] else "–" for feature in FEATURES]
        lines.append(f"| {row['client']} | {row['version']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    if arguments == ["--markdown"]:
        print(markdown(rows()))
        return
    installs = arguments[:1] == ["--install"]
    folder, *names = arguments[1:] if installs else arguments or [""]
    known = [client.module for client in CLIENTS]
    if not folder or folder.startswith("-"):
        raise SystemExit(f"Name a folder.\n{__doc__}")
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{unknown[0]!r} is no client; accepted: {', '.join(known)}.")
    wanted = [client for client in CLIENTS if not names or client.module in names]
    if installs:
        for client in wanted:
            client.install(Path(folder).resolve() / client.module)
        return
    from tests.clients.scripted_model import scripted_server

    done = {row["module"]: row for row in rows()}
    with tempfile.TemporaryDirectory() as data, scripted_server(Path(data)) as (server, requests):
        for client in wanted:
            done[client.module] = filled(client, server.url, requests, Path(folder).resolve() / client.module)
            ordered = [done[each.module] for each in CLIENTS if each.module in done]
            RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(markdown([done[client.module]]).splitlines()[-1], *done[client.module]["refused"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
