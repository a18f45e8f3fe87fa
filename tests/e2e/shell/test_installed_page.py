"""The page as an app: what makes it installable, and what is there without a connection."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.real_pages import ask, box, reply
from tests.e2e.support.real_server import RealServer, running
from tests.e2e.support.scripted_model import write_scripted

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder: Path = tmp_path_factory.mktemp("installed")
    model = write_scripted(folder / "model", {"hello": "Hello yourself."})
    with running(folder, "--model", str(model), "--dtype", "float32") as server:
        yield server


def controlled(page: Page, server: RealServer) -> Page:
    """The page once its service worker answers for it."""
    page.goto(server.url)
    page.evaluate("navigator.serviceWorker.ready.then(() => undefined)")
    page.wait_for_function("navigator.serviceWorker.controller !== null")
    return page


def kept(page: Page) -> list[str]:
    """The paths that the service worker keeps."""
    found: list[str] = page.evaluate(
        """async () => (await Promise.all((await caches.keys()).map(async (name) =>
            (await (await caches.open(name)).keys()).map(({ url }) => new URL(url).pathname)))).flat()"""
    )
    return found


def test_a_browser_finds_it_installable(new_page: NewPage, server: RealServer) -> None:
    page = new_page(service_workers="allow")
    controlled(page, server)
    session = page.context.new_cdp_session(page)
    wrong = session.send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert [each["errorId"] for each in wrong] == ["in-incognito"], "a test's windows are private, and that is all"
    manifest = httpx.get(f"{server.direct}/manifest.webmanifest")
    assert manifest.headers["content-type"].startswith("application/manifest+json")
    assert httpx.get(server.direct + manifest.json()["icons"][0]["src"]).status_code == 200


def test_it_opens_without_a_connection_and_keeps_no_answer(new_page: NewPage, server: RealServer, watch: Watch) -> None:
    page = controlled(new_page(service_workers="allow"), server)
    ask(page, "hello")
    expect(reply(page)).to_contain_text("Hello yourself.")
    chat = page.url
    paths = kept(page)
    assert "/" in paths and any(path.startswith("/assets/") for path in paths)
    assert not [path for path in paths if path.startswith(("/api", "/v1", "/c/"))], paths
    watch.expect_errors()
    page.context.set_offline(True)
    page.goto(chat)
    expect(page.get_by_text("The server cannot be reached").first).to_be_visible()
    page.context.set_offline(False)
    page.get_by_role("button", name="Retry").first.click()
    expect(reply(page)).to_contain_text("Hello yourself.")
    expect(box(page)).to_be_visible()


def test_it_keeps_what_shows_answers_before_there_is_one(new_page: NewPage, server: RealServer) -> None:
    page = controlled(new_page(service_workers="allow"), server)
    answers = re.search(r'<template id="answers">(.*?)</template>', httpx.get(server.direct).text)
    assert answers is not None
    files = re.findall(r'href="(/assets/[^"]+)"', answers[1])
    assert len(files) > 3 and any("/Message-" in file for file in files)
    assert set(files) <= set(kept(page))


def test_a_new_build_takes_the_place_of_what_was_kept(new_page: NewPage, server: RealServer) -> None:
    page = controlled(new_page(service_workers="allow"), server)
    page.evaluate(
        """async () => {
            const open = await caches.open("ponder-page");
            await open.put("/assets/of-an-earlier-build.js", new Response("old"));
            await open.put("/", new Response("old", { headers: { etag: "old" } }));
        }"""
    )
    page.goto(server.url)
    page.wait_for_function(
        """async () => (await (await (await caches.open("ponder-page")).match("/")).text()).includes('id="app"')"""
    )
    page.wait_for_function(
        """async () => await (await caches.open("ponder-page")).match("/assets/of-an-earlier-build.js") === undefined"""
    )
    assert any(path.startswith("/assets/") for path in kept(page))
