"""Private chats on the page, with a model of another server: what is kept from it, and what is shown of what it got."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.app.remote.planted import TEXT, Planted, planted_server
from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.fake_server import FakeServer
from tests.e2e.support.real_server import RealServer, running
from tests.e2e.support.scripted_model import write_scripted

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Locator, Page, expect

from tests.e2e.support.real_pages import ask, box, reply, settled, wishes

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SETTING = '[[remote]]\nname = "big"\nurl = "{url}/v1"\nmodel = "big-1"\n'
PRIVATE = "Private: keep this chat from other servers"


@pytest.fixture(scope="module")
def planted() -> Iterator[Planted]:
    with planted_server() as planted:
        yield planted


@pytest.fixture(scope="module")
def server(planted: Planted, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("private")
    model = write_scripted(folder / "model", {"red": "The answer is red."})
    config = folder / "ponder.toml"
    config.write_text(SETTING.format(url=planted.url), "utf-8")
    with running(folder, "--model", str(model), "--dtype", "float32", "--config", str(config)) as server:
        yield server


@pytest.fixture
def page(new_page: NewPage, server: RealServer, planted: Planted) -> Page:
    planted.requests.clear()
    page = new_page()
    page.goto(server.url)
    return page


def switch(page: Page) -> Locator:
    return page.get_by_role("group", name="How to answer").get_by_role("button", name=PRIVATE)


def model(page: Page) -> Locator:
    """Returns the sheet of models, opened."""
    page.get_by_role("group", name="How to answer").get_by_role("button", name="Model").click()
    return page.get_by_role("dialog")


def chats(page: Page) -> Locator:
    return page.get_by_role("navigation", name="Chats")


def first(server: RealServer) -> dict[str, object]:
    return dict(server.http.get("/api/chats").json()["chats"][0])


def test_a_new_chat_is_private_from_its_first_message_on(page: Page, server: RealServer, planted: Planted) -> None:
    expect(switch(page)).to_have_attribute("aria-pressed", "false")
    switch(page).focus()
    page.keyboard.press("Space")
    expect(switch(page)).to_have_attribute("aria-pressed", "true")
    expect(model(page).get_by_role("radio", name="big")).to_be_disabled()
    expect(page.get_by_role("dialog")).to_contain_text("switch “Private” off first")
    page.keyboard.press("Escape")
    ask(page, "red as what?")
    settled(page)
    expect(page.get_by_text("Private: nothing of this chat is sent")).to_be_visible()
    expect(chats(page).get_by_role("listitem").filter(has_text="red as what?")).to_contain_text("Private")
    assert first(server)["private"] is True and not planted.requests
    page.reload()
    expect(switch(page)).to_have_attribute("aria-pressed", "true")
    page.get_by_role("link", name="New chat").first.click()
    expect(switch(page)).to_have_attribute("aria-pressed", "false")


def test_what_another_server_got_is_shown_with_its_answer(page: Page, server: RealServer, planted: Planted) -> None:
    model(page).get_by_role("radio", name="big").check()
    expect(page.get_by_role("dialog").get_by_role("radio")).to_have_count(2)  # the embedder is none of them
    expect(page.get_by_role("dialog")).to_contain_text("On another server, which gets the chat.")
    page.keyboard.press("Escape")
    ask(page, "red or blue?")
    for _ in range(2):  # as it comes, and as it is read again
        settled(page)
        expect(reply(page)).to_contain_text(TEXT)
        told = reply(page).get_by_text("big answered, on another server")
        told.click()
        expect(reply(page)).to_contain_text("It got 1 message of 12 characters in all, with 0 passages")
        expect(reply(page)).to_contain_text("Why: the request names it.")
        page.reload()
    assert len(planted.requests) == 1


def test_the_menu_of_a_chat_has_the_switch_too(page: Page, server: RealServer) -> None:
    ask(page, "red again?")
    settled(page)
    row = page.get_by_role("button", name="More for “red again?”")
    for pressed, kept in (("true", True), ("false", False)):
        row.click()
        item = page.get_by_role("menuitemcheckbox", name="Private")
        expect(item).to_have_attribute("aria-checked", "false" if kept else "true")
        item.click()
        expect(switch(page)).to_have_attribute("aria-pressed", pressed)
        expect(row).to_be_focused()
        assert first(server)["private"] is kept


def test_the_refusal_of_a_private_chat_is_shown_at_the_model(
    page: Page, server: RealServer, planted: Planted, watch: Watch
) -> None:
    watch.expect_errors()
    wishes(page, model="big")
    switch(page).click()
    ask(page, "red, secretly?")
    sheet = page.get_by_role("dialog")
    expect(sheet.get_by_role("alert")).to_contain_text("this is private, and 'big' is on another server")
    page.keyboard.press("Escape")
    expect(box(page)).to_have_value("red, secretly?")
    assert not planted.requests


def test_it_is_said_in_german_too(new_page: NewPage, server: RealServer) -> None:
    page = new_page(locale="de")
    page.goto(server.url)
    page.get_by_role("button", name="Privat: Chat von anderen Servern fernhalten").click()
    page.get_by_role("textbox", name="Nachricht").fill("red?")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Privat: Aus diesem Chat wird nichts")).to_be_visible()


def test_without_models_of_other_servers_there_is_no_switch(new_page: NewPage, fake: FakeServer) -> None:
    page = new_page()
    page.goto(fake.url)
    expect(page.get_by_role("button", name="System prompt")).to_be_visible()
    expect(switch(page)).to_have_count(0)
