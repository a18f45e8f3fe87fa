"""Tests how an answer comes about, as the page shows it: thinking, calls, sources, searches, several answers and
models."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import pytest

from app.runs.events import (
    AnswerDelta,
    AnswerDone,
    ApprovalResolved,
    Event,
    LimitReached,
    PrefillProgress,
    RouteAnswering,
    RouteTried,
    RunFailed,
    SourceShown,
    StrategyEvent,
    ThinkingDelta,
    ThinkingDone,
    ThinkingProgress,
    ThinkingStarted,
    ThinkingWait,
    ToolError,
    ToolOutput,
    ToolProgress,
)
from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.fake_documents import PASSAGE
from tests.e2e.support.fake_server import FakeServer, Gate, Script, answer
from tests.e2e.support.told import approval, call, candidates, dam, found, question, result, searched, support

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Locator, Page, Route, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]

WRITE = call("write_file", '{"path": "plan.md"}')
PREVIEW = 'write_file(\n  path = "plan.md"\n)'
ENDED = answer("Done.")


def reply(page: Page) -> Locator:
    return page.get_by_role("article", name="Ponder").last


def ask(page: Page, words: str = "Go on") -> None:
    box = page.get_by_role("textbox", name="Message")
    box.fill(words)
    box.press("Enter")


def card(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=f"Call of {name}")


def started(most: int | None, waits: int = 0) -> ThinkingStarted:
    return ThinkingStarted(started_at=time.time(), max_tokens=most, waits=waits)


def fraction(bar: Locator) -> float:
    return float(bar.evaluate("bar => bar.position"))


# -- thinking


def test_a_budget_fills_and_every_wait_is_marked(page: Page, fake: FakeServer) -> None:
    fake.play(
        [started(1000, 2), ThinkingDelta(text="It is 7."), ThinkingProgress(tokens=250), Gate("more")],
        [ThinkingWait(number=1, of=2), ThinkingDelta(text="Wait, no: 8."), ThinkingProgress(tokens=500), Gate("done")],
        [ThinkingDone(duration_s=2.5, tokens=520), *answer("8")],
    )
    ask(page)
    bar = page.get_by_role("progressbar", name="Budget of thinking")
    expect(reply(page)).to_contain_text("250 of 1,000 tokens")
    assert fraction(bar) == 0.25
    fake.open("more")
    expect(reply(page)).to_contain_text("500 of 1,000 tokens")
    assert fraction(bar) == 0.5
    trace = page.get_by_role("region", name="What the model thought")
    expect(trace).to_have_text(re.compile(r"It is 7\.\s*made to think on, 1 of 2\s*Wait, no: 8\."))
    fake.open("done")
    expect(page.get_by_role("button", name="Thought for 2.5 s · 520 tokens · 1 wait")).to_be_visible()
    expect(bar).to_have_count(0)
    expect(trace).to_be_hidden()


def test_thinking_that_is_not_shown_has_a_status_alone(page: Page, fake: FakeServer) -> None:
    fake.play(
        [started(None), ThinkingProgress(tokens=180), Gate("done"), ThinkingDone(duration_s=3.1, tokens=200)],
        answer("Four."),
    )
    ask(page)
    expect(reply(page)).to_contain_text(re.compile(r"Thinking…\s*\d+\.\d s\s*· 180 tokens"))
    fake.open("done")
    expect(reply(page)).to_contain_text("Thought for 3.1 s · 200 tokens")
    expect(page.get_by_role("button", name="Thought")).to_have_count(0)  # there is nothing to open


def test_thinking_that_a_failure_cuts_short_is_closed(page: Page, fake: FakeServer) -> None:
    fake.play([started(100), ThinkingDelta(text="Hm"), RunFailed(code="x", message="It broke.", retryable=False)])
    ask(page)
    expect(reply(page)).to_contain_text("It broke.")
    expect(page.get_by_role("button", name="Thinking, cut short")).to_have_attribute("aria-expanded", "false")


def test_reading_a_long_prompt_is_shown(page: Page, fake: FakeServer) -> None:
    fake.play([PrefillProgress(processed=2000, total=8000, cached=512), Gate("read")], ENDED)
    ask(page)
    expect(reply(page)).to_contain_text("Reading…")
    expect(reply(page)).to_contain_text("2,000 of 8,000 tokens, 512 from cache")
    assert fraction(page.get_by_role("progressbar")) == 0.25
    fake.open("read")
    expect(reply(page)).to_contain_text("Done.")
    expect(page.get_by_role("progressbar")).to_have_count(0)


# -- tools


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


def test_a_note_that_was_kept_unasked_is_forgotten_with_a_press(page: Page, fake: FakeServer, watch: Watch) -> None:
    watch.expect_errors()
    answers, forgotten = iter([500, 204]), list[str]()

    def forget(route: Route) -> None:
        forgotten.append(f"{route.request.method} {route.request.url.removeprefix(fake.url)}")
        route.fulfill(status=next(answers), json={"error": {"message": "The disk is full."}})

    page.route("**/api/notes/*", forget)
    fake.play([call("remember", '{"text": "Likes tea."}'), result("remember", "Kept as note 7.")], ENDED)
    ask(page)
    kept = card(page, "remember")
    expect(kept.get_by_role("status")).to_contain_text("Kept for later chats.")
    kept.get_by_role("button", name="Forget it").click()
    expect(kept.get_by_role("status")).to_contain_text("could not be forgotten")
    kept.get_by_role("button", name="Forget it").click()
    expect(kept.get_by_role("status")).to_have_text("Forgotten.")
    assert forgotten == ["DELETE /api/notes/7"] * 2


def test_calls_are_shown_from_what_the_chat_keeps_when_the_log_is_gone(
    page: Page, fake: FakeServer, watch: Watch
) -> None:
    watch.expect_errors()
    fake.play([call("calculator", '{"expression": "27+58"}'), result("calculator", "85")], ENDED)
    ask(page)
    expect(reply(page)).to_contain_text("tokens/s")
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


# -- sources

SENTENCES = (
    "The dam was finished in **1931**, two years late. [S1]",
    "It cost more than planned. [unsupported]",
    "The minutes say nothing. [S2]",
)
CITED = f"🌊 {SENTENCES[0]} {SENTENCES[1]}\n\n- {SENTENCES[2]}"


def cited() -> tuple[Sequence[Event], list[SourceShown]]:
    sources, passage = dam()
    return [
        found("answer", sources),
        AnswerDelta(text=CITED),
        support(1, CITED, SENTENCES[0], "supported", [passage]),
        support(2, CITED, SENTENCES[1], "unsupported", []),
        support(3, CITED, SENTENCES[2], "elsewhere", [sources[1]]),
        AnswerDone(text=CITED, finish_reason="stop"),
    ], sources


def test_a_citation_opens_the_exact_passage(page: Page, fake: FakeServer) -> None:
    told, sources = cited()
    fake.play(told, ENDED[-1:])
    ask(page)
    prose = reply(page).locator(".prose")
    expect(prose).to_have_text(re.compile(r"finished in 1931, two years late\.\s?1 It cost more than planned\."))
    expect(prose).to_have_text(re.compile(r"planned\.\s?no source\s*The minutes say nothing\.\s?2\s*$"))
    mark = page.get_by_role("button", name="Source 1: The dam in the valley.pdf, page 12")
    mark.focus()
    page.keyboard.press("Enter")
    sheet = page.get_by_role("dialog", name="Passage of The dam in the valley.pdf")
    expect(sheet.locator("mark")).to_have_text("The dam was finished in 1931, two years late.")
    expect(sheet.get_by_role("region", name="The passage")).to_have_text(PASSAGE)
    expect(sheet).to_contain_text("page 12 · score 0.87")
    page.keyboard.press("Escape")
    expect(sheet).to_have_count(0)
    expect(mark).to_be_focused()

    page.get_by_role("button", name="Source 2, though the answer named another: Minutes").click()
    expect(page.get_by_role("dialog", name="Passage of Minutes").locator("mark")).to_have_text(sources[1].text)
    page.get_by_role("button", name="Close", exact=True).click()
    found_list = reply(page).get_by_role("region", name="Sources")
    found_list.get_by_role("button", name="The dam in the valley.pdf").click()
    expect(page.get_by_role("dialog").get_by_role("region")).to_have_text(PASSAGE)
    expect(page.get_by_role("dialog").locator("mark")).to_have_count(0)
    page.keyboard.press("Escape")

    page.reload()
    expect(mark).to_be_visible()  # the chat keeps no citations: the run's log does


def test_escape_closes_a_passage_and_not_the_run(page: Page, fake: FakeServer) -> None:
    told, _ = cited()
    fake.play(told[:-1], [Gate("end")], told[-1:], ENDED[-1:])
    ask(page)
    page.locator("button.cite").first.click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    fake.open("end")
    expect(reply(page)).to_contain_text("31 tokens in")
    assert fake.world.cancels == 0


def test_no_evidence_is_said_plainly(page: Page, fake: FakeServer) -> None:
    fake.play([found("none", [])], answer("I don't know. The sources do not say."))
    ask(page)
    note = reply(page).get_by_role("note")
    expect(note).to_contain_text("Nothing in the documents seems to answer this, so the model was not asked.")
    expect(note).to_contain_text("“when was the dam finished”")
    expect(reply(page).get_by_role("region", name="Sources")).to_have_count(0)


def test_the_titles_of_documents_cannot_run(page: Page, fake: FakeServer) -> None:
    _, passage = dam()
    wicked = passage.model_copy(update={"title": '"><img src=x onerror="window.owned=1">'})
    text = "It was. [S1]"
    cited = support(1, text, text, "supported", [wicked])
    fake.play([found("answer", [wicked]), AnswerDelta(text=text), cited, AnswerDone(text=text, finish_reason="stop")])
    ask(page)
    page.locator("button.cite").click()
    expect(page.get_by_role("dialog")).to_contain_text("onerror")
    assert page.evaluate("window.owned") is None
    assert page.locator("img").count() == 0


# -- searches


def test_a_tree_of_five_hundred_states_grows_and_is_a_list_too(page: Page, fake: FakeServer) -> None:
    fake.play(searched(500, gate="end"), answer("24"))
    ask(page)
    search = reply(page).get_by_role("region", name="Search")
    expect(search).to_contain_text("500 states")
    expect(search.locator("[data-node]")).to_have_count(500)
    expect(reply(page)).to_contain_text("Searching…")
    fake.open("end")
    expect(search).to_contain_text("found · 3.4 s")
    expect(reply(page)).to_contain_text("tokens/s")

    tree = search.get_by_role("application", name="Tree of the search.")
    bounds = tree.bounding_box()
    assert bounds is not None
    for node in (0, 250, 499):  # all of it is in view
        at = search.locator(f"[data-node='{node}']").bounding_box()
        assert at is not None
        assert bounds["x"] <= at["x"] and at["x"] + at["width"] <= bounds["x"] + bounds["width"]
    page.evaluate(
        """async (box) => {
            for (let i = 0; i < 30; i++) {
                box.dispatchEvent(new KeyboardEvent("keydown", { key: i % 2 ? "-" : "+", bubbles: true }));
                await new Promise(requestAnimationFrame);
            }
        }""",
        tree.element_handle(),
    )

    search.get_by_role("button", name="List").click()
    expect(search.get_by_role("listitem")).to_have_count(500)
    expect(search.get_by_role("listitem").first).to_contain_text("on the way to the answer")
    assert search.get_by_text("left out: others were better").count() > 10
    assert search.locator("li li li").count() > 0


def test_a_tree_is_walked_zoomed_and_dragged(page: Page, fake: FakeServer) -> None:
    fake.play(searched(9), [Gate("never")])
    ask(page)
    search = reply(page).get_by_role("region", name="Search")
    tree = search.get_by_role("application")
    tree.focus()
    for _ in range(9):
        page.keyboard.press("ArrowLeft")
    detail = search.get_by_role("status")
    expect(detail).to_contain_text("Make 24 of 4, 7, 8, 8.")
    page.keyboard.press("ArrowRight")
    expect(detail).to_contain_text("left: 1, 8")
    expect(search.locator("[data-node='1']")).to_have_class(re.compile("current"))

    def at() -> object:
        return search.locator("[data-node='1'] circle").first.bounding_box()

    whole = at()
    for _ in range(3):
        page.keyboard.press("+")
    near = at()
    assert near != whole
    bounds = tree.bounding_box()
    assert bounds is not None
    page.mouse.move(bounds["x"] + 40, bounds["y"] + 20)
    page.mouse.down()
    page.mouse.move(bounds["x"] + 140, bounds["y"] + 50, steps=4)
    page.mouse.up()
    assert at() not in (near, whole)
    page.keyboard.press("0")
    assert at() == whole
    search.locator("[data-node='2'] circle").first.click()
    expect(detail).to_contain_text("left: 2, 8")


# -- several answers, several models


def test_candidates_are_listed_and_the_chosen_one_marked(page: Page, fake: FakeServer) -> None:
    told = candidates("It is 42.", "It is 408.", chosen=1)
    fake.play(told[:-1], [Gate("choose")], told[-1:], answer("It is 408."))
    ask(page)
    panel = reply(page).get_by_role("region", name="2 answers written")
    expect(panel.get_by_role("listitem")).to_have_count(2)
    expect(reply(page)).to_contain_text("Comparing answers…")
    fake.open("choose")
    expect(panel).to_contain_text("Answer 2 chosen")
    panel.get_by_role("button", name="2 answers written").click()
    rows = panel.get_by_role("listitem")
    expect(rows.nth(1)).to_contain_text(re.compile(r"It is 408\.\s*chosen\s*score 0\.5"))
    expect(rows.nth(0)).not_to_contain_text("chosen")
    expect(panel).to_contain_text("1 answer was not written to the end")


def test_it_is_said_which_model_answers_and_why(page: Page, fake: FakeServer) -> None:
    tried = RouteTried(
        model="pebble-draft", passed=False, why="confidence 0.42 of 0.97", tokens=9, cost=2.5, seconds=0.2
    )  # fmt: skip
    told = StrategyEvent(name="Looked", fields={"at": 3})
    fake.play([tried, RouteAnswering(model="pebble"), told, Gate("end")], ENDED)
    ask(page)
    line = reply(page).get_by_role("note", name="Which model answers")
    expect(line).to_have_text("pebble-draft was not sure enough (confidence 0.42 of 0.97), pebble answers")
    fake.open("end")
    expect(line).to_have_text("pebble-draft was not sure enough (confidence 0.42 of 0.97), pebble answered")
    reply(page).get_by_text("Told by the strategy (1)").click()
    expect(reply(page)).to_contain_text('Looked {"at":3}')


# -- for everybody


def test_all_of_an_answer_is_reached_and_used_with_the_keyboard(page: Page, fake: FakeServer) -> None:
    told, _ = cited()
    fake.play(
        searched(6),
        candidates("One", "Two", chosen=0),
        [started(None), ThinkingDelta(text="Hm."), ThinkingDone(duration_s=1, tokens=2)],
        [WRITE, approval(PREVIEW), Gate("approval_1"), result("write_file", "ok"), *told, *ENDED[-1:]],
    )
    ask(page)
    approve = page.get_by_role("button", name="Allow once")
    expect(approve).to_be_visible()
    page.get_by_role("link", name="Skip to the message box").focus()
    names: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        shown = page.evaluate("getComputedStyle(document.activeElement).outlineStyle !== 'none'")
        name = page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText")
        assert shown or name == "Message", f"{name} does not show its focus"
        names.append(name.split("\n")[0])
        if name == "Message":
            break
    wanted = [
        "Search",
        "Tree",
        "List",
        "Tree of the search.",
        "2 answers",
        "Thought",
        "write_file",
        "What would",
        "Allow once",
    ]
    places = [next(i for i, name in enumerate(names) if name.startswith(start)) for start in wanted]
    assert places == sorted(places), names
    approve.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Source 1:")).to_be_visible()
    assert fake.world.decisions == [{"decision": "once"}]


def test_a_phone_shows_how_an_answer_comes_about_without_scrolling_sideways(
    fake: FakeServer, new_page: NewPage
) -> None:
    page = new_page(viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    page.goto(fake.url)
    wide = "x" * 200
    told, _ = cited()
    fake.play(
        [RouteTried(model=wide, passed=False, why=wide, tokens=1, cost=1, seconds=1), RouteAnswering(model=wide)],
        searched(30),
        candidates(wide, wide, chosen=0),
        [started(5000), ThinkingWait(number=1, of=9), ThinkingProgress(tokens=4000)],
        [
            call(wide, f'{{"{wide}": 1}}', "c"),
            question(wide, [wide]),
            WRITE,
            approval(wide),
            Gate("end"),
            *told,
            ENDED[-1],
        ],
    )
    ask(page)
    expect(page.get_by_role("button", name="Allow once")).to_be_visible()
    sideways = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not page.evaluate(sideways)
    fake.open("end")
    page.locator("button.cite").first.tap()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert not page.evaluate(sideways)
