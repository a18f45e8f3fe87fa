"""A chat brings its model, prompt, tools, documents and sampling to whichever browser opens it."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.fake_server import FakeServer

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, expect

from tests.e2e.test_asking import ask, choose, control, fake, reset, sheet

__all__ = ["fake"]  # the fixture: a server with something of everything

pytestmark = [pytest.mark.browser, pytest.mark.slow]

KEPT = {"model": "plain", "system": "Rhyme.", "temperature": 0.2}
WORDS = "Model: plain · System prompt: “Rhyme.” · Temperature 0.2"


def begun(page: Page, fake: FakeServer) -> str:
    """The id of a chat that was asked in with `KEPT`."""
    choose(page, "Model", "plain")
    sheet(page, "System prompt").get_by_role("textbox").fill("Rhyme.")
    page.keyboard.press("Escape")
    sheet(page, "Sampling").get_by_label("Temperature").fill("0.2")
    page.keyboard.press("Escape")
    ask(page)
    return next(reversed(fake.world.chats))


def test_a_chat_is_the_same_on_another_device(page: Page, fake: FakeServer, new_page: NewPage) -> None:
    chat = begun(page, fake)
    assert fake.world.chats[chat]["settings"] == KEPT
    other = new_page()
    other.goto(f"{fake.url}/c/{chat}")
    expect(other.get_by_text(WORDS)).to_be_visible()
    ask(other, "And there?")
    assert fake.asked() == {"content": "And there?", **KEPT}
    other.get_by_role("link", name="New chat").click()
    expect(reset(other)).to_have_count(0)  # nothing was ever chosen in that browser
    page.get_by_role("link", name="New chat").click()
    expect(page.get_by_text(WORDS)).to_be_visible()


def test_each_chat_goes_on_in_its_own_way(page: Page, fake: FakeServer) -> None:
    chat = begun(page, fake)
    page.get_by_role("link", name="New chat").click()
    reset(page).click()
    choose(page, "Tools", "All 2")
    ask(page, "Another")
    assert fake.asked() == {"content": "Another", "tools": "all"}
    page.goto(f"{fake.url}/c/{chat}")
    expect(page.get_by_text(WORDS)).to_be_visible()
    ask(page, "Back again")
    assert fake.asked() == {"content": "Back again", **KEPT}
    assert [each["settings"] for each in fake.world.chats.values()] == [KEPT, {"tools": "all"}]


def test_what_is_changed_by_hand_is_kept_before_it_is_asked(page: Page, fake: FakeServer, new_page: NewPage) -> None:
    chat = begun(page, fake)
    with page.expect_response(lambda reply: reply.request.method == "PATCH"):
        sheet(page, "System prompt").get_by_role("textbox").fill("Be plain.")
    page.keyboard.press("Escape")
    assert fake.world.chats[chat]["settings"] == {**KEPT, "system": "Be plain."}
    fake.world.chats[chat]["settings"] = {"tools": ["calculate"]}  # by another device
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.get_by_text("Tools: calculate")).to_be_visible()


def test_what_a_chat_names_and_is_not_there_any_more_is_told_and_left_out(page: Page, fake: FakeServer) -> None:
    ask(page)
    (chat,) = fake.world.chats
    fake.world.chats[chat]["settings"] = {"model": "old", "tools": ["fly", "calculate"], "collections": [1]}
    page.reload()
    note = page.get_by_text("The model “old” is not there any more.")
    expect(note).to_contain_text("The tool “fly” is not there any more.")
    expect(note).to_contain_text("That was left out.")
    ask(page, "Then")
    assert fake.asked() == {"content": "Then", "tools": ["calculate"]}
    assert fake.world.chats[chat]["settings"] == {"tools": ["calculate"]}
    page.get_by_role("link", name="New chat").click()
    expect(reset(page)).to_have_count(0)  # what one chat had is not how others begin


def test_an_example_is_of_the_chat_that_it_begins(page: Page, fake: FakeServer) -> None:
    fake.world.offer.tools[0]["name"] = "calculator"
    try:
        page.reload()
        page.get_by_role("button", name="Tool").first.click()
        expect(page.get_by_role("article", name="Ponder")).to_contain_text("Done.")
        assert fake.asked()["tools"] == ["calculator"]
        page.reload()
        expect(page.get_by_text("Tools: calculator")).to_be_visible()
        page.get_by_role("link", name="New chat").click()
        expect(reset(page)).to_have_count(0)
    finally:
        fake.world.offer.tools[0]["name"] = "calculate"


def test_a_refusal_of_what_is_to_be_kept_is_told_at_its_place(page: Page, fake: FakeServer, watch: Watch) -> None:
    watch.expect_errors()
    ask(page)
    fake.refuse_next("settings.temperature", "settings.temperature is 0.2; accepted: 1.")
    sheet(page, "Sampling").get_by_label("Temperature").fill("0.2")
    page.keyboard.press("Escape")
    box = page.get_by_role("textbox", name="Message")
    box.fill("Again")
    box.press("Enter")
    expect(page.get_by_role("dialog").get_by_role("alert")).to_have_text("settings.temperature is 0.2; accepted: 1.")
    expect(box).to_have_value("Again")
    assert fake.questions() == ["Go on"]


def test_an_answer_says_which_model_wrote_it(page: Page, fake: FakeServer) -> None:
    ask(page)
    for _ in range(2):  # as it came, and as it is kept
        page.get_by_role("button", name="Speed and size").click()
        expect(page.get_by_role("list", name="Speed and size").get_by_text("Model: fake")).to_be_visible()
        page.reload()
    expect(control(page, "Model")).to_be_visible()
