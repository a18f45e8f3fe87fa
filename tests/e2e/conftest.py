"""Chromium for the tests of the page, and a watch over its console and its requests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.support.fake_server import FakeServer, serve
from tests.e2e.support.real_server import RealServer, forget_documents, with_documents

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

PATIENCE_MS = 30_000  # the first answer with tools, which loads the embedder, took over 15 s on two loaded cores
ARGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium a module. (For a session it would hold an event loop that async tests then trip over.)"""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    sync_api.expect.set_options(timeout=PATIENCE_MS)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGS.split())
        yield browser
        browser.close()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serve() as server:
        yield server


@pytest.fixture(scope="session")
def library_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with with_documents(tmp_path_factory.mktemp("documents")) as server:
        yield server


@pytest.fixture
def documents_server(library_server: RealServer) -> RealServer:
    """The real server, with no documents."""
    forget_documents(library_server)
    return library_server


@dataclass
class Watch:
    """Errors on the pages of a test. Checked when the test ends, unless it says that there would be some."""

    wrong: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    expected: bool = False

    def expect_errors(self) -> None:
        self.expected = True

    def over(self, page: Page) -> Page:
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: self.wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.wrong.append(f"uncaught: {error}"))
        page.on("requestfailed", lambda request: self._failed(request.url, request.failure))
        page.on("response", lambda response: self.wrong.append(response.url) if response.status >= 400 else None)
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        _until_made(page)
        return page

    def _failed(self, url: str, failure: str | None) -> None:
        if failure != "net::ERR_ABORTED":  # a reader that left: a reload, another chat
            self.wrong.append(f"{url}: {failure}")


def _until_made(page: Page) -> None:
    """Going somewhere and loading again end when the page is made, a moment after its program was loaded: a key pressed
    in between reaches nobody."""

    def waiting(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(*args: Any, **options: Any) -> Any:  # Any: what Page.goto and Page.reload take and return
            response = load(*args, **options)
            page.locator("#app > :not(.prerendered), body:not(:has(#app))").first.wait_for(state="attached")
            return response

        return loaded

    page.goto = waiting(page.goto)  # type: ignore[method-assign]
    page.reload = waiting(page.reload)  # type: ignore[method-assign]


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    if watch.expected:
        uncaught = [line for line in watch.wrong if line.startswith("uncaught")]
        assert not uncaught
    else:
        assert not watch.wrong
    assert all(host.startswith("127.0.0.1") for host in watch.hosts), f"asked other hosts: {watch.hosts}"


NewPage = Callable[..., "Page"]


@pytest.fixture
def new_page(browser: Browser, watch: Watch, fake: FakeServer) -> Iterator[NewPage]:
    """Pages that close before the server they read from does: one that is still open would miss it."""
    contexts: list[BrowserContext] = []

    def make(**options: Any) -> Page:  # Any: what Browser.new_context takes
        # A service worker would answer before the routes that a test puts in its way.
        contexts.append(browser.new_context(**{"service_workers": "block", **options}))
        return watch.over(contexts[-1].new_page())

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def page(new_page: NewPage, fake: FakeServer) -> Page:
    page = new_page(permissions=["clipboard-read", "clipboard-write"])
    page.goto(fake.url)
    return page
