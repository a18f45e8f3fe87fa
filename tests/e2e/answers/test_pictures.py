"""Pictures on the page: chosen, pasted and dropped, shown to a model that sees, and kept with the chat."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from PIL import Image

from tests.app.conftest import Server, serving
from tests.e2e.conftest import Watch
from tests.e2e.support.real_server import RealServer, add
from tests.engine.multimodal import seeing
from tests.retrieval import made

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]
# Gives the page a file as a clipboard or a drag has it.
GIVE = """([kind, selector, data]) => {
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    const held = new DataTransfer();
    held.items.add(new File([bytes], `${kind}.png`, { type: "image/png" }));
    const options = { bubbles: true, cancelable: true };
    const event = kind === "paste"
        ? new ClipboardEvent("paste", { ...options, clipboardData: held })
        : new DragEvent("drop", { ...options, dataTransfer: held });
    document.querySelector(selector).dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = seeing.build(text={"tie_word_embeddings": False, "max_position_embeddings": 2048})
    path = seeing.write(tmp_path_factory.mktemp("models") / "seer", model)
    with serving(path, tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture(scope="module")
def reader(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture
def page(browser: Browser, watch: Watch) -> Iterator[Page]:
    context = browser.new_context(locale="en-GB")
    yield watch.over(context.new_page())
    context.close()


def turned() -> bytes:
    """A JPEG that is turned by its metadata, which say where it was taken."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "taken at home"
    data = io.BytesIO()
    seeing.picture(60, 30).save(data, "JPEG", exif=exif)
    return data.getvalue()


def test_pictures_are_shown_sent_and_kept(page: Page, seer: Server) -> None:
    from playwright.sync_api import expect

    page.goto(seer.url)
    button = page.get_by_role("button", name="Show a picture")
    expect(button).to_have_attribute("aria-disabled", "false")
    with page.expect_file_chooser() as chooser:
        button.click()
    chooser.value.set_files({"name": "home.jpg", "mimeType": "image/jpeg", "buffer": turned()})
    shown = page.get_by_role("list", name="Pictures").get_by_role("img")
    expect(shown).to_have_count(1)
    expect(page.get_by_role("img", name="Picture 1: home.jpg")).to_be_visible()
    data = base64.b64encode(seeing.png(40, 30)).decode()
    page.evaluate(GIVE, ["paste", "#message", data])
    expect(shown).to_have_count(2)
    page.evaluate(GIVE, ["drop", "#message", data])
    expect(shown).to_have_count(3)
    page.get_by_role("button", name="Take away drop.png").click()
    expect(shown).to_have_count(2)
    box = page.get_by_role("textbox", name="Message")
    expect(box).to_be_focused()
    box.fill("What is it?")
    with page.expect_response(lambda reply: reply.url.endswith("/runs")):  # the server has the question
        box.press("Enter")
    question = page.get_by_role("article", name="You")
    expect(question.get_by_role("img")).to_have_count(2)
    page.reload()
    expect(page.get_by_role("article", name="You").get_by_role("img", name="Picture 2")).to_be_visible()
    chat = page.url.rsplit("/", 1)[1]
    assert page.get_by_role("article", name="You").get_by_role("img").count() == 2
    (first, second) = httpx.get(f"{seer.url}/api/chats/{chat}").json()["messages"][0]["images"]
    jpeg = base64.b64decode(first.partition(",")[2])
    assert b"taken at home" not in jpeg and Image.open(io.BytesIO(jpeg)).size == (30, 60)
    assert second.startswith("data:image/png")


def test_the_picture_of_a_scanned_page_is_asked_about(page: Page, documents_server: RealServer) -> None:
    """The server's model reads text; the page is told that it sees."""
    from playwright.sync_api import Route, expect

    held = list[Route]()
    page.route("**/v1/models", lambda route: held.append(route))
    number = add(documents_server, "scan.pdf", made.pdf([["A dam of beavers."], ["A hive of bees."]]))
    page.goto(f"{documents_server.url}/documents/{number}")
    page.get_by_role("button", name="Ask about the picture of this page").click()
    expect(page.get_by_role("heading", name="Ask, and watch it think.")).to_be_visible()
    for route in held:  # the models are known after the picture has come
        reply = route.fetch()
        found = reply.json()
        route.fulfill(response=reply, json={**found, "data": [{**each, "sees": True} for each in found["data"]]})
    expect(page.get_by_role("img", name="Picture 1: scan.pdf, page 1.png")).to_be_visible()


def test_where_the_model_reads_text_alone_the_button_says_so(page: Page, reader: Server) -> None:
    from playwright.sync_api import expect

    page.goto(reader.url)
    button = page.get_by_role("button", name="Show a picture")
    expect(button).to_have_attribute("aria-disabled", "true")
    expect(button).to_have_attribute("title", "This model reads text alone. Choose one that sees to show it a picture.")
    button.click(force=True)
    expect(page.get_by_text("This model reads text alone.")).to_be_visible()
    assert page.get_by_role("list", name="Pictures").count() == 0
