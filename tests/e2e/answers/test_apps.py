"""MCP apps on the page: opened in a frame, given what they show, and answered as far as the person allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.runs.events import ToolArtifact
from tests.e2e.answers.answer_page import ENDED, ask, card
from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.fake_artifacts import SHOWN, keep, with_files
from tests.e2e.support.fake_server import FakeServer
from tests.e2e.support.hostile_apps import app_page
from tests.e2e.support.told import call

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Locator, Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]

GREETS = app_page("window.said = await greet(); window.ask = ask")


@pytest.fixture
def forgiving(watch: Watch) -> None:
    watch.expect_errors()  # what is refused is told on the console


def made(page: Page, fake: FakeServer, file: ToolArtifact, text: str = "12:00 in Ulm") -> None:
    fake.play([call("clock", '{"zone": "Ulm"}'), with_files("clock", text, file)], ENDED)
    ask(page)
    expect(page.get_by_role("region", name=f"App {file.name}")).to_be_visible()


def opened(page: Page, file: ToolArtifact) -> Locator:
    region = page.get_by_role("region", name=f"App {file.name}")
    region.get_by_role("button", name="Open app").click()
    ended = region.get_by_role("alert")  # one that leaves at once is closed before it is seen
    expect(region.get_by_role("button", name="Close app").or_(ended)).to_be_visible()
    return region


def shown(page: Page, fake: FakeServer, content: str = GREETS, **view: Any) -> tuple[Locator, Locator]:
    """An open app: its card, and its document once it has greeted."""
    file = keep(fake.world.artifacts, "app.html", content, replace(SHOWN, **view))
    made(page, fake, file)
    region = opened(page, file)
    inside = region.locator("iframe").content_frame.locator("html")
    expect(inside).to_have_attribute("data-done", "yes")
    return region, inside


def asks(inside: Locator, method: str, params: dict[str, Any]) -> None:
    """Sends a request; `window.got` is what comes of it."""
    script = (
        "(html, [method, params]) => { window.got = null; window.ask(method, params).then((y) => { window.got = y },"
    )
    inside.evaluate(f"{script} (n) => {{ window.got = n }}) }}", [method, params])


def got(inside: Locator) -> Any:
    inside.page.wait_for_timeout(0)
    for _ in range(300):
        if (value := inside.evaluate("() => window.got")) is not None:
            return value
        inside.page.wait_for_timeout(50)
    raise AssertionError("the app got no answer")


def test_an_app_is_opened_by_the_person_and_given_what_it_shows(page: Page, fake: FakeServer) -> None:
    region, inside = shown(page, fake)
    frame = region.locator("iframe")
    assert frame.get_attribute("sandbox") == "allow-scripts"
    said = inside.evaluate("() => window.said")
    assert said["protocolVersion"] == "2026-01-26" and said["hostInfo"]["name"] == "ponder"
    context = said["hostContext"]
    assert (context["theme"], context["locale"], context["displayMode"]) == ("light", "en", "inline")
    assert context["containerDimensions"]["width"] > 200 and context["containerDimensions"]["maxHeight"] == 800
    expect(inside).to_have_attribute("data-done", "yes")
    page.wait_for_function("() => true")
    heard = inside.evaluate("() => window.heard.filter((each) => each.method)")
    assert [(each["method"], each["params"]) for each in heard] == [
        ("ui/notifications/tool-input", {"arguments": {"zone": "Ulm"}}),
        ("ui/notifications/tool-result", SHOWN.result),
    ]
    whole = card(page, "clock")
    whole.get_by_role("button", name="clock").first.click()
    expect(whole.get_by_role("region", name="Result")).to_have_text("12:00 in Ulm")  # the text is there all the same


def test_nothing_is_opened_by_itself_and_a_closed_app_is_told_first(page: Page, fake: FakeServer) -> None:
    file = keep(fake.world.artifacts, "app.html", app_page(
        "window.onteardown = (data) => { document.title = data.params.reason; say({ id: data.id, result: {} }) };"
        "await greet()"
    ), SHOWN)  # fmt: skip
    made(page, fake, file)
    expect(page.locator("iframe")).to_have_count(0)
    region = opened(page, file)
    expect(region.locator("iframe").content_frame.locator("html")).to_have_attribute("data-done", "yes")
    button = region.get_by_role("button", name="Close app")
    button.press("Enter")
    expect(region.locator("iframe")).to_have_count(0)
    expect(region.get_by_role("button", name="Open app")).to_be_focused()
    page.keyboard.press("Enter")
    expect(region.locator("iframe")).to_be_visible()


def test_an_app_is_there_after_a_reload(page: Page, fake: FakeServer) -> None:
    shown(page, fake)
    page.reload()
    region = page.get_by_role("region", name="App app.html")
    region.get_by_role("button", name="Open app").click()
    inside = region.locator("iframe").content_frame.locator("html")
    expect(inside).to_have_attribute("data-done", "yes")
    assert inside.evaluate("() => window.heard.at(-1).params") == SHOWN.result


def test_a_call_that_only_reads_runs_and_is_seen(page: Page, fake: FakeServer) -> None:
    region, inside = shown(page, fake)
    asks(inside, "tools/call", {"name": "tick", "arguments": {"loud": True}})
    assert got(inside)["content"] == [{"type": "text", "text": "tock"}]
    expect(region.get_by_role("list", name="Requests of app.html to its server").get_by_role("listitem")).to_have_text(
        ['tick {"loud":true} answered']
    )
    asks(inside, "resources/read", {"uri": "clock://zones"})
    assert got(inside)["contents"][0]["text"] == "Bonn, Ulm"
    asks(inside, "tools/call", {"name": "alarm"})
    assert got(inside)["code"] == -32602
    expect(region.get_by_role("listitem").last).to_have_text("alarm refused or failed")
    assert fake.world.app_requests[0] == {
        "method": "tools/call", "params": {"name": "tick", "arguments": {"loud": True}}
    }  # fmt: skip


@pytest.mark.parametrize(("button", "decision"), [("Allow once", "once"), ("Deny", "no")])
def test_a_call_that_asks_waits_for_the_person(page: Page, fake: FakeServer, button: str, decision: str) -> None:
    region, inside = shown(page, fake)
    asks(inside, "tools/call", {"name": "wind", "arguments": {"turns": 3}})
    asked = region.get_by_role("group", name="App app.html asks")
    expect(asked.get_by_role("region", name="What would be done, exactly")).to_have_text('wind({"turns": 3})')
    assert inside.evaluate("() => window.got") is None and len(fake.world.app_requests) == 1
    asked.get_by_role("button", name=button, exact=True).click()
    said = got(inside)
    assert said.get("content") == ([{"type": "text", "text": "wound"}] if decision == "once" else None)
    assert fake.world.app_requests[1] == {
        "method": "tools/call", "params": {"name": "wind", "arguments": {"turns": 3}}, "decision": decision,
        "arguments_hash": "0" * 64,
    }  # fmt: skip
    expect(region).to_be_focused()


def test_a_message_comes_into_the_box_and_is_not_sent(page: Page, fake: FakeServer) -> None:
    region, inside = shown(page, fake)
    box = page.get_by_role("textbox", name="Message")
    box.fill("mine")
    for content in ({"type": "text", "text": "Ring at 7?"}, [{"type": "text", "text": "Or at 8?"}]):
        asks(inside, "ui/message", {"role": "user", "content": content})
        expect(region.get_by_role("group").get_by_role("region")).to_contain_text("?")
        region.get_by_role("button", name="Put them there").click()
        assert got(inside) == {}
    expect(box).to_have_value("Or at 8?\n\nRing at 7?\n\nmine")
    expect(box).to_be_focused()
    assert len(fake.world.asked) == 1
    asks(inside, "ui/message", {"role": "user", "content": {"type": "text", "text": "Never"}})
    region.get_by_role("button", name="Decline").click()
    assert got(inside)["message"] == "The person declined."
    expect(box).to_have_value("Or at 8?\n\nRing at 7?\n\nmine")


def test_a_link_is_opened_by_the_person_alone(page: Page, fake: FakeServer) -> None:
    region, inside = shown(page, fake)
    page.context.route("https://example.org/**", lambda route: route.fulfill(body="there", content_type="text/html"))
    asks(inside, "ui/open-link", {"url": "https://example.org/a b"})
    expect(region.get_by_role("group").get_by_role("region")).to_have_text("https://example.org/a%20b")
    assert len(page.context.pages) == 1
    with page.context.expect_page() as other:
        region.get_by_role("button", name="Open", exact=True).click()
    expect(other.value.get_by_text("there")).to_be_visible()
    assert other.value.evaluate("[window.opener, document.referrer]") == [None, ""]
    assert got(inside) == {}
    other.value.close()


def test_an_app_sizes_its_frame_and_follows_the_theme(page: Page, fake: FakeServer) -> None:
    region, inside = shown(page, fake)
    size = "{ jsonrpc: '2.0', method: 'ui/notifications/size-changed', params: { width: 9, height } }"
    say = f"(html, height) => parent.postMessage({size}, '*')"
    for height, is_now in ((500, 500), (5000, 800), (3, 60)):
        inside.evaluate(say, height)
        expect(region.locator("iframe")).to_have_css("height", f"{is_now}px")
    page.emulate_media(color_scheme="dark")
    inside.page.wait_for_timeout(200)
    changed = [each["params"] for each in inside.evaluate("() => window.heard") if "context" in each.get("method", "")]
    assert changed == [{"theme": "dark"}]


@pytest.mark.usefixtures("forgiving")
def test_an_app_that_asks_for_the_network_is_told_so_visibly(page: Page, fake: FakeServer) -> None:
    region, inside = shown(page, fake, domains=("https://api.example.org",), permissions=("camera",))
    expect(region).to_contain_text("This app asks for https://api.example.org, camera. No app is given that here")
    assert inside.evaluate("() => window.said.hostCapabilities.sandbox") == {"csp": {}}
    assert inside.evaluate("() => fetch('http://127.0.0.1:9/').catch(() => 'refused')") == "refused"


@pytest.mark.usefixtures("forgiving")
def test_an_app_that_is_gone_says_so(page: Page, fake: FakeServer) -> None:
    file = keep(fake.world.artifacts, "app.html", GREETS, SHOWN)
    made(page, fake, file)
    del fake.world.artifacts[file.id]
    region = page.get_by_role("region", name="App app.html")
    region.get_by_role("button", name="Open app").click()
    expect(region.get_by_role("alert")).to_have_text("This file is not there any more.")


def test_an_app_speaks_german_on_a_phone(new_page: NewPage, fake: FakeServer) -> None:
    page = new_page(viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    page.goto(fake.url)
    file = keep(fake.world.artifacts, f"{'long' * 25}.html", GREETS, replace(SHOWN, domains=("https://" + "x" * 190,)))
    made(page, fake, file)
    page.evaluate("localStorage.setItem('ponder.language', 'de')")
    page.reload()
    page.get_by_role("button", name="App öffnen").click()
    inside = page.locator("iframe").content_frame.locator("html")
    expect(inside).to_have_attribute("data-done", "yes")
    assert inside.evaluate("() => window.said.hostContext.locale") == "de"
    asks(inside, "ui/message", {"role": "user", "content": {"type": "text", "text": "x" * 400}})
    expect(page.get_by_role("button", name="Übernehmen")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
