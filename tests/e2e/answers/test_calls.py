"""Tests calls of tools as the page shows them: progress and results, approvals, and questions to the person."""

from __future__ import annotations

import re

import pytest

from app.runs.events import (
    AnswerDelta,
    AnswerDone,
    ApprovalResolved,
    LimitReached,
    ToolError,
    ToolOutput,
    ToolProgress,
)
from tests.e2e.answers.answer_page import ENDED, PREVIEW, WRITE, ask, card, fraction, reply
from tests.e2e.conftest import Watch
from tests.e2e.support.fake_server import FakeServer, Gate, Script
from tests.e2e.support.told import approval, call, question, result

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, Route, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_a_call_shows_what_with_how_far_and_what_came_of_it(page: Page, fake: FakeServer) -> None:
    fetch = call("fetch", '{"url":"https://example.org","most":12345678901234567890}', "call_2")
    told = {"call_id": "call_2", "name": "fetch"}
    fake.play(
        [AnswerDelta(text="Let me see."), call("calculator", '{"expression": "27+58"}'), result("calculator", "85")],
        [fetch, ToolProgress.model_validate({**told, "text": "page 3", "done": 3, "total": 4}), Gate("output")],
        [
            ToolOutput.model_validate({**told, "text": "line 1\n"}),
            ToolOutput.model_validate({**told, "text": "line 2"}),
        ],
        [Gate("error"), ToolError.model_validate({**told, "kind": "failed", "message": "It is gone.", "ms": 1234})],
        [LimitReached(limit="steps"), AnswerDelta(text="\n\n")],
        [AnswerDelta(text="It is 85."), AnswerDone(text="Let me see.\n\nIt is 85.", finish_reason="stop"), ENDED[-1]],
    )
    ask(page)
    expect(card(page, "calculator").get_by_role("button")).to_have_text(
        re.compile(r'calculator\s*\{"expression": "27\+58"\}\s*→\s*85\s*12 ms')
    )
    fetching = card(page, "fetch")
    expect(fetching).to_contain_text("running")
    expect(fetching).to_contain_text("page 3")
    assert fraction(fetching.get_by_role("progressbar")) == 0.75
    fake.open("output")
    expect(fetching.get_by_role("region", name="Output")).to_have_text("line 1\nline 2")
    expect(fetching.get_by_role("region", name="Arguments")).to_contain_text('"most": 12345678901234567890')
    fake.open("error")
    expect(fetching).to_contain_text("failed after 1.2 s")
    expect(fetching).to_contain_text("It is gone.")
    expect(fetching.get_by_role("progressbar")).to_have_count(0)
    expect(reply(page)).to_contain_text("the limit of steps is reached")
    card(page, "calculator").get_by_role("button").click()
    expect(card(page, "calculator").get_by_role("region", name="Result")).to_have_text("85")

    for _ in range(2):
        order = reply(page).locator(".prose, .card").all_inner_texts()
        assert [text.split("\n")[0] for text in order] == ["Let me see.", "calculator", "fetch", "It is 85."]
        page.reload()
        expect(card(page, "fetch")).to_contain_text("failed after 1.2 s")  # the run's log knows that, the chat does not


def test_a_note_that_was_kept_unasked_is_taken_back_with_a_press(page: Page, fake: FakeServer, watch: Watch) -> None:
    watch.expect_errors()
    answers, asked = iter([500, 200]), list[tuple[str, str | None]]()

    def undo(route: Route) -> None:
        asked.append((route.request.url.removeprefix(fake.url), route.request.post_data))
        route.fulfill(status=next(answers), json={"note": None})

    page.route("**/api/memory/*/undo", undo)
    kept_text = "Kept as note 7. It replaces: Likes rum."
    fake.play([call("remember", '{"text": " Likes  tea."}'), result("remember", kept_text)], ENDED)
    ask(page)
    kept = card(page, "remember")
    expect(kept.get_by_role("status")).to_contain_text("Likes tea., instead of “Likes rum.”")
    kept.get_by_role("button", name="Undo: Likes tea.").click()
    expect(kept.get_by_role("status")).to_contain_text("could not be taken back")
    kept.get_by_role("button", name="Undo: Likes tea.").click()
    expect(kept.get_by_role("status")).to_have_text("Taken back.")
    assert asked == [("/api/memory/7/undo", '{"text":"Likes tea."}')] * 2


def test_calls_are_shown_from_what_the_chat_keeps_when_the_log_is_gone(
    page: Page, fake: FakeServer, watch: Watch
) -> None:
    watch.expect_errors()
    fake.play([call("calculator", '{"expression": "27+58"}'), result("calculator", "85")], ENDED)
    ask(page)
    expect(reply(page).get_by_role("button", name="Speed and size")).to_be_visible()
    fake.lose_logs()
    page.reload()
    expect(card(page, "calculator")).to_contain_text("85")
    expect(reply(page)).to_contain_text("Done.")


@pytest.mark.parametrize(
    ("button", "sent", "told"),
    [
        ("Allow once", {"decision": "once"}, "You allowed this once."),
        ("Always allow", {"decision": "always", "scope": "tool"}, "You allowed this, now and later."),
        ("Deny", {"decision": "no"}, "You denied this."),
    ],
)
def test_a_call_is_approved_with_exactly_what_it_does_in_view(
    page: Page, fake: FakeServer, button: str, sent: dict[str, str], told: str
) -> None:
    fake.play([WRITE, approval(PREVIEW), Gate("approval_1"), Gate("ran"), result("write_file", "ok")], ENDED)
    ask(page)
    asked = page.get_by_role("group", name="write_file needs your approval")
    expect(asked.get_by_role("region", name="What would be done, exactly")).to_have_text(PREVIEW)
    expect(asked).to_contain_text("It writes to your files.")
    expect(asked).to_contain_text("medium risk")
    expect(asked.get_by_role("timer")).to_have_text(re.compile(r"9 min 5\d s left"))
    expect(page.locator("[aria-live=polite]")).to_have_text("write_file needs your approval.")
    if button == "Always allow":
        asked.get_by_label("cover").select_option(label="every call of write_file")
    asked.get_by_role("button", name=button).dblclick()
    expect(card(page, "write_file")).to_contain_text(told)
    expect(page.get_by_role("group", name=told)).to_be_focused()  # where the buttons were
    expect(asked.get_by_role("button")).to_have_count(0)
    fake.open("ran")
    expect(reply(page)).to_contain_text("Done.")
    assert fake.world.decisions == [sent]


@pytest.mark.parametrize(("button", "told"), [("Deny", "You denied this."), ("Outside", "book_table asks Where?")])
def test_the_second_press_of_a_double_click_does_not_take_the_focus_away(
    page: Page, fake: FakeServer, button: str, told: str
) -> None:
    if button == "Deny":
        asks: Script = [WRITE, approval(PREVIEW), Gate("approval_1"), Gate("ran"), result("write_file", "ok")]
    else:
        asks = [call("book_table", "{}"), question("Where?", ["Inside", "Outside"]), Gate("question_1"), Gate("ran")]
    fake.play(asks, ENDED)
    ask(page)
    page.get_by_role("button", name=button).hover()
    page.mouse.down()
    page.mouse.up()
    decided = page.get_by_role("group", name=told)
    expect(decided).to_be_focused()
    page.mouse.down(click_count=2)  # where the button was, and nothing is now
    page.mouse.up(click_count=2)
    expect(decided).to_be_focused()
    page.get_by_role("textbox", name="Message").click()  # a press of its own goes where it goes
    expect(decided).not_to_be_focused()
    fake.open("ran")
    expect(reply(page)).to_contain_text("Done.")


def test_an_approval_runs_out(page: Page, fake: FakeServer) -> None:
    late = ApprovalResolved(approval_id="approval_1", call_id="call_1", decision="expired")
    fake.play([WRITE, approval(PREVIEW, seconds=0.5), Gate("late"), late, result("write_file", "no")], ENDED)
    ask(page)
    expect(page.get_by_role("timer")).to_have_text("The time to answer is over.")
    page.get_by_role("button", name="Allow once").click(force=True)  # as a person would, though it is disabled
    fake.open("late")
    expect(card(page, "write_file")).to_contain_text("Nobody answered in time, so it was not done.")
    assert fake.world.decisions == []


def test_a_decision_that_is_not_taken_says_why_and_can_be_made_again(
    page: Page, fake: FakeServer, watch: Watch
) -> None:
    watch.expect_errors()
    fake.play([WRITE, approval(PREVIEW), Gate("approval_1"), result("write_file", "ok")], ENDED)
    fake.refuse_decisions("This tool asks each time.")
    ask(page)
    page.get_by_role("button", name="Always allow").click()
    expect(page.get_by_role("alert")).to_have_text("That was not taken. This tool asks each time.")
    fake.refuse_decisions("")
    page.get_by_role("button", name="Allow once").click()
    expect(reply(page)).to_contain_text("Done.")
    expect(page.get_by_role("alert")).to_have_count(0)
    assert [decision["decision"] for decision in fake.world.decisions] == ["always", "once"]


def test_a_run_that_ends_leaves_nothing_to_answer(page: Page, fake: FakeServer) -> None:
    fake.play([WRITE, approval(PREVIEW), Gate("never")])
    ask(page)
    expect(page.get_by_role("button", name="Allow once")).to_be_visible()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(card(page, "write_file")).to_contain_text("The run ended before this was answered.")
    expect(card(page, "write_file")).to_contain_text("not finished")
    expect(page.get_by_role("button", name="Allow once")).to_have_count(0)


@pytest.mark.parametrize("choices", [["Inside", "Outside"], None])
def test_a_tools_question_is_answered_in_place(page: Page, fake: FakeServer, choices: list[str] | None) -> None:
    fake.play(
        [call("book_table", "{}"), question("Where?", choices), Gate("question_1"), result("book_table", "ok")], ENDED
    )
    ask(page)
    asked = page.get_by_role("group", name="book_table asks Where?")
    if choices is None:
        asked.get_by_label("Your answer").fill("Outside")
        asked.get_by_label("Your answer").press("Enter")
    else:
        asked.get_by_role("button", name="Outside").dblclick()
    expect(card(page, "book_table")).to_contain_text("You answered: Outside")
    expect(reply(page)).to_contain_text("Done.")
    assert fake.world.decisions == [{"text": "Outside"}]
