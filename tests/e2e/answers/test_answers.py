"""Tests how an answer comes about, as the page shows it: thinking, sources, searches, several answers and models."""

from __future__ import annotations

import re

import pytest

from app.runs.events import (
    AnswerChecking,
    AnswerDelta,
    AnswerDone,
    PrefillProgress,
    RouteAnswering,
    RouteTried,
    RunFailed,
    StrategyEvent,
    ThinkingDelta,
    ThinkingDone,
    ThinkingProgress,
    ThinkingWait,
)
from tests.e2e.answers.answer_page import ENDED, PREVIEW, WRITE, ask, cited, fraction, reply, started
from tests.e2e.conftest import NewPage
from tests.e2e.support.fake_documents import PASSAGE
from tests.e2e.support.fake_server import FakeServer, Gate, answer
from tests.e2e.support.told import approval, call, candidates, dam, found, question, result, searched, support

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]


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


# -- sources


def test_a_sentence_that_is_held_back_is_said_to_be_checked(page: Page, fake: FakeServer) -> None:
    first, second = "It was built in 1931. ", "It is tall."
    fake.play(
        [AnswerDelta(text=first), AnswerChecking(tokens=52), Gate("checked"), AnswerDelta(text=second), Gate("end")],
        answer(first, second)[2:],
    )
    ask(page)
    expect(reply(page)).to_contain_text("Checking the sentence…")
    fake.open("checked")
    expect(reply(page)).to_contain_text(second)
    expect(reply(page)).not_to_contain_text("Checking the sentence…")
    fake.open("end")


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
    reply(page).get_by_role("button", name="Speed and size").click()
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
    expect(reply(page).get_by_role("button", name="Speed and size")).to_be_visible()

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
    reply(page).get_by_text("Reported on the way (1)").click()
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
