"""`ponder tools`: what an operator's shell sees of the tools, and what an MCP client does."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client import ClientRequestContext
from mcp.types import ElicitRequestParams, ElicitResult, TextContent
from typer.testing import CliRunner, Result

from app.cli.main import cli
from app.config import load_settings
from app.document_library import open_library
from tests.tools.skills.published import write, write_skills

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
Run = Callable[..., Result]
WAIT_S = 30.0

DIARY = '''
from pathlib import Path

from ponder import Context, tool

PAGE = Path(__file__).parent.parent / "page"


@tool(permission="write")
def note(text: str) -> str:
    """Writes a line into the diary."""
    PAGE.write_text(text)
    return "noted"


@tool
async def ask(ctx: Context) -> str:
    """Asks for a colour."""
    return "You like " + await ctx.ask("Which colour?", ["red", "blue"])


@tool
def colours() -> str:
    """Says something\x1b[2J loud."""
    return "\x1b[31mred\x1b[0m"
'''


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/diary.py").write_text(DIARY)
    return tmp_path


@pytest.fixture
def run(data: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(data)
    for name in [name for name in os.environ if name.startswith("PONDER_")]:
        monkeypatch.delenv(name)

    def ran(*arguments: str) -> Result:
        return CliRunner().invoke(cli, ["tools", *arguments, "--data-dir", str(data)])

    return ran


def test_list_names_permission_origin_and_what_it_does(run: Run) -> None:
    shown = run("list")
    assert shown.exit_code == 0
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("note ")]
    assert line.split(None, 4) == ["note", "write", "plugin", "diary.py", "Writes a line into the diary."]
    assert "search_documents" in shown.stdout


def test_list_shows_no_control_characters(run: Run) -> None:
    assert "\x1b" not in run("list").stdout


def test_list_tells_faults_on_the_error_output(run: Run, data: Path) -> None:
    (data / "plugins/broken.py").write_text("import no_such_module_at_all\n")
    shown = run("list")
    assert shown.exit_code == 0 and "note" in shown.stdout
    assert "plugin broken.py: ModuleNotFoundError" in shown.stderr and "line 1" in shown.stderr
    assert "broken" not in shown.stdout


def test_list_as_json_is_what_the_api_answers(run: Run) -> None:
    shown = json.loads(run("list", "--json").stdout)
    assert shown["faults"] == []
    (note,) = [tool for tool in shown["tools"] if tool["name"] == "note"]
    assert note["permission"] == "write" and note["approval"] == "always"
    assert note["parameters"]["required"] == ["text"]


def test_call_prints_the_result(run: Run) -> None:
    shown = run("call", "colours")
    assert (shown.exit_code, shown.stdout) == (0, "\x1b[31mred\x1b[0m\n")  # not on a terminal, it is as it is


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["call", "note", '{"txt": "x"}'], "text"),
        (["call", "note", "{"], "do not fit"),
        (["call", "note", "[1]"], "JSON object"),
        (["call", "nota", "{}"], "did you mean note"),
    ],
)
def test_call_fails_with_exit_code_1_and_says_why(run: Run, arguments: list[str], told: str) -> None:
    shown = run(*arguments)
    assert shown.exit_code == 1 and told in shown.stderr and not shown.stdout


def test_call_of_a_plugin_that_is_broken_names_its_fault(run: Run, data: Path) -> None:
    (data / "plugins/weather.py").write_text("import no_such_module_at_all\n")
    shown = run("call", "weather")
    assert shown.exit_code == 1 and "plugin weather.py: ModuleNotFoundError" in shown.stderr


def test_what_writes_is_refused_where_nobody_can_be_asked(run: Run, data: Path) -> None:
    shown = run("call", "note", '{"text": "milk"}')
    assert shown.exit_code == 1 and "approval" in shown.stderr and "--yes" in shown.stderr
    assert not (data / "page").exists()


def test_yes_approves(run: Run, data: Path) -> None:
    shown = run("call", "--yes", "note", '{"text": "milk"}')
    assert (shown.exit_code, shown.stdout) == (0, "noted\n")
    assert (data / "page").read_text() == "milk"


def on_a_terminal(data: Path, *arguments: str, typed: str | None, after: str) -> tuple[int, str]:
    """The exit code, and all that a terminal shows where `typed` is typed once `after` is read; None is Ctrl-C."""
    ours, theirs = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PONDER_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "tools", *arguments, "--data-dir", str(data)],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=data, env={**environment, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    os.close(theirs)
    shown, told = "", False
    try:
        while select.select([ours], [], [], WAIT_S)[0]:
            try:
                shown += os.read(ours, 4096).decode()
            except OSError:  # the other side is closed
                break
            if after in shown and not told:
                told = True
                if typed is None:
                    process.send_signal(signal.SIGINT)
                else:
                    os.write(ours, typed.encode())
        return process.wait(WAIT_S), shown
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize(("typed", "code"), [("y\n", 0), ("\n", 1), (None, 130)])
def test_a_terminal_is_asked_and_sees_the_call(data: Path, typed: str | None, code: int) -> None:
    ended, shown = on_a_terminal(data, "call", "note", '{"text": "milk"}', typed=typed, after="[y/N] ")
    assert ended == code, shown
    assert 'note(text="milk")' in shown
    assert (data / "page").exists() == (code == 0)


def test_a_terminal_answers_a_tool_s_question_and_is_shown_no_control_characters(data: Path) -> None:
    assert "You like blue" in on_a_terminal(data, "call", "ask", typed="blue\n", after="[red, blue] ")[1]
    assert "\x1b" not in on_a_terminal(data, "call", "colours", typed="", after="red")[1]


def test_while_a_server_has_the_documents_the_other_tools_work(run: Run, data: Path) -> None:
    with_library = open_library(load_settings(data_dir=str(data)))
    try:
        assert run("call", "colours").exit_code == 0
        shown = run("call", "list_documents")
        assert shown.exit_code == 1 and "The tools that read documents are not there." in shown.stderr
    finally:
        with_library.close()
    assert run("call", "list_documents").exit_code == 0


def test_new_writes_a_plugin_whose_test_passes_and_which_is_loaded(run: Run, data: Path) -> None:
    made = run("new", "tide_table")
    files = [data / "plugins/tide_table.py", data / "plugins/test_tide_table.py"]
    assert made.exit_code == 0 and made.stdout.split() == [str(file) for file in files]
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(files[1])],
        cwd=data, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert "1 passed" in tested.stdout, tested.stdout + tested.stderr
    assert "tide_table was given 'x'." in run("call", "tide_table", '{"text": "x"}').stdout


def test_new_writes_into_the_folder_that_is_named(run: Run, data: Path) -> None:
    assert run("new", "tide_table", "--dir", str(data / "mine")).exit_code == 0
    assert {file.name for file in (data / "mine").iterdir()} == {"tide_table.py", "test_tide_table.py"}


@pytest.mark.parametrize("there", ["tide_table.py", "test_tide_table.py"])
def test_new_overwrites_nothing(run: Run, data: Path, there: str) -> None:
    (data / "plugins" / there).write_text("mine")
    made = run("new", "tide_table")
    assert made.exit_code == 1 and "is there already" in made.stderr
    assert (data / "plugins" / there).read_text() == "mine"
    assert {file.name for file in (data / "plugins").glob("*tide*")} == {there}


@pytest.mark.parametrize(
    "name", ["tide-table", "class", "1st", "../x", "_private", "test_it", "json", "ünder", "ponder"]
)
def test_new_refuses_a_name_that_would_not_work(run: Run, data: Path, name: str) -> None:
    made = run("new", name)
    assert made.exit_code == 1 and made.stderr.startswith("ponder: ")
    assert [file.name for file in (data / "plugins").iterdir() if file.is_file()] == ["diary.py"]


async def test_mcp_serves_the_tools_to_a_client_which_approves(data: Path) -> None:
    async def person(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        return ElicitResult(action="accept", content={"approve": True})

    server = StdioServerParameters(
        command=sys.executable, args=["-m", "app.cli", "tools", "mcp", "--data-dir", str(data)],
        env={"PYTHONPATH": str(ROOT)}, cwd=data,
    )  # fmt: skip
    with open(data / "errors", "w") as errors:
        async with Client(stdio_client(server, errlog=errors), elicitation_callback=person) as client:
            names = {each.name for each in (await client.list_tools()).tools}
            assert {"note", "colours", "search_documents"} <= names
            result = await client.call_tool("note", {"text": "milk"})
            (block,) = result.content
            assert isinstance(block, TextContent) and block.text == "noted"
    assert (data / "page").read_text() == "milk"


def test_skills_check_names_each_folder_and_fails_for_one_that_is_no_skill(tmp_path: Path) -> None:
    folder = write_skills(tmp_path / "skills")
    good = CliRunner().invoke(cli, ["skills", "check", str(folder)])
    assert good.exit_code == 0 and good.stderr == ""
    assert "measuring-text: a skill, with 2 files beside SKILL.md, 1 of them scripts" in good.stdout
    assert "note: version is no field of the format" in good.stdout
    write(folder / "broken\x1b[2J" / "SKILL.md", "---\nname: A\n---\n")
    bad = CliRunner().invoke(cli, ["skills", "check", str(folder)])
    assert bad.exit_code == 1 and "citing-sources: a skill" in bad.stdout and "\x1b" not in bad.stderr
    assert "broken" in bad.stderr and "description is missing; accepted: 1 to 1024" in bad.stderr
