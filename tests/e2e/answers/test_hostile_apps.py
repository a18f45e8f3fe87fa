"""Hostile MCP apps in Chromium: nothing leaves their frame, nothing runs that no person allowed, and the page stays
usable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.fake_artifacts import SHOWN, keep
from tests.e2e.support.fake_server import FakeServer
from tests.e2e.support.hostile_apps import ARTIFACTS, CLOSED, HOSTILE_APPS, app_page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Locator, Page, expect

from tests.e2e.answers.test_apps import made, opened
from tests.e2e.support.away import Away, Seen, another_server, prepared, usable

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def away() -> Iterator[Away]:
    with another_server() as server:
        yield server


@pytest.fixture
def stage(new_page: NewPage, fake: FakeServer, watch: Watch) -> Page:
    watch.expect_errors()  # what is refused is told on the console
    page = new_page()
    page.goto(fake.url)
    return page


def shown(page: Page, fake: FakeServer, away: Away, content: str, seen: Seen | None = None) -> Locator:
    keep(
        fake.world.artifacts, "other.html", app_page("await greet(); await ask('tools/call', { name: 'tick' })"), SHOWN
    )
    file = keep(fake.world.artifacts, "app.html", prepared(content, fake, away), SHOWN)
    made(page, fake, file)
    if seen is not None:
        seen.over(page, away)
    return opened(page, file)


def ended(card: Locator) -> Locator:
    """The app's document, once it has tried all."""
    inside = card.locator("iframe").content_frame.locator("html")
    expect(inside).to_have_attribute("data-done", "yes")
    return inside


@pytest.mark.parametrize("way", ARTIFACTS)
def test_an_app_gets_out_of_its_frame_no_more_than_an_artifact(
    stage: Page, fake: FakeServer, away: Away, way: str
) -> None:
    seen = Seen()
    card = shown(stage, fake, away, ARTIFACTS[way], seen)
    if way == "downloads" or way.startswith("moving itself"):  # the browser's page of errors is in its place
        expect(card.locator("iframe").content_frame.locator("#main-frame-error")).to_be_attached()
    elif way == "refreshing elsewhere":
        expect(card.get_by_role("alert")).to_have_text("The app left its page, and was closed.")
        expect(card.locator("iframe")).to_have_count(0)
    elif way == "floods of messages":
        expect(card.get_by_role("alert")).to_have_text("The app sent too many messages, and was closed.")
    else:
        inside = ended(card)
        assert inside.evaluate("() => window.leaks") == []
        assert inside.evaluate("() => origin") == "null"
    usable(stage, fake)
    assert seen.what == [] and fake.world.app_requests == []


@pytest.mark.parametrize("way", HOSTILE_APPS)
def test_no_message_of_an_app_gets_more_than_a_person_allows(
    stage: Page, fake: FakeServer, away: Away, way: str
) -> None:
    seen = Seen()
    inside = ended(shown(stage, fake, away, HOSTILE_APPS[way], seen))
    assert inside.evaluate("() => [window.leaks, window.failed ?? null]") == [[], None]
    assert stage.evaluate("[{}.polluted, [].polluted, ({}).height]") == [None, None, None]
    height = stage.locator("iframe").bounding_box()
    assert height is not None and 60 <= height["height"] <= 810
    assert not [each for each in fake.world.app_requests if "decision" in each]
    allowed = {"tools of others": None, "resources of others": None}.get(way, ("tick", "wind"))
    if allowed is not None:
        assert {each["params"].get("name") for each in fake.world.app_requests} <= set(allowed)
    assert len(fake.world.app_requests) <= 8
    assert len(fake.world.asked) == 1  # the one question that the test sent
    usable(stage, fake)
    assert seen.what == []


@pytest.mark.parametrize("way", CLOSED)
def test_an_app_that_floods_or_leaves_is_closed(stage: Page, fake: FakeServer, away: Away, way: str) -> None:
    script, told = CLOSED[way]
    seen = Seen()
    card = shown(stage, fake, away, script, seen)
    expect(card.get_by_role("alert")).to_have_text(told)
    expect(card.locator("iframe")).to_have_count(0)
    assert len(fake.world.app_requests) <= 8
    usable(stage, fake)
    assert seen.what == []


def test_a_person_who_declined_three_times_is_not_asked_again(stage: Page, fake: FakeServer, away: Away) -> None:
    asks = "void ask('ui/open-link', { url: 'https://example.org/' + i }).catch((error) => { window.last = error })"
    card = shown(stage, fake, away, app_page(f"await greet(); for (let i = 0; i < 6; i++) {asks}"))
    for number in range(3):
        expect(card.get_by_role("region")).to_have_text(f"https://example.org/{number}")
        card.get_by_role("button", name="Decline").click()
    expect(card.get_by_role("group")).to_have_count(0)
    inside = ended(card)
    assert inside.evaluate("() => window.last.code") == -32000
    usable(stage, fake)


@pytest.mark.parametrize(
    "reply",
    [
        "say({ id: data.id, error: { code: -32000, message: 'no' } })",
        "for (;;);",
        "0",
        "say({ id: data.id, method: 'x' })",
    ],
)
def test_an_app_that_refuses_to_end_is_ended(stage: Page, fake: FakeServer, away: Away, reply: str) -> None:
    card = shown(stage, fake, away, app_page(f"window.onteardown = (data) => {{ {reply} }}; await greet()"))
    ended(card)
    card.get_by_role("button", name="Close app").click()
    expect(card.locator("iframe")).to_have_count(0)
    usable(stage, fake)


def test_an_app_that_never_ends_does_not_hold_up_the_page(stage: Page, fake: FakeServer, away: Away) -> None:
    card = shown(stage, fake, away, "<!doctype html><script>for (;;);</script>")
    usable(stage, fake)
    card.get_by_role("button", name="Close app").click()
    expect(card.locator("iframe")).to_have_count(0)
