"""Questions in other words and answers made again, on the real server: nothing is lost, and every branch is reached."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.app.chatting import file, message
from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.real_server import RealServer, running
from tests.e2e.support.scripted_model import write_scripted

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Locator, Page, Route, expect

from tests.e2e.support.real_pages import (
    ask,
    box,
    opened,
    reply,
    settled,
    shown,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TABLE = "Both.\n\n| Kind | Fast |\n|---|---|\n| `set` | yes |\n\n```python\nseen = set()\n```"
TEXTS = {"red": "The answer is red.", "blue": "The answer is blue.", "table": TABLE}


@pytest.fixture(scope="module")
def branching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("branches")
    model = write_scripted(folder / "model", TEXTS)
    with running(folder, "--model", str(model), "--dtype", "float32") as server:
        yield server


@pytest.fixture
def server(branching: RealServer) -> Iterator[RealServer]:
    yield branching
    branching.as_new()


@pytest.fixture
def page(new_page: NewPage, server: RealServer) -> Page:
    page = new_page(permissions=["clipboard-read", "clipboard-write"])
    page.goto(server.url)
    return page


def question(page: Page) -> Locator:
    return page.get_by_role("article", name="You").last


def edit(page: Page) -> Locator:
    """The field of the last question's words."""
    question(page).get_by_role("button", name="Edit the question").click()
    return page.get_by_role("textbox", name="Your question")


def version(of: Locator) -> Locator:
    return of.get_by_role("group", name=re.compile("Version"))


def heard(page: Page) -> Locator:
    return page.locator(".heard[aria-live=polite]")


def test_a_question_is_asked_in_other_words_and_both_branches_stay(page: Page, server: RealServer) -> None:
    ask(page, "red please")
    settled(page)
    expect(page.get_by_role("group", name=re.compile("Version"))).to_have_count(0)
    field = edit(page)
    expect(field).to_be_focused()
    expect(field).to_have_value("red please")
    field.press("Home")
    field.press("Shift+Enter")  # a line more, no question
    field.fill("blue please")
    field.press("Enter")
    expect(question(page)).to_contain_text("blue please")
    expect(reply(page)).to_contain_text("blue.")
    expect(box(page)).to_be_focused()
    expect(version(question(page))).to_have_accessible_name("Version 2 of 2 of this question")
    later = version(question(page)).get_by_role("button", name="Later version")
    expect(later).to_have_attribute("aria-disabled", "true")

    earlier = version(question(page)).get_by_role("button", name="Earlier version")
    earlier.focus()
    earlier.press("Enter")
    expect(question(page)).to_contain_text("red please")
    expect(reply(page)).to_contain_text("red.")
    expect(heard(page)).to_have_text("Version 1 of 2")
    expect(earlier).to_be_focused()  # of the other version now
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(reply(page)).to_contain_text("blue.")
    expect(later).to_be_focused()
    page.keyboard.press("Enter")  # there is none after it
    expect(version(question(page))).to_contain_text("2 / 2")
    page.reload()
    expect(reply(page)).to_contain_text("blue.")
    expect(version(question(page))).to_contain_text("2 / 2")


def test_words_begun_in_a_question_are_not_lost(page: Page, server: RealServer) -> None:
    ask(page, "red one")
    settled(page)
    field = edit(page)
    field.fill("red one, and a long thought that is not at its end")
    page.reload()
    field = edit(page)
    expect(field).to_have_value("red one, and a long thought that is not at its end")
    field.press("Escape")
    expect(question(page).get_by_role("button", name="Edit the question")).to_be_focused()
    expect(question(page)).to_contain_text("red one")
    expect(question(page)).not_to_contain_text("thought")
    expect(edit(page)).to_have_value("red one")  # it was given up


def test_a_question_too_long_is_refused_with_the_limit_and_stays(page: Page, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()
    long = "of " * 6_666 + "it"
    ask(page, long)
    told = page.get_by_role("main").get_by_text("is 16384 tokens, and the prompt has 20000; accepted: at most 16383")
    expect(told).to_be_visible()
    expect(box(page)).to_have_value(long)
    expect(page.get_by_role("article")).to_have_count(0)
    ask(page, "red again")
    settled(page)
    expect(told).to_have_count(0)
    field = edit(page)
    field.fill(long)
    field.press("Enter")
    expect(told).to_be_visible()
    expect(field).to_have_value(long)
    expect(field).to_be_focused()
    page.get_by_role("button", name="Cancel").click()
    expect(reply(page)).to_contain_text("red.")


def test_an_answer_is_made_again_and_the_chat_goes_on_where_one_looks(page: Page, server: RealServer) -> None:
    ask(page, "red first")
    settled(page)
    reply(page).get_by_role("button", name="Answer again").click()
    expect(version(reply(page))).to_have_accessible_name("Version 2 of 2 of this answer")
    settled(page)
    version(reply(page)).get_by_role("button", name="Earlier version").click()
    expect(version(reply(page))).to_contain_text("1 / 2")
    ask(page, "blue second")
    expect(reply(page)).to_contain_text("blue.")
    settled(page)
    assert page.get_by_role("article").count() == 4
    first = page.get_by_role("article", name="Ponder").first
    version(first).get_by_role("button", name="Later version").click()
    expect(page.get_by_role("article")).to_have_count(2)
    version(first).get_by_role("button", name="Earlier version").click()
    expect(page.get_by_role("article")).to_have_count(4)
    chat = page.url.rpartition("/")[2]
    messages = server.http.get(f"/api/chats/{chat}?all=true").json()["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant", "assistant", "user", "assistant"]
    assert messages[3]["parent_id"] == messages[1]["id"]


def test_one_branch_is_answered_while_another_is_looked_at(page: Page, server: RealServer) -> None:
    ask(page, "red before")
    settled(page)
    server.turn(hold=True)
    field = edit(page)
    field.fill("blue after")
    field.press("Enter")
    expect(reply(page)).to_contain_text("Thinking…")
    version(question(page)).get_by_role("button", name="Earlier version").click()
    expect(reply(page)).to_contain_text("red.")
    told = page.get_by_text("Another branch of this chat is being answered.")
    expect(told).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_visible()  # what runs elsewhere is not stopped from here
    ask(page, "blue more")
    expect(box(page)).to_have_value("blue more")
    for name in ("Edit the question", "Answer again"):
        button = page.get_by_role("button", name=name)
        expect(button).to_have_attribute("aria-disabled", "true")
        button.click(force=True)
        expect(page.get_by_text("This chat is being answered. Wait for the answer, or stop it.")).to_be_visible()
    page.reload()  # which branch that is, the page does not know now
    expect(box(page)).to_have_value("blue more")
    expect(told).to_be_visible()
    page.get_by_role("button", name="Show it").click()
    expect(question(page)).to_contain_text("blue after")
    expect(told).to_be_hidden()
    version(question(page)).get_by_role("button", name="Earlier version").click()
    expect(told).to_be_visible()
    server.turn()
    expect(told).to_be_hidden()
    expect(heard(page)).to_have_text("The answer in the other branch has ended.")
    version(question(page)).get_by_role("button", name="Later version").click()
    expect(reply(page)).to_contain_text("The answer is blue.")


def test_a_tab_that_is_behind_asks_where_it_looks(page: Page, server: RealServer, new_page: NewPage) -> None:
    ask(page, "red start")
    settled(page)
    chat = page.url.rpartition("/")[2]
    behind = opened(new_page(), server, chat)
    settled(behind)
    ask(page, "blue here")
    expect(reply(page)).to_contain_text("blue.")
    settled(page)
    ask(behind, "red there")
    settled(behind)
    assert shown(behind) == "The answer is red."
    behind.reload()
    expect(version(question(behind))).to_contain_text("2 / 2")
    version(question(behind)).get_by_role("button", name="Earlier version").click()
    expect(question(behind)).to_contain_text("blue here")


def test_what_is_copied_keeps_its_form(page: Page, server: RealServer) -> None:
    ask(page, "table of kinds")
    settled(page)
    reply(page).get_by_role("button", name="Copy the answer").click()
    expect(reply(page).get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == TABLE
    html = page.evaluate(
        "navigator.clipboard.read().then(([item]) => item.getType('text/html')).then((blob) => blob.text())"
    )
    assert "<td><code>set</code></td>" in html and re.search(r"<pre[^>]*><code", html) and "Copy" not in html
    question(page).hover()
    question(page).get_by_role("button", name="Copy the question").click()
    assert page.evaluate("navigator.clipboard.readText()") == "table of kinds"


def test_words_not_sent_are_kept_for_their_chat(page: Page, server: RealServer) -> None:
    ask(page, "red drafts")
    settled(page)
    pasted = "line\n" * 4_000 + "语"
    page.evaluate("text => navigator.clipboard.writeText(text)", pasted)
    box(page).press("Control+V")
    expect(box(page)).to_have_value(pasted)
    page.get_by_role("link", name="New chat").click()
    expect(box(page)).to_have_value("")
    box(page).fill("for a new one")
    page.go_back()
    expect(box(page)).to_have_value(pasted)
    page.reload()
    expect(box(page)).to_have_value(pasted)
    page.get_by_role("link", name="New chat").click()
    expect(box(page)).to_have_value("for a new one")
    ask(page, "blue sent")
    settled(page)
    expect(box(page)).to_have_value("")
    page.reload()
    expect(reply(page)).to_contain_text("blue.")
    expect(box(page)).to_have_value("")
    page.get_by_role("link", name="New chat").click()
    expect(box(page)).to_have_value("")


def test_what_is_asked_before_the_session_is_known_is_not_lost(page: Page, server: RealServer) -> None:
    held: list[Route] = []
    page.route("**/api/session", lambda route: held.append(route))
    page.goto(server.url)
    ask(page, "red at once")
    expect(reply(page)).to_contain_text("red.")
    for route in held:
        route.continue_()
    expect(page.get_by_role("link", name="red at once")).to_be_visible()
    expect(reply(page)).to_contain_text("red.")
    page.reload()
    expect(page.get_by_text("Loading the chat…")).to_be_visible()
    box(page).fill("too early")
    box(page).press("Enter")
    held[-1].continue_()
    expect(reply(page)).to_contain_text("red.")
    expect(box(page)).to_have_value("too early")


def test_a_chat_that_ends_with_a_question_goes_on(page: Page, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()
    sent = file(message("a", None, "user", "red nobody answered"))
    chat = server.http.post("/api/chats/import", json=sent).json()["chat_ids"][0]
    opened(page, server, chat)
    expect(question(page)).to_be_visible()
    ask(page, "blue instead")
    expect(page.get_by_role("main").get_by_text("regenerate answers a question")).to_be_visible()
    expect(box(page)).to_have_value("blue instead")
    page.get_by_role("button", name="Answer this").click()
    expect(reply(page)).to_contain_text("red.")
    expect(page.get_by_role("button", name="Answer this")).to_have_count(0)
    settled(page)
    box(page).press("Enter")
    expect(reply(page)).to_contain_text("blue.")


def test_a_long_question_can_be_seen_whole(page: Page, server: RealServer) -> None:
    chat, _ = server.ask("red\n" + "line\n" * 200 + "the end")
    opened(page, server, chat)
    expect(question(page)).to_contain_text("the end")
    tall = question(page).bounding_box()
    assert tall is not None and tall["height"] < 600
    question(page).get_by_role("button", name="Show all").click()
    whole = question(page).bounding_box()
    assert whole is not None and whole["height"] > 3000
