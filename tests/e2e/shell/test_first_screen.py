"""The first screen: what the model is, and that nothing of it moves while it loads."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.support.fake_server import ABOUT, STARTERS, FakeServer, answer
from tests.e2e.test_page import box, from_end, questions, reply

if TYPE_CHECKING:
    from tests.e2e.conftest import NewPage

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, Route, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]


class Held:
    """Requests of a page that wait until they are let through, as on a slow network."""

    def __init__(self, page: Page, pattern: str) -> None:
        self.page, self.routes, self.through = page, list[Route](), False
        page.route(pattern, self._take)

    def _take(self, route: Route) -> None:
        if self.through:
            route.continue_()
        else:
            self.routes.append(route)

    def let_through(self) -> None:
        """These and all later ones, once there is one: the program is asked for after the first paint."""
        while not self.routes:
            self.page.wait_for_timeout(20)
        self.through = True
        for route in self.routes:
            route.continue_()


def test_first_screen_says_what_the_model_is_and_a_starter_begins(page: Page, fake: FakeServer) -> None:
    fake.play(answer("Because."))
    expect(page.get_by_text(ABOUT)).to_be_visible()
    expect(page.get_by_text("4,096 tokens of context")).to_be_visible()
    expect(box(page)).to_be_focused()
    page.get_by_role("button", name=STARTERS[0], exact=True).click()
    expect(questions(page)).to_have_text(STARTERS[0])
    expect(reply(page)).to_contain_text("Because.")
    expect(box(page)).to_be_focused()


@pytest.mark.parametrize("late", [False, True], ids=["", "faces late"])
def test_the_first_screen_is_shown_from_its_beginning_and_stays_in_place(
    new_page: NewPage, fake: FakeServer, late: bool
) -> None:
    page = new_page(viewport={"width": 360, "height": 400}, is_mobile=True, has_touch=True)
    page.add_init_script(
        """window.shift = 0
        new PerformanceObserver((list) => list.getEntries().forEach((each) => (window.shift += each.value))).observe(
            { type: "layout-shift", buffered: true })"""
    )
    held = list[Route]()
    if late:
        page.route("**/*.woff2", lambda route: held.append(route))
    page.goto(fake.url, wait_until="commit")
    expect(page.get_by_role("button", name=STARTERS[-1])).to_be_attached()
    expect(page.get_by_role("group", name="How to answer")).to_be_visible()
    for route in held:
        route.continue_()
    page.wait_for_load_state("load")
    page.evaluate("document.fonts.ready")
    assert len(held) >= 2 * late
    expect(page.get_by_role("heading", level=1)).to_be_in_viewport()
    assert from_end(page) > 0  # there is more than fits
    assert page.evaluate("[scrollY, window.shift <= 0.05]") == [0, True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"viewport": {"width": 360, "height": 640}, "is_mobile": True}, "Ask, and watch it think."),
        ({"viewport": {"width": 1280, "height": 800}, "locale": "de-DE"}, "Frag, und sieh beim Denken zu."),
    ],
    ids=["phone", "desktop, German"],
)
def test_the_first_screen_is_painted_before_its_program_is_there(
    new_page: NewPage, fake: FakeServer, options: dict[str, Any], words: str
) -> None:
    page = new_page(**options)
    held = Held(page, "**/assets/*.js")
    Page.goto(page, fake.url, wait_until="commit")  # ours waits for the program
    headline, about = page.get_by_role("heading", level=1, name=words, exact=True), page.get_by_text(ABOUT)
    expect(headline).to_be_visible()
    expect(about).to_be_visible()
    places = headline.bounding_box(), about.bounding_box()
    held.let_through()
    expect(page.get_by_role("button", name=STARTERS[-1])).to_be_attached()
    assert (headline.bounding_box(), about.bounding_box()) == places
    page.route("**/assets/*.js", lambda route: None)
    Page.goto(page, f"{fake.url}/c/another", wait_until="commit")
    expect(page.get_by_text(words)).to_be_attached()
    expect(page.get_by_text(words)).to_be_hidden()


@pytest.mark.parametrize("options", [{}, {"is_mobile": True, "has_touch": True}], ids=["desktop", "phone"])
def test_words_written_before_the_program_is_there_go_on_in_the_composer(
    new_page: NewPage, fake: FakeServer, options: dict[str, Any]
) -> None:
    page = new_page(**options)
    page.goto(fake.url)
    box(page).fill("kept from before")
    page.goto(fake.url)
    expect(box(page)).to_have_value("kept from before")
    held = Held(page, "**/assets/*.js")
    Page.goto(page, fake.url, wait_until="commit")
    early = page.locator(".prerendered").get_by_role("textbox", name="Message", exact=True)
    if options:
        early.tap()
    else:
        expect(early).to_be_focused()
    place = early.bounding_box()
    page.keyboard.type("Why s")
    page.keyboard.press("ArrowLeft")
    held.let_through()
    expect(page.locator(".prerendered")).to_have_count(0)
    expect(box(page)).to_be_focused()
    expect(box(page)).to_have_value("kept from before\n\nWhy s")
    page.keyboard.type("not ")
    expect(box(page)).to_have_value("kept from before\n\nWhy not s")
    assert place is not None
    box(page).fill("")
    form = page.locator("form", has=box(page)).bounding_box()
    assert form is not None and abs(form["y"] - place["y"]) < 1 and form["height"] == place["height"]


def test_what_is_sent_before_the_program_is_there_is_asked_once(new_page: NewPage, fake: FakeServer) -> None:
    fake.play(answer("Because."))
    page = new_page()
    held = Held(page, "**/assets/*.js")
    Page.goto(page, fake.url, wait_until="commit")
    expect(page.locator(".prerendered").get_by_role("textbox", name="Message", exact=True)).to_be_focused()
    page.keyboard.type("Why?")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Say it.")
    page.keyboard.press("Enter")
    held.let_through()
    expect(reply(page)).to_contain_text("Because.")
    expect(questions(page)).to_have_text("Why?\nSay it.")
    expect(box(page)).to_have_value("")
    expect(box(page)).to_be_focused()
    assert len(fake.world.asked) == 1


def test_what_shows_answers_is_fetched_once_the_first_screen_is_usable(new_page: NewPage, fake: FakeServer) -> None:
    page, asked = new_page(), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    held = Held(page, "**/api/collections")
    page.goto(fake.url)
    expect(page.get_by_role("button", name=STARTERS[-1])).to_be_visible()
    page.wait_for_timeout(500)  # idle
    assert not [url for url in asked if "/Message-" in url or "/markdown-" in url]
    with page.expect_request("**/assets/Message-*.js"):
        held.let_through()
    expect(page.get_by_role("group", name="How to answer")).to_be_visible()


@pytest.mark.parametrize("begin", ["starter", "words"])
def test_a_question_is_shown_at_once_though_what_shows_answers_is_still_on_its_way(
    new_page: NewPage, fake: FakeServer, begin: str
) -> None:
    fake.play(answer("Because."))
    page = new_page()
    held = Held(page, "**/assets/Message-*.js")
    page.route("**/api/collections", lambda route: None)  # the page is still loading
    page.goto(fake.url)
    question = STARTERS[0]
    if begin == "starter":
        page.get_by_role("button", name=question, exact=True).click()
    else:
        box(page).fill(question)
        box(page).press("Enter")
    expect(questions(page)).to_have_text(question)
    expect(reply(page)).to_contain_text("Thinking")
    expect(page).to_have_url(re.compile("/c/"))
    expect(page.locator(".heard[aria-live]")).to_contain_text("Because.")  # it is there, and was announced
    expect(questions(page)).to_have_text(question)
    expect(reply(page)).to_have_attribute("aria-busy", "true")
    held.let_through()
    expect(reply(page)).to_contain_text("Because.")
    expect(page.get_by_role("article")).to_have_count(2)


def test_the_program_is_asked_for_after_the_first_paint(new_page: NewPage, fake: FakeServer) -> None:
    page = new_page()
    page.goto(fake.url)
    expect(page.get_by_role("button", name=STARTERS[-1])).to_be_visible()
    painted, asked = page.evaluate(
        """[performance.getEntriesByName("first-contentful-paint")[0].startTime,
            performance.getEntriesByType("resource").find(({ name }) => name.endsWith(".js")).startTime]"""
    )
    assert asked > min(painted, 1000)  # ms; a page that is not painted by then begins all the same


def test_words_written_before_it_is_known_who_writes_stay(new_page: NewPage, fake: FakeServer) -> None:
    page = new_page()
    told = {"auth": "keys", "user": {"id": "alice", "name": "Alice", "role": "user"}}
    held = list[Route]()
    page.route("**/api/session", lambda route: held.append(route))
    page.goto(fake.url)
    box(page).fill("Why?")
    while not held:
        page.wait_for_timeout(20)
    held[0].fulfill(json=told)
    expect(page.get_by_role("button", name="Sign out (Alice)")).to_be_visible()
    expect(box(page)).to_have_value("Why?")
    page.unroute("**/api/session")
    page.route("**/api/session", lambda route: route.fulfill(json=told))
    page.goto(fake.url)
    expect(box(page)).to_have_value("Why?")
