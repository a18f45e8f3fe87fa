"""Assistants and prompts on the page: written, begun with, shared, taken along; and prompts by `/` in the composer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.fake_server import FakeServer

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Locator, Page, expect

from tests.e2e.test_asking import ask, choose, control, fake, reset, sheet

__all__ = ["fake"]  # the fixture: a server with something of everything

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PIRATE: dict[str, Any] = {
    "name": "Pirate", "icon": "🏴‍☠️", "description": "Speaks like one.",
    "settings": {"system": "Arr.", "temperature": 0.5},
}  # fmt: skip
TEXT = "Put {{text}} into {{language}}, please."


def button(page: Page | Locator, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def to_presets(page: Page) -> None:
    page.get_by_role("link", name="Assistants", exact=True).click()
    expect(page.get_by_role("heading", name="Assistants and prompts")).to_be_focused()


def message(page: Page) -> Locator:
    return page.locator("#message")


def test_an_assistant_is_written_and_a_chat_begun_with_it(page: Page, fake: FakeServer) -> None:
    to_presets(page)
    expect(page.get_by_text("No assistants yet.")).to_be_visible()
    button(page, "New assistant").click()
    form = page.get_by_role("form", name="New assistant")
    expect(form.get_by_label("Name", exact=True)).to_be_focused()
    form.get_by_label("Name", exact=True).fill("Pirate")
    form.get_by_label("Icon").fill("🏴‍☠️")
    form.get_by_label("Description").fill("Speaks like one.")
    choose(page, "Model", "plain")
    sheet(page, "System prompt").get_by_role("textbox").fill("Arr.")
    page.keyboard.press("Escape")
    button(form, "Save").click()
    expect(page.get_by_role("heading", name="Pirate")).to_be_visible()
    (kept,) = fake.world.shelf.presets.values()
    wanted = {"name": "Pirate", "icon": "🏴‍☠️", "description": "Speaks like one."}
    assert {name: kept[name] for name in wanted} == wanted
    assert kept["settings"] == {"model": "plain", "system": "Arr."}
    button(page, "New chat with “Pirate”").click()
    ask(page)
    assert fake.asked() == {"content": "Go on", "model": "plain", "system": "Arr."}
    page.get_by_role("link", name="New chat").click()
    expect(reset(page)).to_have_count(0)  # an assistant's settings are its chats' alone
    ask(page, "Without")
    assert [each.get("preset_id") for each in fake.world.chats.values()] == [kept["id"], None]


def test_the_first_screen_offers_assistants_of_which_one_is_picked(page: Page, fake: FakeServer) -> None:
    fake.world.shelf.add("presets", **PIRATE)
    fake.world.shelf.add("presets", name="Editor", settings={"tools": ["calculate", "gone"]})
    page.reload()
    picks = page.get_by_role("group", name="Begin with an assistant")
    pirate, editor = button(picks, "Pirate"), button(picks, "Editor")
    pirate.click()
    expect(pirate).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_text("System prompt: “Arr.” · Temperature 0.5")).to_be_visible()
    expect(message(page)).to_be_focused()
    editor.click()
    expect(pirate).to_have_attribute("aria-pressed", "false")
    expect(page.get_by_text("The tool “gone” is not there any more.")).to_be_visible()
    editor.click()
    expect(reset(page)).to_have_count(0)  # a second press takes it back
    pirate.click()
    choose(page, "Model", "plain")
    expect(pirate).to_have_attribute("aria-pressed", "false")  # that is something else by now
    ask(page)
    assert fake.asked() == {"content": "Go on", "model": "plain", **PIRATE["settings"]}
    begun = fake.world.chats["chat1"]
    assert begun["settings"] == {"model": "plain", **PIRATE["settings"]}
    assert begun["preset_id"] == next(iter(fake.world.shelf.presets))
    expect(picks).to_have_count(0)


def test_an_assistant_is_changed_deleted_and_brought_back(page: Page, fake: FakeServer, watch: Watch) -> None:
    watch.expect_errors()
    fake.world.shelf.add("presets", **PIRATE)
    to_presets(page)
    button(page, "Edit “Pirate”").click()
    form = page.get_by_role("form", name="Edit “Pirate”")
    form.get_by_label("Name", exact=True).fill("Captain")
    why = "settings.temperature is 0.5; accepted: less."
    fake.world.shelf.refusal = {"message": why, "type": "", "param": "settings.temperature", "code": "invalid_value"}
    button(form, "Save").click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_have_text(why)
    page.keyboard.press("Escape")
    fake.world.shelf.refusal = {"message": "Taken.", "type": "", "param": "name", "code": "name_taken"}
    button(form, "Save").click()
    expect(form.get_by_role("alert")).to_have_text("Taken.")
    button(form, "Save").click()
    expect(page.get_by_role("heading", name="Captain")).to_be_visible()
    button(page, "Delete “Captain”").click()
    expect(page.get_by_text("No assistants yet.")).to_be_visible()
    button(page, "Undo").click()
    expect(page.get_by_role("heading", name="Captain")).to_be_visible()
    (kept,) = fake.world.shelf.presets.values()
    assert (kept["name"], kept["settings"]) == ("Captain", PIRATE["settings"])


def test_an_assistant_is_shared_and_anothers_is_copied_or_left(page: Page, fake: FakeServer) -> None:
    shelf = fake.world.shelf
    own = shelf.add("presets", **PIRATE)
    other = shelf.add("presets", name="Bob's", owner="bob", role="reader", members=["local"])
    to_presets(page)
    button(page, "Share “Pirate”").click()
    dialog = page.get_by_role("dialog", name="Who may use “Pirate”")
    dialog.get_by_role("textbox", name="User").fill("carol")
    button(dialog, "Share").click()
    expect(button(dialog, "Take it back from carol")).to_be_visible()
    assert shelf.presets[own]["members"] == ["carol"]
    dialog.get_by_label("Everybody on this server").check()
    page.keyboard.press("Escape")
    expect(page.get_by_text("for everybody, shared with 1 user")).to_be_visible()
    expect(page.get_by_text("by bob")).to_be_visible()
    expect(button(page, "Edit “Bob's”")).to_have_count(0)
    button(page, "Copy “Bob's” to make it your own").click()
    button(page, "Save").click()
    expect(page.get_by_role("heading", name="Bob's")).to_have_count(2)
    button(page, "Leave “Bob's”").click()
    expect(button(page, "Leave “Bob's”")).to_be_visible()  # the fake shows it all the same
    assert shelf.presets[other]["members"] == []


def test_a_file_takes_both_along(page: Page, fake: FakeServer, tmp_path: Path) -> None:
    to_presets(page)
    file = tmp_path / "presets.json"
    file.write_text(json.dumps({"presets": [PIRATE], "prompts": [{"name": "sum", "text": TEXT}]}), "utf-8")
    with page.expect_file_chooser() as chooser:
        button(page, "Import a file").click()
    chooser.value.set_files(file)
    expect(page.get_by_text("Imported: 1 assistants, 1 prompts.")).to_be_visible()
    expect(page.get_by_role("heading", name="/sum")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("link", name="Save as a file").click()
    assert [each["name"] for each in json.loads(download.value.path().read_text("utf-8"))["presets"]] == ["Pirate"]


def test_a_prompt_is_written_and_found_by_its_name(page: Page, fake: FakeServer) -> None:
    to_presets(page)
    button(page, "New prompt").click()
    page.get_by_label("Short name, without spaces").fill("translate")
    page.get_by_label("Text", exact=True).fill(TEXT)
    button(page, "Save").click()
    expect(page.get_by_role("heading", name="/translate")).to_be_visible()
    page.get_by_role("link", name="New chat").click()
    message(page).press_sequentially("/tr")
    page.get_by_role("option", name="/translate").click()
    expect(message(page)).to_have_value(TEXT)
    expect(message(page)).to_be_focused()


def selected(page: Page) -> str:
    read = "box => box.value.slice(box.selectionStart, box.selectionEnd)"
    return str(message(page).evaluate(read))


def test_prompts_are_chosen_and_filled_in_by_keyboard(page: Page, fake: FakeServer) -> None:
    for name, text in (("sum", "Sum up."), ("translate", TEXT), ("tidy", "Tidy up.")):
        fake.world.shelf.add("prompts", name=name, text=text)
    box = message(page)
    box.focus()
    page.keyboard.type("/")
    options = page.get_by_role("listbox", name="Prompts").get_by_role("option")
    expect(options).to_have_count(3)
    expect(box).to_have_attribute("aria-controls", str(page.get_by_role("listbox").get_attribute("id")))
    page.keyboard.type("t")
    expect(options).to_have_count(2)
    expect(page.get_by_text("2 prompts", exact=True)).to_be_attached()  # what a screen reader says
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")  # round
    page.keyboard.press("ArrowUp")
    expect(options.nth(1)).to_have_attribute("aria-selected", "true")
    expect(box).to_have_attribute("aria-activedescendant", str(options.nth(1).get_attribute("id")))
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    expect(box).to_have_value(TEXT)
    expect(box).to_be_focused()
    expect(box).not_to_have_attribute("aria-activedescendant", re.compile("."))
    assert selected(page) == "{{text}}"
    page.keyboard.type("this")
    page.keyboard.press("Tab")
    assert selected(page) == "{{language}}"
    page.keyboard.type("German")
    expect(box).to_have_value("Put this into German, please.")
    page.keyboard.press("Tab")
    expect(button(page, "Send")).to_be_focused()  # all places are filled in: Tab goes on
    page.keyboard.press("Enter")
    expect(page.get_by_role("article", name="Ponder")).to_contain_text("Done.")
    assert fake.questions() == ["Put this into German, please."]


def test_what_begins_with_a_slash_and_is_no_prompt_is_sent_as_typed(page: Page, fake: FakeServer) -> None:
    fake.world.shelf.add("prompts", name="sum", text="Sum up.")
    ask(page, "/nothing")
    box = message(page)
    box.press_sequentially("/su")
    expect(page.get_by_role("option")).to_have_count(1)
    box.press("Escape")
    expect(page.get_by_role("option")).to_have_count(0)
    box.press("Enter")
    expect(page.get_by_role("article", name="Ponder")).to_have_count(2)
    expect(page.get_by_role("article", name="Ponder").last).to_contain_text("Done.")
    box.press_sequentially("/sum it")
    expect(page.get_by_role("option")).to_have_count(0)
    box.press("Enter")
    expect(page.get_by_role("article", name="Ponder")).to_have_count(3)
    expect(page.get_by_role("article", name="Ponder").last).to_contain_text("Done.")
    assert fake.questions() == ["/nothing", "/su", "/sum it"]


def test_on_a_phone_nothing_is_wider_than_the_screen(fake: FakeServer, new_page: NewPage) -> None:
    for number in range(9):
        fake.world.shelf.add("presets", **{**PIRATE, "name": f"A pirate with a long name {number}"})
    fake.world.shelf.add("prompts", name="x" * 60, text="words " * 99)
    page = new_page(viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    page.goto(fake.url)
    expect(page.get_by_role("group", name="Begin with an assistant").get_by_role("button")).to_have_count(8)
    expect(message(page)).to_be_in_viewport()
    message(page).fill("/")
    expect(page.get_by_role("option")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.goto(f"{fake.url}/presets")
    expect(page.get_by_role("heading", name="A pirate with a long name 8")).to_be_attached()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.get_by_role("button", name="Edit “A pirate").first.click()
    expect(control(page, "Sampling")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
