"""Hostile files in Chromium: nothing leaves their frame, nothing is fetched, and the page stays usable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.answers.test_artifacts import made, opened
from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.away import Away, Seen, another_server, prepared, usable
from tests.e2e.support.fake_artifacts import keep
from tests.e2e.support.fake_server import FakeServer
from tests.e2e.support.hostile_artifacts import HOSTILE, LEAVES, PLAIN, scripted

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def away() -> Iterator[Away]:
    with another_server() as server:
        yield server


def closed(page: Page) -> None:
    page.get_by_role("dialog").get_by_role("button", name="Close").click()


@pytest.fixture
def stage(new_page: NewPage, fake: FakeServer, watch: Watch) -> Page:
    watch.expect_errors()  # what is refused is told on the console
    page = new_page()
    page.goto(fake.url)
    return page


@pytest.mark.parametrize("way", HOSTILE)
def test_nothing_gets_out_of_the_frame(stage: Page, fake: FakeServer, away: Away, way: str) -> None:
    seen = Seen()
    name, content = HOSTILE[way]
    file = keep(fake.world.artifacts, name, prepared(content, fake, away))
    made(stage, fake, file)
    seen.over(stage, away)
    panel = opened(stage, file)
    if way in LEAVES:  # the browser's page of errors is in its place
        expect(panel.locator("iframe").content_frame.locator("#main-frame-error")).to_be_attached()
    elif file.name.endswith(".svg"):
        stage.wait_for_load_state("networkidle")
    else:
        inside = panel.locator("iframe").content_frame.locator("html")
        expect(inside).to_have_attribute("data-done", "yes")
        assert inside.evaluate("() => window.leaks") == []
        assert inside.evaluate("() => origin") == "null"
    closed(stage)
    usable(stage, fake)
    assert seen.what == []


@pytest.mark.parametrize("kind", PLAIN)
def test_what_is_no_document_is_never_one(stage: Page, fake: FakeServer, away: Away, kind: str) -> None:
    name, content = PLAIN[kind]
    file = keep(fake.world.artifacts, name, prepared(content, fake, away))
    made(stage, fake, file)
    panel = opened(stage, file)
    expect(panel).to_contain_text("<" if file.media_type.startswith("text/") else "no preview")
    assert panel.locator("iframe, img, script").count() == 0
    closed(stage)
    usable(stage, fake)


def test_a_page_opened_by_its_address_runs_nothing_and_has_no_origin(stage: Page, fake: FakeServer, away: Away) -> None:
    script = "document.title = 'ran'; location = 'AWAY/out'"
    file = keep(fake.world.artifacts, "a.html", prepared(scripted(script, "<p>words</p>"), fake, away))
    stage.goto(f"{fake.url}/api/artifacts/{file.id}/preview")
    expect(stage.get_by_text("words")).to_be_visible()
    assert stage.title() == "" and stage.evaluate("origin") == "null"
    assert stage.url.startswith(fake.url)


def test_no_other_page_frames_a_preview(new_page: NewPage, fake: FakeServer, watch: Watch) -> None:
    watch.expect_errors()
    file = keep(fake.world.artifacts, "a.html", "<p>words</p>")
    page = new_page()
    other = fake.url.replace("127.0.0.1", "localhost")  # another origin
    page.route(
        "**/other.html",
        lambda route: route.fulfill(
            content_type="text/html", body=f"<iframe src='{fake.url}/api/artifacts/{file.id}/preview'></iframe>"
        ),
    )
    page.goto(f"{other}/other.html")
    expect(page.locator("iframe").content_frame.get_by_text("words")).to_have_count(0)
    watch.hosts.discard(other.partition("//")[2])


def test_a_page_that_never_ends_does_not_hold_up_ours(stage: Page, fake: FakeServer) -> None:
    file = keep(fake.world.artifacts, "a.html", "<!doctype html><script>for (;;);</script>")
    made(stage, fake, file)
    opened(stage, file)
    closed(stage)
    usable(stage, fake)
