"""Tests how an answer is asked for on the page: each control sends what it says, is kept, and says what cannot be
had."""

from __future__ import annotations

from typing import Any

import pytest

from reasoning.strategies import BUILT_IN
from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.fake_server import FakeServer, answer

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Locator, Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]

MODELS = [
    {"id": "small", "thinks": True, "tools": True},
    {"id": "default", "thinks": True, "tools": True},
    {"id": "plain", "thinks": False, "tools": False},
    {"id": "auto", "thinks": True, "tools": False},
]
STRATEGIES = [
    {
        "name": each.name, "about": each.about, "options": each.options.model_json_schema(), "origin": each.origin,
    }
    for each in BUILT_IN
]  # fmt: skip


def tool(name: str, description: str, permission: str, approval: str) -> dict[str, Any]:
    return {
        "name": name, "description": description, "parameters": {}, "permission": permission, "approval": approval,
        "timeout_s": 30, "idempotent": True, "origin": "built in",
    }  # fmt: skip


TOOLS = [tool("calculate", "Works out a sum.", "none", "never"), tool("write_file", "Writes.", "write", "always")]
COLLECTIONS = [
    {"id": 3, "name": "Reports", "owner": "local", "role": "owner", "documents": 12},
    {"id": 7, "name": "Letters", "owner": "local", "role": "owner", "documents": 1},
    {"id": 9, "name": "Nothing yet", "owner": "local", "role": "owner", "documents": 0},
]


@pytest.fixture
def fake(fake: FakeServer) -> FakeServer:
    """With something of everything to choose from."""
    offer = fake.world.offer
    offer.models, offer.strategies, offer.tools, offer.collections = MODELS, STRATEGIES, TOOLS, COLLECTIONS
    offer.off = {"python": "The sandbox is switched off."}
    offer.skills = [{"name": "pdf-forms", "description": "Fills forms."}]
    fake.play(answer("Done."))
    return fake


def control(page: Page, name: str) -> Locator:
    return page.get_by_role("group", name="How to answer").get_by_role("button", name=name)


def sheet(page: Page, name: str) -> Locator:
    """Returns what a control opens, opened."""
    control(page, name).click()
    return page.get_by_role("dialog")


def choose(page: Page, name: str, choice: str) -> None:
    sheet(page, name).get_by_role("radio", name=choice, exact=True).check()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def ask(page: Page, words: str = "Go on") -> None:
    box = page.get_by_role("textbox", name="Message")
    box.fill(words)
    box.press("Enter")
    expect(page.get_by_role("article", name="Ponder").last).to_contain_text("Done.")


def kept(page: Page, settings: str) -> None:
    """Begin with what a browser kept from before."""
    page.evaluate("settings => localStorage.setItem('ponder.settings', settings)", settings)
    page.reload()


def reset(page: Page) -> Locator:
    return page.get_by_role("button", name="Reset how to answer")


def test_nothing_is_sent_until_something_is_set(page: Page, fake: FakeServer) -> None:
    expect(control(page, "Tools")).to_be_visible()
    expect(reset(page)).to_have_count(0)
    ask(page)
    assert fake.asked() == {"content": "Go on"}


def test_every_control_sends_what_it_says(page: Page, fake: FakeServer) -> None:
    choose(page, "Model", "plain")
    tools = sheet(page, "Strategy")
    tools.get_by_role("radio", name="best_of_n", exact=True).check()
    tools.get_by_label("N", exact=True).fill("6")
    tools.get_by_label("Verifier").select_option(label="judge")
    tools.get_by_label("Enough").fill("0.5")
    page.keyboard.press("Escape")
    documents = sheet(page, "Documents")
    expect(documents).not_to_contain_text("Nothing yet")
    documents.get_by_role("radio", name="From some collections").check()
    expect(documents).to_contain_text("Choose at least one.")
    documents.get_by_role("checkbox", name="Letters").check()
    page.keyboard.press("Escape")
    sampling = sheet(page, "Sampling")
    sampling.get_by_label("Temperature").fill("0.2")
    sampling.get_by_label("Most tokens of the answer").fill("200")
    sampling.get_by_text("More options").click()
    sampling.get_by_label("Top p").fill("0.9")
    sampling.get_by_label("Seed").fill("-3")
    page.keyboard.press("Escape")
    sheet(page, "System prompt").get_by_role("textbox").fill("You are kind.")
    page.keyboard.press("Escape")
    words = (
        "Model: plain · Strategy: Best of n (n 6, verifier judge, enough 0.5) · From Letters · "
        "System prompt: “You are kind.” · Temperature 0.2 · Top p 0.9 · Seed -3 · "
    )
    expect(page.get_by_text(words + "At most 200 tokens")).to_be_visible()
    ask(page)
    wished = {
        "model": "plain",
        "strategy": "best_of_n",
        "strategy_options": {"n": 6, "verifier": "judge", "enough": 0.5},
        "collections": [7],
        "system": "You are kind.",
        "temperature": 0.2,
        "top_p": 0.9,
        "seed": -3,
        "max_tokens": 200,
    }
    assert fake.asked() == {"content": "Go on", **wished}

    page.reload()  # it is remembered, and for every chat
    expect(page.get_by_text(words)).to_be_visible()
    page.get_by_role("link", name="New chat").click()
    ask(page, "Another")
    assert fake.asked() == {"content": "Another", **wished}

    reset(page).click()
    expect(page.get_by_text(words)).to_have_count(0)
    ask(page, "As usual")
    assert fake.asked() == {"content": "As usual"}
    page.reload()
    expect(control(page, "Tools")).to_be_visible()
    expect(reset(page)).to_have_count(0)


def test_an_effort_is_told_with_what_it_stands_for(page: Page, fake: FakeServer) -> None:
    thinking = sheet(page, "Thinking")
    low = thinking.get_by_role("radio", name="Low")
    expect(low).to_have_accessible_description("At most 512 tokens.")
    low.check()
    page.keyboard.press("Escape")
    expect(control(page, "Thinking: low")).to_be_visible()
    ask(page)
    assert fake.asked() == {"content": "Go on", "reasoning_effort": "low"}
    choose(page, "Thinking", "None")
    ask(page)
    assert fake.asked() == {"content": "Go on", "reasoning_effort": "none"}
    choose(page, "Thinking", "As usual")
    choose(page, "Model", "plain")
    expect(control(page, "Thinking")).to_have_count(0)  # it does not think


def test_tools_say_what_they_do_and_are_offered_as_chosen(page: Page, fake: FakeServer) -> None:
    choose(page, "Tools", "All 2")
    ask(page)
    assert fake.asked()["tools"] == "all"
    tools = sheet(page, "Tools")
    tools.get_by_role("radio", name="Some").check()
    write = tools.get_by_role("checkbox", name="write_file")
    expect(write).to_have_accessible_description("Writes. writes, asks first")
    write.check()
    tools.get_by_text("Not there (1)").click()
    expect(tools.get_by_text("The sandbox is switched off.")).to_be_visible()
    tools.get_by_text("Skills (1)").click()
    expect(tools.get_by_text("Fills forms.")).to_be_visible()
    page.keyboard.press("Escape")
    ask(page)
    assert fake.asked()["tools"] == ["write_file"] and "skills" not in fake.asked()


def test_skills_are_chosen_one_by_one_or_none(page: Page, fake: FakeServer) -> None:
    tools = sheet(page, "Tools")
    tools.get_by_text("Skills (1)").click()
    tools.get_by_role("radio", name="Those chosen").check()
    expect(tools.get_by_text("None is chosen: it reads none.")).to_be_visible()
    page.keyboard.press("Escape")
    ask(page)
    assert fake.asked()["skills"] == []
    expect(page.get_by_text("No skills")).to_be_visible()
    tools = sheet(page, "Tools")
    tools.get_by_role("checkbox", name="pdf-forms").check()  # unfolded, as something is chosen
    page.keyboard.press("Escape")
    ask(page)
    assert fake.asked()["skills"] == ["pdf-forms"]


def test_what_cannot_go_together_is_not_offered_and_says_why(page: Page, fake: FakeServer) -> None:
    choose(page, "Tools", "All 2")
    models = sheet(page, "Model")
    auto = models.get_by_role("radio", name="auto")
    expect(auto).to_be_disabled()
    expect(auto).to_have_accessible_description(
        "The small model answers first, a larger one where that is not enough. "
        "With “auto” there are no tools. To choose this, change “Tools” first."
    )
    page.keyboard.press("Escape")
    strategies = sheet(page, "Strategy")
    for name in ("tree", "beam"):
        expect(strategies.get_by_role("radio", name=name, exact=True)).to_be_disabled()
    expect(strategies.get_by_role("radio", name="best_of_n")).to_be_enabled()
    page.keyboard.press("Escape")
    choose(page, "Thinking", "Low")
    strategies = sheet(page, "Strategy")
    for each in STRATEGIES:
        expect(strategies.get_by_role("radio", name=str(each["name"]), exact=True)).to_be_disabled()
    told = "An amount of thinking and a strategy do not go together. To choose this, change “Thinking” first."
    expect(strategies.get_by_text(told)).to_have_count(1)  # once, not for each
    page.keyboard.press("Escape")
    reset(page).click()
    choose(page, "Model", "auto")
    expect(sheet(page, "Tools").get_by_role("radio", name="All 2")).to_be_disabled()


def test_a_number_out_of_bounds_is_not_taken(page: Page, fake: FakeServer) -> None:
    strategy = sheet(page, "Strategy")
    strategy.get_by_role("radio", name="best_of_n").check()
    field = strategy.get_by_label("N", exact=True)
    expect(field).to_have_attribute("placeholder", "4, as usual")
    field.fill("8")
    field.fill("99")
    expect(strategy.get_by_role("alert")).to_have_text("Not taken. Accepted: a whole number from 1 to 64.")
    expect(field).to_have_attribute("aria-invalid", "true")
    strategy.get_by_label("Verifier").focus()
    expect(field).to_have_value("8")  # what holds
    expect(strategy.get_by_role("alert")).to_have_count(0)
    page.keyboard.press("Escape")
    ask(page)
    assert fake.asked()["strategy_options"] == {"n": 8}


def test_options_that_matter_less_are_behind_a_fold(page: Page, fake: FakeServer) -> None:
    strategy = sheet(page, "Strategy")
    strategy.get_by_role("radio", name="tree").check()
    expect(strategy.get_by_role("spinbutton", name="Beam")).to_be_visible()
    expect(strategy.get_by_label("Labels")).to_have_count(0)  # an object
    expect(strategy.get_by_label("Seed")).to_be_hidden()
    strategy.get_by_text("More options").click()
    strategy.get_by_label("Seed").fill("-5")
    page.keyboard.press("Escape")
    ask(page)
    assert fake.asked()["strategy_options"] == {"seed": -5}
    expect(sheet(page, "Strategy").get_by_label("Seed")).to_have_value("-5")


def test_what_is_gone_is_left_out_with_a_note(page: Page, fake: FakeServer) -> None:
    kept(page, '{"strategy": "vote", "options": {"n": 3}, "tools": ["calculate", "fly"], "collections": [1]}')
    note = page.get_by_text("The strategy “vote” is not there any more.")
    expect(note).to_contain_text("The tool “fly” is not there any more.")
    expect(note).to_contain_text("Some of the documents to answer from are not there any more. That was left out.")
    expect(page.get_by_text("Tools: calculate")).to_be_visible()
    page.get_by_role("button", name="Dismiss").click()
    expect(note).to_have_count(0)
    ask(page)
    assert fake.asked() == {"content": "Go on", "tools": ["calculate"]}
    page.reload()
    expect(page.get_by_text("Tools: calculate")).to_be_visible()
    expect(note).to_have_count(0)  # it was told


def test_what_cannot_be_read_back_is_as_if_nothing_was_kept(page: Page, fake: FakeServer) -> None:
    kept(page, '{"temperature": 9, "tools": {}')
    ask(page)
    assert fake.asked() == {"content": "Go on"}


def test_a_refusal_is_told_at_its_field_and_the_words_are_kept(page: Page, fake: FakeServer, watch: Watch) -> None:
    watch.expect_errors()
    kept(page, '{"strategy": "tree", "options": {"nodes": 10}}')
    expect(control(page, "Strategy: Tree")).to_be_visible()
    why = "strategy_options.nodes is 10; accepted: at least 21."
    fake.refuse_next("strategy_options.nodes", why)
    box = page.get_by_role("textbox", name="Message")
    box.fill("Make 24")
    box.press("Enter")
    nodes = page.get_by_role("dialog").get_by_label("Nodes", exact=True)  # behind the fold, which is open now
    expect(nodes).to_be_focused()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_have_text(why)
    nodes.fill("30")
    expect(page.get_by_role("dialog").get_by_role("alert")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(page.get_by_role("article")).to_have_count(0)
    expect(box).to_have_value("Make 24")
    box.press("Enter")
    expect(page.get_by_role("article", name="Ponder")).to_contain_text("Done.")
    assert fake.asked() == {"content": "Make 24", "strategy": "tree", "strategy_options": {"nodes": 30}}
    assert fake.questions() == ["Make 24"]


def test_a_system_prompt_too_long_is_not_taken(page: Page, fake: FakeServer) -> None:
    text = sheet(page, "System prompt").get_by_role("textbox")
    text.fill("You are kind.")
    text.fill("words " * 16_667)
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("up to 100,000")
    page.keyboard.press("Escape")
    ask(page)
    assert fake.asked() == {"content": "Go on", "system": "You are kind."}
    sheet(page, "System prompt").get_by_role("textbox").fill("  ")
    page.keyboard.press("Escape")
    expect(reset(page)).to_have_count(0)


def test_a_refused_model_is_told_at_its_choice(page: Page, fake: FakeServer, watch: Watch) -> None:
    watch.expect_errors()
    choose(page, "Model", "plain")
    fake.refuse_next("model", "The model 'plain' is not served here.")
    box = page.get_by_role("textbox", name="Message")
    box.fill("Hello")
    box.press("Enter")
    expect(page.get_by_role("dialog").get_by_role("alert")).to_have_text("The model 'plain' is not served here.")
    expect(page.get_by_role("radio", name="plain")).to_be_focused()


def test_all_of_it_works_by_keyboard_alone(page: Page, fake: FakeServer) -> None:
    for name in ("Model", "Thinking", "Strategy", "Tools", "Documents"):  # these come when the server has told
        expect(control(page, name)).to_be_visible()
    box = page.get_by_role("textbox", name="Message")
    box.focus()
    names = ["Send", "Model", "Thinking", "Strategy", "Compare", "Tools", "Documents", "System prompt", "Sampling"]
    for name in names:
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name=name, exact=True)).to_be_focused()
    for _ in range(3):
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("radio", name="None")).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("radio", name="Some")).to_be_checked()
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(page.get_by_role("checkbox", name="calculate")).to_be_checked()
    page.keyboard.press("Escape")
    expect(control(page, "Tools: calculate")).to_be_focused()  # back where it came from
    for _ in range(3):
        page.keyboard.press("Shift+Tab")
    expect(control(page, "Thinking")).to_be_focused()
    box.focus()
    for name in ("Dictate", "Show a picture", "Add files"):
        page.keyboard.press("Shift+Tab")
        expect(page.get_by_role("button", name=name)).to_be_focused()
    page.keyboard.press("Shift+Tab")
    expect(reset(page)).to_be_focused()
    page.keyboard.press("Enter")
    expect(box).to_be_focused()
    ask(page)
    assert fake.asked() == {"content": "Go on"}


def test_on_a_phone_a_control_opens_a_sheet_as_wide_as_the_screen(fake: FakeServer, new_page: NewPage) -> None:
    page = new_page(viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    page.goto(fake.url)
    strategy = sheet(page, "Strategy")
    strategy.get_by_role("radio", name="tree").check()
    box = strategy.bounding_box()
    assert box is not None and box["x"] == 0 and box["width"] == 360
    assert box["y"] + box["height"] == 640
    strategy.get_by_role("spinbutton", name="Beam").fill("3")
    strategy.get_by_role("button", name="Close").click()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    ask(page)
    assert fake.asked()["strategy_options"] == {"beam": 3}


def test_one_model_without_tools_or_documents_has_no_controls_for_them(fake: FakeServer, new_page: NewPage) -> None:
    offer = fake.world.offer
    offer.models, offer.tools, offer.off, offer.collections = MODELS[:2], [], {}, []
    page = new_page()
    page.goto(fake.url)
    expect(control(page, "Strategy")).to_be_visible()
    for name in ("Model", "Tools", "Documents"):
        expect(control(page, name)).to_have_count(0)
