"""Tests sub-agents as the page shows them: a tree below the call that delegates, with their calls and answers."""

from __future__ import annotations

import pytest

from app.runs.events import ApprovalResolved, RunCancelled
from tests.e2e.answers.answer_page import ENDED, PREVIEW, ask, card, reply
from tests.e2e.conftest import NewPage
from tests.e2e.support.fake_server import USAGE, FakeServer, Gate
from tests.e2e.support.told import agent, agent_done, approval, call, result

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Locator, Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]

DELEGATE = call("delegate", '{"tasks": []}')
FIND = "Find the height of the dam.\nSay where it says so."


def tree(page: Page) -> Locator:
    return page.get_by_role("list", name="Sub-agents")


def test_sub_agents_are_a_tree_below_their_call_closed_at_first(page: Page, fake: FakeServer) -> None:
    fake.play(
        [DELEGATE, agent(1, FIND, "search"), agent(2, "Find the cost.")],
        [call("search", '{"query": "height"}', "c1", "agent_1"), result("search", "96 metres", "c1"), Gate("done")],
        [agent_done(1, "It is **96** metres high."), agent_done(2, "It may not.", failed=True), Gate("result")],
        [result("delegate", "Sub-agent 1:\nIt is 96 metres high.")],
        ENDED,
    )
    ask(page)
    head = card(page, "delegate").get_by_role("button", name="Sub-agents")
    expect(head).to_contain_text("0 of 2 done")
    expect(head).to_have_attribute("aria-expanded", "false")
    expect(card(page, "search")).to_have_count(0)
    head.press("Enter")
    one = tree(page).get_by_role("button", name="1. Find the height of the dam.")
    expect(one).to_contain_text("running")
    one.press("Space")
    expect(tree(page)).to_contain_text("Say where it says so.")
    expect(tree(page)).to_contain_text("It may call search.")
    expect(card(page, "delegate").get_by_role("region", name="Call of search")).to_contain_text("96 metres")
    fake.open("done")
    expect(head).to_contain_text("2 of 2 done")
    expect(one).to_contain_text("40 tokens · 1.5 s")
    expect(tree(page).locator("strong")).to_have_text("96")
    tree(page).get_by_role("button", name="2. Find the cost.").click()
    expect(tree(page)).to_contain_text("It may call no tools.")
    expect(tree(page)).to_contain_text("It may not.")
    fake.open("result")
    expect(reply(page)).to_contain_text("Done.")
    page.reload()  # the run's log has it all
    card(page, "delegate").get_by_role("button", name="Sub-agents").click()
    tree(page).get_by_role("button", name="1. Find").click()
    expect(tree(page)).to_contain_text("It is 96 metres high.")
    assert [text.split("\n")[0] for text in reply(page).locator(".calls > .card").all_inner_texts()] == ["delegate"]


def test_a_sub_agents_call_that_asks_is_in_view_and_is_answered(page: Page, fake: FakeServer) -> None:
    write = call("write_file", '{"path": "plan.md"}', "c1", "agent_2")
    asks = approval(PREVIEW).model_copy(update={"call_id": "c1"})
    decided = ApprovalResolved(approval_id="approval_1", call_id="c1", decision="once")
    fake.play(
        [DELEGATE, agent(1, "Find it."), agent(2, "Write it.", "write_file"), write, asks, Gate("approval_1")],
        [decided, result("write_file", "ok", "c1"), agent_done(2, "It is written."), Gate("end")],
        ENDED,
    )
    ask(page)
    asked = page.get_by_role("group", name="write_file needs your approval")
    expect(asked).to_be_visible()
    expect(card(page, "delegate").get_by_role("button", name="Sub-agents")).to_contain_text("waits for you")
    asked.get_by_role("button", name="Allow once").click()
    expect(page.get_by_role("group", name="You allowed this once.")).to_be_focused()
    expect(tree(page)).to_contain_text("It is written.")
    assert fake.world.decisions == [{"decision": "once"}]
    fake.open("end")
    expect(reply(page)).to_contain_text("Done.")


def test_a_stop_leaves_what_was_done_and_says_what_was_not(page: Page, fake: FakeServer) -> None:
    fake.play(
        [DELEGATE, agent(1, "Find it."), agent(2, "Count it."), agent_done(1, "Here."), Gate("stop")],
        [RunCancelled(usage=USAGE)],
    )
    ask(page)
    card(page, "delegate").get_by_role("button", name="Sub-agents").click()
    fake.drop_streams()  # and a reader that comes back misses nothing and doubles nothing
    fake.open("stop")
    expect(tree(page).get_by_role("button", name="2. Count it.")).to_contain_text("not finished")
    expect(tree(page).get_by_role("listitem")).to_have_count(2)
    expect(card(page, "delegate").get_by_role("button", name="Sub-agents")).to_contain_text("1 of 2 done")


def test_on_a_phone_nothing_is_wider_than_the_page(fake: FakeServer, new_page: NewPage) -> None:
    page = new_page(viewport={"width": 320, "height": 640})
    page.goto(fake.url)
    long = f"https://example.org/{'a' * 300}"
    fake.play(
        [DELEGATE, agent(1, long, "x" * 60), call("search", f'{{"query": "{long}"}}', "c1", "agent_1")],
        [agent_done(1, f"See `{long}`."), Gate("end")],
    )
    ask(page)
    card(page, "delegate").get_by_role("button", name="Sub-agents").click()
    tree(page).get_by_role("button", name="1. https").click()
    expect(tree(page)).to_contain_text("See ")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    widths = "parts => parts.map(part => [part.clientWidth, part.parentElement.clientWidth])"
    sizes = page.locator(".agents, .agents .body > *").evaluate_all(widths)
    assert sizes and all(own <= around for own, around in sizes)
