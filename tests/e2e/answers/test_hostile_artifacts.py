"""Hostile files in Chromium: nothing leaves their frame, nothing is fetched, and the page stays usable."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field

import pytest

from tests.e2e.answers.test_artifacts import made, opened
from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.fake_artifacts import keep
from tests.e2e.support.fake_server import FakeServer
from tests.e2e.support.hostile_artifacts import HOSTILE, LEAVES, PLAIN, scripted

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Dialog, Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@dataclass
class Away:
    """Another server, which notes what reaches it: the first line of each connection, "" of one that says nothing.

    A test that uses it fails where anything did.
    """

    url: str
    reached: list[str] = field(default_factory=list)


@pytest.fixture
def away() -> Iterator[Away]:
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener, closing(datagrams):
        datagrams.bind(listener.getsockname())
        datagrams.setblocking(False)
        server = Away(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    client.settimeout(2)
                    try:
                        server.reached.append(client.recv(4096).decode("latin-1").partition("\r\n")[0])
                        client.sendall(
                            b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\nContent-Length: 0\r\n\r\n"
                        )
                    except OSError:
                        server.reached.append("")

        threading.Thread(target=accept, daemon=True).start()
        yield server
        with suppress(BlockingIOError):
            server.reached.append(f"datagram {datagrams.recv(4096)!r}")
        assert server.reached == []
        listener.shutdown(socket.SHUT_RDWR)


@dataclass
class Seen:
    """Events beside the page: windows, dialogs, downloads, and requests that were answered."""

    what: list[str] = field(default_factory=list)

    def over(self, page: Page, away: Away) -> None:
        page.on("dialog", self._asked)
        page.on("download", lambda download: self.what.append(f"download {download.suggested_filename}"))
        page.context.on("page", lambda other: self.what.append(f"window {other.url}"))
        page.on("framenavigated", lambda frame: self._moved(frame.url, away))
        page.on("response", lambda response: self._moved(response.url, away))

    def _asked(self, dialog: Dialog) -> None:
        self.what.append(f"dialog {dialog.message}")
        dialog.dismiss()

    def _moved(self, url: str, away: Away) -> None:
        if url.startswith(away.url):
            self.what.append(f"reached {url}")


def prepared(text: str, fake: FakeServer, away: Away) -> str:
    host = away.url.partition("//")[2]
    return text.replace("AWAY", away.url).replace("HOST", host).replace("OURS", fake.url)


def usable(page: Page, fake: FakeServer) -> None:
    """The page is where it was, and takes a question."""
    expect(page).to_have_title("Go on · Ponder")
    assert page.url.startswith(f"{fake.url}/c/")
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    box = page.get_by_role("textbox", name="Message")
    box.fill("still here")
    expect(box).to_have_value("still here")
    assert page.evaluate("[document.cookie, localStorage.getItem('x'), sessionStorage.getItem('x')]") == [
        "",
        None,
        None,
    ]


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
    if way in LEAVES or file.name.endswith(".svg"):
        stage.wait_for_load_state("networkidle")
    else:
        inside = panel.locator("iframe").content_frame.locator("html")
        expect(inside).to_have_attribute("data-done", "yes")
        assert inside.evaluate("() => window.leaks") == []
        assert inside.evaluate("() => origin") == "null"
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
    usable(stage, fake)
