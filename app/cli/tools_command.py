"""`ponder tools`: which tools there are, one of them run, a new plugin begun, and all of them as an MCP server.

They are the tools that a server with the same settings offers. A tool's output is shown on a terminal without control
characters. Where a server has the documents open, the tools that read them are left out, and that is said.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import keyword
import os
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from app.answering.tool_service import BUILT_IN, ToolService
from app.cli.errors import printable
from app.config import LOCAL_USER, BadSetting, Settings
from app.document_library import open_library
from retrieval import InUse
from tools.builtin import documents
from tools.call_policy import Decision, NeedsApproval
from tools.context import Question
from tools.errors import NotAnswered
from tools.options import NAME
from tools.outcome import Call, CallOutput, CallProgress, Event
from tools.registry import Fault, tools_in
from tools.session import Session
from tools.skills import SkillLibrary
from tools.tool import Tool

_PLUGIN = '''"""A tool of Ponder's. A file like this one, in the plugins' folder, is loaded when it is saved."""

from __future__ import annotations

from ponder import tool


@tool
def {name}(text: str) -> str:
    """Say here what it does: the model chooses the tool by this sentence.

    Args:
        text: Say here what to give.
    """
    return f"{name} was given {{text!r}}."
'''

_TEST = """from __future__ import annotations

from {name} import {name}

from ponder import run_tool


def test_{name}_answers() -> None:
    assert run_tool({name}, text="hello").text == "{name} was given 'hello'."
"""


def list_tools(as_json: bool, settings: Settings) -> None:
    """Print the tools; faults of loading go to the error output."""
    tools, faults = asyncio.run(_loaded(settings))
    if as_json:
        shown = [
            {
                "name": tool.name, "description": tool.description, "parameters": tool.parameters,
                "permission": tool.permission, "approval": tool.approval, "timeout_s": tool.timeout_s,
                "idempotent": tool.idempotent, "origin": tool.origin,
            }
            for tool in tools
        ]  # fmt: skip
        missing = [{"origin": fault.origin, "message": fault.message} for fault in faults]
        print(json.dumps({"tools": shown, "faults": missing}, indent=2))
        return
    columns = [(tool.name, tool.permission, tool.origin) for tool in tools]
    widths = [max((len(row[place]) for row in columns), default=0) for place in range(3)]
    for row, tool in zip(columns, tools, strict=True):
        summary = tool.description.strip().splitlines()[0]
        print(printable("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=True)), summary])))
    for fault in faults:
        print(printable(f"{fault.origin}: {fault.message}"), file=sys.stderr)


def call_tool(name: str, arguments: str, yes: bool, settings: Settings) -> int:
    """Run one tool and print its result; the exit code. `yes` approves all that it asks approval for."""
    return asyncio.run(_called(name, arguments, yes, settings))


def new_plugin(name: str, folder: Path | None, settings: Settings) -> list[Path]:
    """Write a plugin and its test, which passes; where they are.

    Raises:
        BadSetting: the name can't be used, or one of the files is there already.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or NAME.fullmatch(name) is None:
        raise BadSetting(f"A plugin's name is that of a Python function, such as tide_table; {name!r} is none.")
    if name.startswith(("_", "test_")):
        raise BadSetting(f"{name!r} would not be loaded: the names of plugins don't begin with _ or test_.")
    where = (folder or settings.plugins or settings.resolved_data_dir / "plugins").expanduser()
    files = [where / f"{name}.py", where / f"test_{name}.py"]
    if there := [file for file in files if file.exists()]:
        raise BadSetting(f"{there[0]} is there already; choose another name, or remove it.")
    if importlib.util.find_spec(name) is not None:
        raise BadSetting(f"There is a Python module {name!r} already, which its test would import; choose another.")
    try:
        where.mkdir(parents=True, exist_ok=True)
        with files[0].open("x") as plugin, files[1].open("x") as test:
            plugin.write(_PLUGIN.format(name=name))
            test.write(_TEST.format(name=name))
    except OSError as error:
        raise BadSetting(f"{error.filename or where} cannot be written: {error.strerror or error}.") from None
    return files


def check_skills(folders: Sequence[Path]) -> int:
    """Print the skills of these folders, and on the error output the folders that are none; the exit code."""
    library = SkillLibrary(folders)
    for skill in library:
        files = library.files(skill.name)
        scripts = sum(each.is_script for each in files)
        print(printable(f"{skill.name}: a skill, with {len(files)} files beside SKILL.md, {scripts} of them scripts"))
        for note in skill.notes:
            print(printable(f"  note: {note}"))
    for fault in library.faults:
        print(
            printable(f"{fault.folder}: no skill"),
            *(f"  {printable(each)}" for each in fault.problems),
            sep="\n",
            file=sys.stderr,
        )
    return 1 if library.faults else 0


def serve_mcp(settings: Settings) -> None:
    """Serve the tools over standard input and output until the client is gone."""
    asyncio.run(_served(settings))


async def _loaded(settings: Settings) -> tuple[list[Tool], list[Fault]]:
    async with _opened(settings, library=False) as shed:
        return sorted(shed.registry, key=lambda tool: tool.name), shed.faults


async def _served(settings: Settings) -> None:
    async with _opened(settings, library=True) as shed:
        from tools.mcp.mcp_server import ToolServer

        version = importlib.metadata.version("ponder")
        await ToolServer(shed.executor, user=LOCAL_USER, version=version).stdio()


async def _called(name: str, arguments: str, yes: bool, settings: Settings) -> int:
    reads_documents = name in {tool.name for tool in tools_in([documents])}
    async with _opened(settings, library=reads_documents) as shed:
        person = _Person(yes)
        session = Session(
            LOCAL_USER,
            f"cli {uuid.uuid4().hex}",
            None,
            person.approve if person.answers else None,
            person.answer,
            offered=(),  # a person calls, so no description leads astray
        )
        (outcome,) = await shed.executor.run([Call("call-1", name, arguments)], session, _show)
        faults = shed.faults if outcome.kind == "unknown_tool" else []
    if outcome.ok:
        print(printable(outcome.result.text) if sys.stdout.isatty() else outcome.result.text)
        return 0
    print(f"ponder: {printable(outcome.result.text)}", file=sys.stderr)
    if outcome.kind == "denied" and not person.answers:
        print("Give --yes to approve the call, or run this in a terminal to be asked.", file=sys.stderr)
    for fault in faults:
        print(printable(f"{fault.origin}: {fault.message}"), file=sys.stderr)
    return 1


@asynccontextmanager
async def _opened(settings: Settings, *, library: bool) -> AsyncIterator[ToolService]:
    """The tools, with documents to read where `library`, or without the tools that would.

    Raises:
        BadSetting: the data directory cannot be used.
    """
    folder = settings.resolved_data_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadSetting(f"The data directory {folder} cannot be made: {error.strerror or error}.") from None
    with ExitStack() as closing:
        opened = None
        if library:
            try:
                opened = open_library(settings)
                closing.callback(opened.close)
            except InUse as in_use:
                print(f"{in_use} The tools that read documents are not there.", file=sys.stderr)
        async with ToolService(settings, opened) as shed:
            await shed.ready()
            if library and opened is None:
                theirs = {tool.name for tool in tools_in([documents])}
                kept = [each for each in shed.registry if each.origin == BUILT_IN and each.name not in theirs]
                shed.registry.replace(BUILT_IN, kept)
            yield shed


class _Person:
    """The person at the terminal, if there is one."""

    def __init__(self, yes: bool) -> None:
        self._yes = yes
        self.answers = yes or sys.stdin.isatty()

    async def approve(self, asked: NeedsApproval) -> Decision:
        if self._yes:
            return Decision("once", asked.arguments_hash)
        said = await _prompted(f"{asked.reason}\n  {asked.preview}\nRun it? [y/N] ")
        return Decision("once" if said.lower() in ("y", "yes") else "no", asked.arguments_hash)

    async def answer(self, question: Question) -> str:
        """
        Raises:
            NotAnswered: there is no terminal, or nothing was typed.
        """
        if not sys.stdin.isatty():
            raise NotAnswered("there is no terminal to ask on.")
        choices = "" if question.choices is None else f" [{', '.join(question.choices)}]"
        said = await _prompted(f"{question.text}{choices} ")
        if not said:
            raise NotAnswered("nothing was typed.")
        return said


async def _prompted(text: str) -> str:
    """The line that is typed. The event loop goes on, so that Ctrl-C is heard."""
    print(printable(text), end="", file=sys.stderr, flush=True)
    loop, source = asyncio.get_running_loop(), sys.stdin.fileno()
    typed = asyncio.Event()
    loop.add_reader(source, typed.set)
    try:
        await typed.wait()
    finally:
        loop.remove_reader(source)
    line = os.read(source, 4096)
    return line.decode(errors="replace").strip()


def _show(event: Event) -> None:
    """Shows a call's progress and output on the error output of a terminal."""
    if not sys.stderr.isatty():
        return
    match event:
        case CallProgress(step=step):
            done = "" if step.done is None else f" {step.done:g}"
            total = "" if step.total is None else f"/{step.total:g}"
            print(printable(f"… {step.text}{done}{total}"), file=sys.stderr)
        case CallOutput(text=text):
            print(printable(text), end="", file=sys.stderr, flush=True)
