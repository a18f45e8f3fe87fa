"""Pages of documents over HTTP: their sizes, their pictures, and what is refused."""

from __future__ import annotations

import io
import socket
import threading
from concurrent.futures import wait
from typing import Any

import httpx
import pytest
from pebble import ProcessFuture
from PIL import Image

from tests.app.api.test_collections import user
from tests.app.conftest import Server
from tests.app.library import DAM, add, error
from tests.retrieval.made import LEADING, SIZE, TOP, pdf, pptx

WIDE, HIGH = 612, 792  # points, of the PDFs made here


@pytest.fixture
def dam(ana: httpx.Client) -> int:
    """A PDF of two pages, the second of which says something."""
    return int(add(ana, "dam.pdf", pdf([["Nothing to see here."], ["", "", DAM]]))["id"])


def picture(http: httpx.Client, document: int, page: int, **query: int) -> Image.Image:
    reply = http.get(f"/api/documents/{document}/pages/{page}", params=query)
    assert reply.status_code == 200 and reply.headers["content-type"] == "image/png", reply.text
    return Image.open(io.BytesIO(reply.content)).convert("L")


def darkest(image: Image.Image) -> int:
    """0 to 255."""
    return next(level for level, pixels in enumerate(image.histogram()) if pixels)


def test_pages_have_their_characters_and_their_size(ana: httpx.Client, dam: int) -> None:
    first, second = ana.get(f"/api/documents/{dam}/pages").json()["pages"]
    text = ana.get(f"/api/documents/{dam}/text").json()["text"]
    assert text[first["start"] : first["end"]] == "Nothing to see here."
    assert text[second["start"] : second["end"]].strip() == DAM
    assert (second["number"], second["width"], second["height"]) == (2, WIDE, HIGH)
    assert ana.get(f"/api/documents/{dam}").json()["pages"] == 2


def test_slides_have_characters_and_no_size(ana: httpx.Client) -> None:
    document = add(ana, "dam.pptx", pptx(("The dam", DAM), ("Bees", "They dance.")))
    pages = ana.get(f"/api/documents/{document['id']}/pages").json()["pages"]
    assert [(page["number"], page["width"]) for page in pages] == [(1, None), (2, None)]
    error(ana.get(f"/api/documents/{document['id']}/pages/1"), 404, "no_pages")


def test_a_page_is_drawn_as_wide_as_asked_and_a_box_is_on_its_words(ana: httpx.Client, dam: int) -> None:
    shown = picture(ana, dam, 2, width=WIDE)
    assert shown.size == (WIDE, HIGH)
    text = ana.get(f"/api/documents/{dam}/text").json()["text"]
    start = text.index("1931")
    (box,) = ana.get(f"/api/documents/{dam}/boxes?start={start}&end={start + 4}").json()["boxes"]
    inside = round(box["left"]), round(HIGH - box["top"]), round(box["right"]), round(HIGH - box["bottom"])
    assert darkest(shown.crop(inside)) < 100  # ink
    below = TOP - 2 * LEADING - SIZE
    assert darkest(shown.crop((0, round(HIGH - below), WIDE, HIGH))) == 255
    assert picture(ana, dam, 2).width == 1200


def test_a_page_that_is_known_already_is_not_sent_again(ana: httpx.Client, dam: int) -> None:
    first = ana.get(f"/api/documents/{dam}/pages/1")
    assert first.headers["cache-control"] == "private, no-cache"
    again = ana.get(f"/api/documents/{dam}/pages/1", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304 and not again.content
    add(ana, "dam.pdf", pdf([["Something else."]]))
    new = ana.get(f"/api/documents/{dam}/pages/1", headers={"If-None-Match": first.headers["etag"]})
    assert new.status_code == 200 and new.content != first.content


@pytest.mark.parametrize("page", ["0", "3", "-1", "x", "9" * 30])
def test_a_page_that_is_not_there_is_told(ana: httpx.Client, dam: int, page: str) -> None:
    assert ana.get(f"/api/documents/{dam}/pages/{page}").status_code == 404


@pytest.mark.parametrize("query", ["width=0", "width=3001", "width=wide", "width=1&width=2", "zoom=2"])
def test_a_bad_width_is_refused_by_name(ana: httpx.Client, dam: int, query: str) -> None:
    reply = ana.get(f"/api/documents/{dam}/pages/1?{query}")
    assert reply.status_code == 400 and reply.json()["error"]["param"] == query.split("=")[0]


def test_a_tall_page_is_drawn_narrower(ana: httpx.Client) -> None:
    tall = pdf([[DAM]]).replace(b"[0 0 612 792]", b"[0 0 61 8000]")
    document = add(ana, "tall.pdf", tall)
    shown = picture(ana, document["id"], 1, width=3000)
    assert shown.width < 400 and shown.width * shown.height <= 16_100_000


def test_a_page_whose_file_is_gone_is_told(ana: httpx.Client, shelf: Server) -> None:
    folder = shelf.data / "documents" / "files"
    before = set(folder.iterdir())
    document = int(add(ana, "gone.pdf", pdf([[DAM]]))["id"])
    for path in set(folder.iterdir()) - before:
        path.unlink()
    error(ana.get(f"/api/documents/{document}/pages/1"), 404, "file_gone")
    error(ana.get(f"/api/documents/{document}/pages"), 404, "file_gone")


def test_nobody_sees_a_page_of_another(ana: httpx.Client, bob: httpx.Client, dam: int) -> None:
    etag = ana.get(f"/api/documents/{dam}/pages/1").headers["etag"]
    for path in ("pages", "pages/1"):
        reply = bob.get(f"/api/documents/{dam}/{path}", headers={"If-None-Match": etag})
        error(reply, 404, "not_found")


def test_a_broken_page_is_said_to_be(ana: httpx.Client, shelf: Server) -> None:
    folder = shelf.data / "documents" / "files"
    before = set(folder.iterdir())
    document = int(add(ana, "broken.pdf", pdf([[DAM]]))["id"])
    for path in set(folder.iterdir()) - before:
        path.write_bytes(b"%PDF-1.7\nbroken")
    assert "damaged" in error(ana.get(f"/api/documents/{document}/pages/1"), 422, "unreadable_page")


def test_pages_that_nobody_waits_for_are_not_drawn(
    ana: httpx.Client, shelf: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tall = pdf([[DAM]]).replace(b"[0 0 612 792]", b"[0 0 61 8000]")
    document = int(add(ana, "tall.pdf", tall)["id"])
    library = shelf.app.state.ponder.library
    drawings, begin, enough = list[ProcessFuture[bytes]](), library.draw, threading.Event()

    def noted(*given: Any) -> ProcessFuture[bytes]:
        drawings.append(begin(*given))
        enough.set()
        return drawings[-1]

    monkeypatch.setattr(library, "draw", noted)
    request = (
        f"GET /api/documents/{document}/pages/1?width=3000 HTTP/1.1\r\nHost: 127.0.0.1\r\nX-User: {user(ana)}\r\n\r\n"
    )
    address = httpx.URL(shelf.url)
    readers = [socket.create_connection((address.host, address.port)) for _ in range(6)]
    for reader in readers:
        reader.sendall(request.encode())
    assert enough.wait(20)
    for reader in readers:
        reader.close()
    assert picture(ana, document, 1, width=100).width == 100
    wait(drawings, 20)
    assert len(drawings) < 6  # those whose turn did not come before were not begun, and the last is this one
