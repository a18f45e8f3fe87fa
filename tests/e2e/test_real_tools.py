"""Calls that the bundled model makes, on the real server: approved on the page, cut off, and run exactly once.

The tool is a plugin that writes a line to a file each time it runs, and then waits for a test to let it go on.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.real_server import PEBBLE, RealServer, running

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Locator, Page, Route, expect

from tests.e2e.support.real_pages import (
    ask,
    box,
    opened,
    reply,
    settled,
    wishes,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PLUGIN = '''
import time
from pathlib import Path
from ponder import Context, tool

FOLDER = Path({folder!r})

@tool(permission="write", approval="always")
def calculate(ctx: Context, expression: str) -> str:
    """Work out an arithmetic expression."""
    with (FOLDER / "runs").open("a") as file:
        file.write(ctx.call_id + chr(10))
    ctx.progress("half of it", 1, 2)
    while (FOLDER / "wait").exists() and not ctx.cancelled:
        time.sleep(0.01)
    return (FOLDER / "result").read_text("utf-8")
'''
QUESTION = "What is 23 * 17?"
WISHES = {"tools": ["calculate"], "sampling": {"temperature": 0}, "maxTokens": 200}


class Tool:
    """Plugin of the server under test: tells it what to do, and reads what it did."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, result: str = "391", *, wait: bool = False) -> None:
        (self._folder / "runs").write_text("")
        (self._folder / "result").write_text(result, "utf-8")
        if wait:
            (self._folder / "wait").touch()
        else:
            self.go_on()

    def go_on(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / "wait").unlink()

    @property
    def runs(self) -> int:
        return len((self._folder / "runs").read_text("utf-8").splitlines())


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "plugins").mkdir()
    (folder / "plugins/calculator.py").write_text(PLUGIN.format(folder=str(folder)), "utf-8")
    with running(folder, "--model", str(PEBBLE), "--dtype", "float32") as server:
        load_embedder(server)
        yield server


def load_embedder(server: RealServer) -> None:
    """Asks with a tool, as a small model's tools are chosen by the embedder, whose import takes long."""
    tool = {"type": "function", "function": {"name": "calculate"}}
    body = {"model": "default", "messages": [{"role": "user", "content": QUESTION}], "tools": [tool], "max_tokens": 1}
    assert server.http.post("/v1/chat/completions", json=body, timeout=180).status_code == 200


@pytest.fixture
def server(tooled: RealServer) -> Iterator[RealServer]:
    yield tooled
    tooled.as_new()
    for grant in tooled.http.get("/api/permissions").json()["remembered"]:
        tooled.http.delete(f"/api/permissions/{grant['id']}")


@pytest.fixture
def tool(server: RealServer) -> Iterator[Tool]:
    tool = Tool(server.folder)
    tool.begin()
    yield tool
    tool.go_on()


@pytest.fixture
def page(new_page: NewPage, server: RealServer) -> Iterator[Page]:
    page = new_page()
    page.goto(server.url)
    wishes(page, **WISHES)
    yield page
    page.close()  # before the server's connections are cut, which a page that still reads would take for an error


def card(page: Page) -> Locator:
    return page.get_by_role("region", name="Call of calculate").last


def approval(page: Page) -> Locator:
    return page.get_by_role("group", name="calculate needs your approval")


def press(page: Page, name: str) -> None:
    approval(page).get_by_role("button", name=name, exact=True).click()


def test_what_is_allowed_once_runs_once_and_asks_again(page: Page, server: RealServer, tool: Tool) -> None:
    ask(page, QUESTION)
    expect(approval(page).get_by_role("region", name="What would be done, exactly")).to_contain_text("23 * 17")
    assert tool.runs == 0
    approval(page).get_by_role("button", name="Allow once").dblclick()
    expect(card(page)).to_contain_text("You allowed this once.")
    settled(page)
    expect(card(page)).to_contain_text("391")
    assert tool.runs == 1
    page.get_by_role("link", name="New chat").click()
    ask(page, QUESTION)
    expect(approval(page)).to_be_visible()


def test_what_is_allowed_for_good_asks_no_more(page: Page, server: RealServer, tool: Tool) -> None:
    ask(page, QUESTION)
    approval(page).get_by_label("cover").select_option(label="every call of calculate")
    press(page, "Always allow")
    expect(card(page)).to_contain_text("You allowed this, now and later.")
    settled(page)
    page.get_by_role("link", name="New chat").click()
    ask(page, QUESTION)
    expect(card(page)).to_contain_text("391")
    settled(page)
    expect(approval(page)).to_have_count(0)
    assert tool.runs == 2


def test_what_is_denied_does_not_run(page: Page, server: RealServer, tool: Tool) -> None:
    ask(page, QUESTION)
    expect(approval(page)).to_be_visible()
    listed = page.get_by_role("navigation", name="Chats")
    expect(page).to_have_title(re.compile("^Needs you · "))
    expect(listed.get_by_text("waits for you")).to_be_attached()
    press(page, "Deny")
    expect(card(page)).to_contain_text("You denied this.")
    expect(card(page)).to_contain_text("denied")
    expect(card(page)).not_to_contain_text("failed")
    settled(page)
    expect(listed.get_by_text("waits for you")).to_have_count(0)
    expect(page).to_have_title(re.compile("^(?!Needs you)"))
    assert tool.runs == 0


def test_what_nobody_answers_in_time_does_not_run(page: Page, server: RealServer, tool: Tool) -> None:
    server.turn(approval_s=1.5)
    ask(page, QUESTION)
    expect(approval(page).get_by_role("timer")).to_have_text(re.compile(r"[12] s left"))
    expect(card(page)).to_contain_text("Nobody answered in time, so it was not done.")
    settled(page)
    assert tool.runs == 0


def test_two_tabs_that_allow_at_once_run_it_once(
    page: Page, server: RealServer, tool: Tool, new_page: NewPage, watch: Watch
) -> None:
    watch.expect_errors()  # the second is told that it is decided
    ask(page, QUESTION)
    expect(approval(page)).to_be_visible()
    second = new_page()
    second.goto(page.url)
    expect(approval(second)).to_be_visible()
    # Neither hears of the other's decision before it has made its own: both are held back until both are made.
    decisions: list[Route] = []
    for tab in (page, second):
        tab.route("**/approvals/*", lambda route: decisions.append(route))
        with tab.expect_request("**/approvals/*"):
            tab.get_by_role("button", name="Allow once").click()
    for decision in decisions:
        decision.continue_()
    assert len(decisions) == 2
    for tab in (page, second):
        expect(card(tab)).to_contain_text("You allowed this once.")
        settled(tab)
    assert tool.runs == 1


def test_a_cut_while_an_approval_waits_leaves_it_waiting(
    page: Page, server: RealServer, tool: Tool, watch: Watch
) -> None:
    watch.expect_errors()
    ask(page, QUESTION)
    expect(approval(page)).to_be_visible()
    server.wire.cut()
    expect(reply(page)).to_contain_text("The connection was lost.")
    press(page, "Allow once")
    expect(approval(page).get_by_role("alert")).to_contain_text("That was not taken.")
    expect(reply(page)).to_contain_text(re.compile(r"Trying again in ([4-9]|1\d) s"), timeout=30_000)
    server.wire.mend()  # long before it tries by itself
    page.get_by_role("button", name="Try now").click()
    expect(reply(page)).not_to_contain_text("The connection was lost.")
    assert tool.runs == 0
    press(page, "Allow once")
    settled(page)
    expect(card(page)).to_contain_text("391")
    assert tool.runs == 1


def test_a_cut_while_a_tool_runs_brings_its_result_all_the_same(
    page: Page, server: RealServer, tool: Tool, watch: Watch
) -> None:
    watch.expect_errors()
    tool.begin(wait=True)
    ask(page, QUESTION)
    press(page, "Allow once")
    expect(card(page)).to_contain_text("half of it")
    server.wire.cut()
    expect(reply(page)).to_contain_text("The connection was lost.")
    tool.go_on()
    expect(reply(page)).to_contain_text(re.compile(r"Trying again in ([4-9]|1\d) s"), timeout=30_000)
    server.wire.mend()  # long before it tries by itself
    page.get_by_role("button", name="Try now").click()
    settled(page)
    expect(card(page)).to_contain_text("391")
    assert tool.runs == 1
    page.reload()
    expect(card(page)).to_contain_text("391")
    assert tool.runs == 1


def test_a_reload_while_an_approval_waits_shows_the_time_that_is_left(
    page: Page, server: RealServer, tool: Tool
) -> None:
    server.turn(approval_s=40)
    ask(page, QUESTION)
    expect(approval(page).get_by_role("timer")).to_have_text(re.compile(r"3[0-7] s left"), timeout=8000)
    page.reload()
    expect(approval(page).get_by_role("timer")).to_have_text(re.compile(r"[23]\d s left"))
    assert not re.match(r"3[89]|40", approval(page).get_by_role("timer").inner_text())
    press(page, "Allow once")
    settled(page)
    assert tool.runs == 1


def test_from_question_to_approval_to_stop_by_keyboard(page: Page, server: RealServer, tool: Tool) -> None:
    tool.begin(wait=True)
    expect(box(page)).to_be_focused()
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator("[aria-live=polite]").filter(has_text="calculate needs your approval.")).to_be_attached()
    allow = approval(page).get_by_role("button", name="Allow once")
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        if allow.evaluate("button => button === document.activeElement"):
            break
    expect(allow).to_be_focused()
    page.keyboard.press("Enter")
    expect(card(page)).to_contain_text("You allowed this once.")
    expect(page.get_by_role("group", name="You allowed this once.")).to_be_focused()
    expect(card(page)).to_contain_text("half of it")
    page.keyboard.press("Escape")
    expect(reply(page)).to_contain_text("You stopped this answer.")
    assert page.evaluate("document.activeElement !== document.body")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert tool.runs == 1


def test_a_result_that_is_hostile_is_text(page: Page, server: RealServer, tool: Tool, watch: Watch) -> None:
    hostile = '<img src="https://example.org/x.png" onerror="window.owned=1"><script>window.owned=1</script>![](https://example.org/y)'
    tool.begin(hostile)
    reports: list[str] = []
    page.on("console", lambda message: reports.append(message.text))
    ask(page, QUESTION)
    press(page, "Allow once")
    called = page.get_by_role("region", name="Call of calculate").first  # what the model makes of it is its own affair
    called.get_by_role("button", expanded=False).first.click()
    expect(called.get_by_role("region", name="Result")).to_contain_text('onerror="window.owned=1"')
    assert page.evaluate("window.owned") is None
    assert reply(page).locator("img, script").count() == 0
    assert not [text for text in reports if "Content Security Policy" in text]


def test_a_server_killed_while_an_approval_waits_runs_nothing(
    page: Page, server: RealServer, tool: Tool, watch: Watch
) -> None:
    watch.expect_errors()
    ask(page, QUESTION)
    expect(approval(page)).to_be_visible()
    server.kill()
    server.start()
    expect(reply(page)).to_contain_text("The server restarted while this answer was being written.", timeout=20_000)
    expect(card(page)).to_contain_text("The run ended before this was answered.")
    expect(approval(page)).to_have_count(0)
    assert tool.runs == 0


def test_a_phone_decides_too(server: RealServer, tool: Tool, new_page: NewPage) -> None:
    phone = new_page(viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    chat, _ = server.ask(QUESTION, tools=["calculate"], temperature=0, max_tokens=200)
    opened(phone, server, chat)
    approval(phone).get_by_role("button", name="Allow once").tap()
    settled(phone)
    expect(card(phone)).to_contain_text("391")
    assert phone.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert tool.runs == 1


def test_what_is_never_allowed_is_not_asked_again_until_that_is_forgotten(
    page: Page, server: RealServer, tool: Tool
) -> None:
    ask(page, QUESTION)
    approval(page).get_by_label("cover").select_option(label="every call of calculate")
    press(page, "Never allow")
    expect(card(page)).to_contain_text("You denied this, now and later.")
    settled(page)
    page.get_by_role("link", name="New chat").click()
    ask(page, QUESTION)
    settled(page)
    expect(card(page)).to_contain_text("denied")
    assert tool.runs == 0
    page.get_by_role("button", name="Tools").click()
    sheet = page.get_by_role("dialog")
    sheet.get_by_text("What tools may do").click()
    expect(sheet.get_by_role("listitem")).to_contain_text("calculate: never allowed")
    sheet.get_by_role("button", name="Forget").click()
    expect(sheet.get_by_role("region", name="Remembered answers")).to_contain_text("None.")
    page.keyboard.press("Escape")
    page.get_by_role("link", name="New chat").click()
    ask(page, QUESTION)
    expect(approval(page)).to_be_visible()


def test_a_class_that_is_not_allowed_is_not_called(page: Page, server: RealServer, tool: Tool) -> None:
    page.get_by_role("button", name="Tools").click()
    sheet = page.get_by_role("dialog")
    sheet.get_by_text("What tools may do").click()
    writing = sheet.get_by_role("checkbox", name="Tools that write")
    writing.uncheck()
    expect(writing).not_to_be_checked()
    page.keyboard.press("Escape")
    ask(page, QUESTION)
    settled(page)
    assert tool.runs == 0
    assert "write" not in server.http.get("/api/permissions").json()["classes"]
    assert server.http.delete("/api/permissions").status_code == 204
