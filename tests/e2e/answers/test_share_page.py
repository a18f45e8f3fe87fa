"""Links to chats on the page: made, read by a stranger in a browser of their own, updated and revoked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.real_server import RealServer, running
from tests.e2e.support.scripted_model import write_scripted

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import expect

from tests.e2e.answers.test_memory_page import shot
from tests.e2e.support.real_pages import ask, settled
from tests.e2e.test_axe import violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("share")
    model = write_scripted(folder / "model", {"red": "The answer is red.", "blue": "It is blue by now."})
    with running(folder, "--model", str(model), "--dtype", "float32") as server:
        yield server


def test_a_stranger_reads_a_link_until_it_is_revoked(new_page: NewPage, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()  # the page of a link that is gone is a 404
    page = new_page(reduced_motion="reduce", permissions=["clipboard-read", "clipboard-write"])
    page.goto(server.url)
    ask(page, "red as what?")
    settled(page)
    page.get_by_role("button", name="More for “red as what?”").click()
    page.get_by_role("menuitem", name="Share by a link").click()
    page.get_by_role("region", name="Share “red as what?”").get_by_role("button", name="Make a link").click()
    address = page.get_by_role("textbox", name="Address of the link").input_value()
    page.get_by_role("button", name="Copy the address").click()
    assert page.evaluate("navigator.clipboard.readText()") == address and address.startswith(f"{server.url}/share/")
    expect(page.get_by_role("region", name="Your links").get_by_role("listitem")).to_contain_text("Made on")
    assert not violations(page)
    shot(page, "share-links")
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 360, "height": 740})
    shot(page, "share-links-phone")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.set_viewport_size({"width": 1280, "height": 720})

    page.get_by_role("link", name="red as what?").last.click()
    ask(page, "blue now?")
    settled(page)
    stranger = new_page(reduced_motion="reduce")
    stranger.goto(address)
    expect(stranger.get_by_role("heading", name="red as what?")).to_be_visible()
    expect(stranger.get_by_text("The answer is red.")).to_be_visible()
    expect(stranger.get_by_text("blue now?")).to_have_count(0)
    assert stranger.locator("button, input, textarea, form, script").count() == 0, "there is nothing to do but read"
    assert stranger.context.cookies() == []
    for scheme in ("light", "dark"):
        stranger.emulate_media(color_scheme=scheme)
        shot(stranger, f"share-{scheme}")
    stranger.set_viewport_size({"width": 360, "height": 740})
    shot(stranger, "share-phone")

    page.goto(f"{server.url}/shared")
    page.get_by_role("button", name="Update the link to “red as what?”").click()
    expect(page.get_by_text("shows the chat as it is now")).to_be_visible()
    stranger.reload()
    expect(stranger.get_by_text("It is blue by now.")).to_be_visible()
    page.get_by_role("button", name="Revoke the link to “red as what?”").click()
    expect(page.get_by_text("There are no links.")).to_be_visible()
    stranger.reload()
    expect(stranger.get_by_text("The link was revoked, or its chat was deleted.")).to_be_visible()
    expect(stranger.get_by_text("The answer is red.")).to_have_count(0)
    shot(stranger, "share-revoked")
