"""Plugins that change while the server runs: the next call has the new code, and a broken file takes nothing away."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tools.call_policy import CallPolicy
from tools.executor import Executor
from tools.options import PERMISSIONS
from tools.outcome import Call
from tools.plugins import PluginFolder
from tools.registry import Registry
from tools.session import Session

SAYS = '''
from ponder import tool
@tool(permission="none")
def say() -> str:
    """Says."""
    return "{}"
'''


class Server:
    def __init__(self, path: Path) -> None:
        self.registry = Registry()
        self.folder = PluginFolder(path, self.registry)
        self.executor = Executor(self.registry, CallPolicy(default=PERMISSIONS))
        self.calls = 0

    async def call(self, name: str, **arguments: object) -> str:
        self.calls += 1
        call = Call(f"c{self.calls}", name, arguments)
        (outcome,) = await self.executor.run([call], Session("ana", "run-1"))
        return outcome.text


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # as in a server: stale bytecode is the trap
    return Server(tmp_path)


async def test_a_changed_file_is_the_next_calls_code_even_within_the_same_second(
    server: Server, tmp_path: Path
) -> None:
    plugin = tmp_path / "demo.py"
    for later, word in enumerate(("one", "two", "six")):  # as long as each other: only nanoseconds tell them apart
        plugin.write_text(SAYS.format(word))
        os.utime(plugin, ns=(10**18, 10**18 + later))
        await server.folder.scan()
        assert await server.call("say") == word
    assert await server.folder.scan() == [], "and nothing is done where nothing changed"


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("def say(:\n", "SyntaxError in line 1"),
        ("import nothing_of_this_name\n", "ModuleNotFoundError: .* \\(line 1\\)"),
        ("\n\nraise SystemExit(3)\n", "it called for an exit: SystemExit\\(3\\)"),
        ("x = 1\n", "declares no tool; put @tool above a function"),
        ("from ponder import tool\n@tool\ndef say(x): 'Says.'\n", "ToolDeclarationError: .* x has no type.*line 2"),
    ],
)
async def test_a_broken_change_is_told_and_the_old_tools_stay(
    server: Server, tmp_path: Path, broken: str, said: str
) -> None:
    plugin = tmp_path / "demo.py"
    plugin.write_text(SAYS.format("old"))
    await server.folder.scan()
    plugin.write_text(broken)
    await server.folder.scan()
    (fault,) = server.registry.faults
    assert fault.origin == "plugin demo.py"
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(fault.message)
    assert await server.call("say") == "old"
    plugin.write_text(SAYS.format("new"))
    await server.folder.scan()
    assert server.registry.faults == [] and await server.call("say") == "new"


async def test_a_deleted_file_takes_its_tools_and_its_faults_along(server: Server, tmp_path: Path) -> None:
    good, bad = tmp_path / "demo.py", tmp_path / "bad.py"
    good.write_text(SAYS.format("one"))
    bad.write_text("1/0")
    await server.folder.scan()
    assert len(server.registry) == 1 and len(server.registry.faults) == 1
    good.unlink()
    bad.unlink()
    await server.folder.scan()
    assert len(server.registry) == 0 and server.registry.faults == []


async def test_a_running_call_keeps_the_code_it_began_with(server: Server, tmp_path: Path) -> None:
    slow = '''
import asyncio
from ponder import Depends, tool
WORD = "{}"
def word() -> str:
    return WORD
@tool(permission="none")
async def say(begun: Depends[asyncio.Event], go: Depends[asyncio.Barrier]) -> str:
    """Says."""
    begun.set()
    await go.wait()
    return word()
'''
    begun, go = asyncio.Event(), asyncio.Barrier(2)
    server.registry.provide(asyncio.Event, begun)
    server.registry.provide(asyncio.Barrier, go)
    (tmp_path / "demo.py").write_text(slow.format("old"))
    await server.folder.scan()
    first = asyncio.create_task(server.call("say"))
    await begun.wait()
    (tmp_path / "demo.py").write_text(slow.format("new"))
    await server.folder.scan()
    second = asyncio.create_task(server.call("say"))
    assert (await first, await second) == ("old", "new")


async def test_a_replaced_toolset_is_closed_and_the_new_one_opened(server: Server, tmp_path: Path) -> None:
    source = '''
from pathlib import Path
from ponder import Toolset, tool
class Diary(Toolset):
    async def open(self) -> None:
        self.log("open {0}")
    async def close(self) -> None:
        self.log("close {0}")
    def log(self, text: str) -> None:
        with open(Path(__file__).with_suffix(".log"), "a") as file:
            file.write(text + "\\n")
    @tool(permission="none")
    def say(self) -> str:
        """Says."""
        return "{0}"
'''
    for word in ("one", "two"):
        (tmp_path / "demo.py").write_text(source.format(word))
        await server.folder.scan()
        assert await server.call("say") == word
    (tmp_path / "demo.py").unlink()
    await server.folder.scan()
    assert (tmp_path / "demo.log").read_text().split("\n")[:-1] == ["open one", "close one", "open two", "close two"]


async def test_a_package_is_a_plugin_and_its_parts_are_new_too(server: Server, tmp_path: Path) -> None:
    package = tmp_path / "demo"
    package.mkdir()
    (package / "__init__.py").write_text("from .parts import say\n")
    for later, word in enumerate(("one", "two")):
        (package / "parts.py").write_text(SAYS.format(word))
        os.utime(package / "parts.py", ns=(10**18, 10**18 + later))
        await server.folder.scan()
        assert await server.call("say") == word
    (package / "more.py").write_text(SAYS.format("six"))
    (package / "__init__.py").write_text("from .more import say\n")
    await server.folder.scan()
    assert await server.call("say") == "six"


async def test_a_plugin_whose_import_never_ends_holds_up_no_other(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.plugins.IMPORT_S", 0.05)
    (tmp_path / "a_stuck.py").write_text("import threading\nthreading.Event().wait(20)\n")
    (tmp_path / "demo.py").write_text(SAYS.format("one"))
    await server.folder.scan()
    (fault,) = server.registry.faults
    assert fault.origin == "plugin a_stuck.py" and "longer than 0.05 s" in fault.message
    assert await server.call("say") == "one"


async def test_what_is_no_plugin_is_not_loaded(server: Server, tmp_path: Path) -> None:
    for name in ("_shared.py", ".hidden.py", "test_demo.py", "notes.txt"):
        (tmp_path / name).write_text("1/0")
    (tmp_path / "data").mkdir()
    assert await server.folder.scan() == []
    assert await PluginFolder(tmp_path / "absent", server.registry).scan() == []


async def test_many_reloads_leave_one_module_and_a_deletion_none(server: Server, tmp_path: Path) -> None:
    def ours() -> list[str]:
        return [name for name in sys.modules if name.startswith("_ponder_plugin_")]

    before = len(ours())
    package = tmp_path / "demo"
    package.mkdir()
    (package / "__init__.py").write_text("from .parts import say\n")
    for number in range(30):
        (package / "parts.py").write_text(SAYS.format(number) if number % 3 else "1/0")
        await server.folder.scan()
    assert len(ours()) == before + 2
    for each in (package / "parts.py", package / "__init__.py"):
        each.unlink()
    await server.folder.scan()
    assert len(ours()) == before


async def test_a_watched_folder_is_loaded_without_being_asked(server: Server, tmp_path: Path) -> None:
    heard = asyncio.Queue[list[str]]()
    watching = asyncio.create_task(server.folder.watch(heard.put_nowait))
    try:
        for word in ("one", "two"):
            (tmp_path / "new").write_text(SAYS.format(word))
            (tmp_path / "new").rename(tmp_path / "demo.py")  # whole at once, as editors do
            assert await heard.get() == ["plugin demo.py"]
            assert await server.call("say") == word
    finally:
        watching.cancel()
