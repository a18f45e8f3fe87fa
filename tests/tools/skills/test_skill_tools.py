"""Skills as a model meets them: a list in a tool's description, files on demand, and scripts in the sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from ponder import BadArguments, FakeContext, Retry, Tool, ToolError, call_tool
from tests.tools.sandbox.sandbox_traces import SMALL, needs_sandboxes
from tests.tools.skills.published import MEASURE, write, write_skills
from tools.builtin.skills import PART, READ, RUN, skill_tools
from tools.call_policy import Allowed, CallPolicy, NeedsApproval
from tools.executor import Executor
from tools.outcome import Call
from tools.registry import Registry
from tools.sandbox import Sandbox
from tools.session import Session
from tools.skills import SkillLibrary


@pytest.fixture
def library(tmp_path: Path) -> SkillLibrary:
    return SkillLibrary([write_skills(tmp_path / "skills")])


def tools_of(library: SkillLibrary, *names: str) -> dict[str, Tool]:
    chosen = library.chosen(names or library.names)
    return {tool.name: tool for tool in skill_tools(library, chosen, scripts=True)}


def test_the_list_is_the_same_whatever_the_order_of_the_names(library: SkillLibrary) -> None:
    one = tools_of(library, "measuring-text", "citing-sources")[READ]
    two = tools_of(library, "citing-sources", "measuring-text")[READ]
    assert one.spec() == two.spec() and "commit-messages" not in str(one.spec())
    assert one.description.splitlines()[1].startswith("- citing-sources: Writes references: author, year, title.")
    assert "Write the text as an argument" not in one.description  # the instructions are read when they are needed
    assert skill_tools(library, [], scripts=True) == []
    assert [tool.name for tool in skill_tools(library, list(library), scripts=False)] == [READ]


async def test_instructions_come_with_their_files_and_are_no_untrusted_text(library: SkillLibrary) -> None:
    read = tools_of(library)[READ]
    result = await call_tool(read, name="measuring-text")
    assert result.text.startswith(MEASURE.split("---\n")[2].strip()) and not result.untrusted
    assert "for these tools: Bash(python scripts/*), Read." in result.text
    assert result.text.endswith("- references/limits.md (16 bytes)\n- scripts/measure.py (352 bytes)")
    assert (await call_tool(read, name="measuring-text", file="references/limits.md")).text == "| tweet | 280 |\n"
    with pytest.raises(Retry, match=r"has no file '\.\./x'"):
        await call_tool(read, name="measuring-text", file="../x")
    with pytest.raises(ToolError, match="is no text"):
        await call_tool(read, name="citing-sources", file="assets/logo.png")


async def test_a_skill_that_was_not_chosen_cannot_be_read(library: SkillLibrary) -> None:
    with pytest.raises(BadArguments, match="name"):
        await call_tool(tools_of(library, "citing-sources")[READ], name="measuring-text")


async def test_a_long_file_is_read_in_parts(library: SkillLibrary, tmp_path: Path) -> None:
    text = "".join(f"{number:07d}\n" for number in range(3000))
    write(tmp_path / "skills" / "citing-sources" / "long.txt", text)
    read = tools_of(library)[READ]
    first = await call_tool(read, name="citing-sources", file="long.txt")
    assert first.text.endswith(f"[8,000 more characters: read on with start={PART}]")
    second = await call_tool(read, name="citing-sources", file="long.txt", start=PART)
    assert first.text[:PART] + second.text == text
    with pytest.raises(Retry, match="ends at character 24000"):
        await call_tool(read, name="citing-sources", file="long.txt", start=24_000)


def test_a_script_is_asked_about_like_whatever_executes(library: SkillLibrary) -> None:
    tools = tools_of(library)
    policy = CallPolicy(default=("none", "execute"))
    arguments = {"name": "measuring-text", "script": "scripts/measure.py"}
    assert isinstance(policy.decide(tools[RUN], arguments, user="ana"), NeedsApproval)
    assert isinstance(policy.decide(tools[READ], {"name": "measuring-text"}, user="ana"), Allowed)


@needs_sandboxes
async def test_scripts_run_in_a_sandbox_on_a_copy_of_the_skill(library: SkillLibrary, tmp_path: Path) -> None:
    own = tmp_path / "skills" / "measuring-text"
    write(
        own / "scripts" / "hostile.py",
        "import os, socket\nfrom pathlib import Path\nhere = Path(__file__)\n"
        "def attempt(what, do):\n    try:\n        do()\n"
        "    except OSError as error:\n        print(what, type(error).__name__)\n"
        "attempt('write', lambda: here.write_text('changed'))\n"
        "attempt('add', lambda: (here.parent / 'new').touch())\n"
        f"attempt('outside', lambda: print(open({str(own / 'SKILL.md')!r}).read()))\n"
        "attempt('connect', lambda: socket.create_connection(('1.1.1.1', 80), 1))\n",
    )
    before = {path: path.read_bytes() for path in own.rglob("*") if path.is_file()}
    async with await Sandbox.open(SMALL) as sandbox:
        ctx = FakeContext(provided={Sandbox: sandbox})
        run = tools_of(library)[RUN]
        said = await call_tool(run, ctx, name="measuring-text", script="scripts/measure.py", arguments=["two", "words"])
        assert said.text.startswith("Printed:\n9 characters, 2 words; 3 cells of limits") and said.untrusted
        assert said.text.endswith("report.txt:\nmeasured 9")
        assert (
            "usage: measure.py TEXT"
            in (await call_tool(run, ctx, name="measuring-text", script="scripts/measure.py")).text
        )
        shell = await call_tool(run, ctx, name="commit-messages", script="tools/count.sh", arguments=["a; echo b"])
        assert "SystemExit: 3" in shell.text and "Printed:\n9" in shell.text
        hostile = await call_tool(run, ctx, name="measuring-text", script="scripts/hostile.py")
        assert [line.split()[0] for line in hostile.text.splitlines()[1:]] == ["write", "add", "outside", "connect"]
        with pytest.raises(Retry, match="accepted: scripts/hostile.py, scripts/measure.py"):
            await call_tool(run, ctx, name="measuring-text", script="references/limits.md")
        with pytest.raises(Retry, match="accepted: none, for this skill has no script"):
            await call_tool(run, ctx, name="citing-sources", script="scripts/x.py")
    assert {path: path.read_bytes() for path in own.rglob("*") if path.is_file()} == before


async def test_a_run_has_its_own_skills_in_the_place_of_all(library: SkillLibrary) -> None:
    registry = Registry()
    registry.add(*tools_of(library).values())
    own = tools_of(library, "citing-sources")
    session = Session("ana", "run-1", offered=tuple(own.values()), own=own)
    calls = [Call(name, READ, f'{{"name": "{name}"}}') for name in ("citing-sources", "measuring-text")]
    good, bad = await Executor(registry, CallPolicy()).run(calls, session)
    assert good.ok and bad.kind == "bad_arguments" and "citing-sources" in bad.result.text
    (all_of_them,) = await Executor(registry, CallPolicy()).run(calls[1:], Session("ana", "run-2"))
    assert all_of_them.ok
