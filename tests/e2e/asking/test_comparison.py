"""One question, answered by several side by side on the real server: each is watched, stopped and chosen by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.real_server import RealServer, running
from tests.e2e.support.scripted_model import write_scripted

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Locator, Page, Route, expect

from tests.e2e.support.real_pages import ask, box, settled, shown

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TEXTS = {"red": "The answer is red.", "long": "One two three four five six seven eight nine ten eleven twelve."}


@pytest.fixture(scope="module")
def comparing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("comparison")
    model = write_scripted(folder / "model", TEXTS)
    with running(folder, "--model", str(model), "--dtype", "float32") as server:
        yield server


@pytest.fixture
def server(comparing: RealServer) -> Iterator[RealServer]:
    yield comparing
    comparing.as_new()


@pytest.fixture
def page(new_page: NewPage, server: RealServer) -> Page:
    page = new_page()
    page.goto(server.url)
    return page


def column(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=re.compile(rf"^Answer \d: {name}$"))


def choose_ways(page: Page, *strategies: str) -> None:
    """Sets that the next question is asked with each of the strategies, by the keyboard alone."""
    control = page.get_by_role("group", name="How to answer").get_by_role("button", name="Compare")
    control.focus()
    page.keyboard.press("Enter")
    several = page.get_by_role("checkbox", name="Ask the next question of several")
    expect(several).to_be_focused()
    page.keyboard.press("Space")
    for _ in strategies[2:]:
        page.get_by_role("button", name="One more").press("Enter")
    for place, strategy in enumerate(strategies, start=1):
        page.get_by_role("group", name=f"Answer {place}", exact=True).get_by_label("Strategy").select_option(strategy)
    page.keyboard.press("Escape")
    expect(control).to_have_accessible_name(f"Compare: {len(strategies)}")


FACTS = re.compile(r"^\d+\.\d s · \d+ tokens$")


def test_two_answers_are_made_side_by_side_and_one_is_gone_on_with(page: Page, server: RealServer) -> None:
    choose_ways(page, "", "beam")
    ask(page, "red please")
    for name in ("model", "model, Beam"):
        expect(column(page, name)).to_contain_text(TEXTS["red"])
        expect(column(page, name).locator("header p")).to_have_text(FACTS)
    ask(page, "blue please")
    expect(page.get_by_text("Choose the one to go on with first")).to_be_visible()
    expect(box(page)).to_have_value("blue please")
    page.reload()  # they are to be chosen from still, and named by their logs
    expect(column(page, "model, Beam").locator("header p")).to_have_text(FACTS)
    expect(column(page, "model").locator("header p")).to_have_text(FACTS)
    page.get_by_role("button", name="Go on with this one: model, Beam", exact=True).press("Enter")
    expect(column(page, "model")).to_have_count(0)
    expect(page.get_by_role("group", name="Version 2 of 2 of this answer")).to_be_visible()
    expect(box(page)).to_be_focused()
    expect(page.get_by_role("button", name="Strategy: Beam")).to_be_visible()  # it goes on as it was made
    box(page).press("Enter")
    settled(page)
    chat = page.url.rpartition("/")[2]
    messages = server.http.get(f"/api/chats/{chat}").json()["messages"]
    assert len(messages) == 4 and messages[1]["siblings"][1] == messages[1]["id"]
    page.get_by_role("button", name="Earlier version").click()
    expect(page.get_by_role("article", name="Ponder")).to_have_count(1)
    page.get_by_role("button", name="Side by side").click()  # and back again
    expect(page.get_by_role("button", name=re.compile("Go on with this one"))).to_have_count(2)


def test_each_of_three_is_stopped_by_itself_and_a_reload_loses_nothing(page: Page, server: RealServer) -> None:
    server.turn(step_s=0.5)
    choose_ways(page, "", "best_of_n", "")
    ask(page, "long please")
    stops = page.get_by_role("button", name=re.compile("^Stop model"))
    expect(stops).to_have_count(3)
    expect(page.locator("article.answer[id]")).to_have_count(3)  # all were begun
    column(page, "model").first.get_by_role("button", name="Stop").click()
    expect(stops).to_have_count(2)
    page.reload()
    expect(page.get_by_role("button", name=re.compile("Go on with this one"))).to_have_count(3)
    expect(stops).to_have_count(2)
    server.turn()
    expect(stops).to_have_count(0)
    expect(page.get_by_text(TEXTS["long"])).to_have_count(2)
    expect(page.get_by_text("You stopped this answer.")).to_have_count(1)


def test_escape_stops_all_and_another_device_sees_them_while_they_run(
    page: Page, new_page: NewPage, server: RealServer
) -> None:
    server.turn(hold=True)
    choose_ways(page, "", "beam")
    ask(page, "long please")
    stops = re.compile("^Stop ")
    expect(page.get_by_role("button", name=stops)).to_have_count(2)
    other = new_page()
    other.goto(page.url)
    expect(other.get_by_role("button", name=re.compile("Go on with"))).to_have_count(2)
    box(page).press("Escape")
    server.turn()
    expect(page.get_by_role("button", name=stops)).to_have_count(0)
    expect(other.get_by_role("button", name=stops)).to_have_count(0)


def test_what_the_server_refuses_of_one_is_told_in_its_place(page: Page, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()

    def refuse(route: Route) -> None:
        if "compare" not in (route.request.post_data_json or {}):
            return route.fallback()
        error = {"message": "No beams today.", "type": "invalid_request_error", "param": "strategy", "code": "no"}
        return route.fulfill(status=400, json={"error": error})

    page.route("**/api/chats/*/runs", refuse)
    choose_ways(page, "", "beam")
    ask(page, "red please")
    expect(column(page, "model, Beam")).to_contain_text("No beams today.")
    expect(column(page, "model")).to_contain_text(TEXTS["red"])
    page.get_by_role("button", name=re.compile("Go on with this one")).click()  # there is one
    settled(page)
    assert shown(page) == TEXTS["red"]


def test_on_a_phone_one_is_seen_at_a_time_and_the_next_is_gone_to(new_page: NewPage, server: RealServer) -> None:
    page = new_page(viewport={"width": 360, "height": 720}, locale="de-DE", has_touch=True)
    page.goto(server.url)
    page.get_by_role("button", name="Vergleichen").click()
    page.get_by_role("checkbox", name="Die nächste Frage mehreren stellen").check()
    page.keyboard.press("Escape")
    page.get_by_role("textbox", name="Nachricht").fill("red please")
    page.get_by_role("button", name="Senden").click()
    choices = page.get_by_role("button", name=re.compile("Mit dieser weiter"))
    expect(choices).to_have_count(2)
    tabs = page.get_by_role("group", name="Antworten, nebeneinander").get_by_role("button")
    expect(tabs.first).to_have_attribute("aria-pressed", "true")
    expect(choices.last).not_to_be_in_viewport()
    tabs.last.click()
    expect(choices.last).to_be_in_viewport()
    expect(choices.first).not_to_be_in_viewport()
    expect(tabs.last).to_have_attribute("aria-pressed", "true")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
