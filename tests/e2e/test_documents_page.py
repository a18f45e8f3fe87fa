"""Documents on the page, against the real server: added, watched while they are read, listed, searched and opened."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from app.config import LOCAL_USER
from retrieval.document_store import DocumentStore
from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.real_server import MAX_UPLOAD, RealServer, add
from tests.e2e.test_axe import AXE, violations
from tests.retrieval import made

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, expect

if TYPE_CHECKING:
    from playwright.sync_api import FilePayload, Locator

pytestmark = [pytest.mark.browser, pytest.mark.slow]

DAM = "The dam at Hollow Creek was finished in 1931. It is built of granite."
BEES = "Bees dance to tell each other where the flowers are."
SIDEWAYS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
PDF_PAGES = [["Nothing to see here."], ["Nor here."], *[[f"Leaf {i}."] for i in range(6)], ["", "", DAM]]


@pytest.fixture
def server(documents_server: RealServer) -> RealServer:
    return documents_server


@pytest.fixture
def page(new_page: NewPage, server: RealServer) -> Page:
    page = new_page()
    page.goto(f"{server.url}/documents")
    return page


def text_file(name: str, text: str | bytes, kind: str = "text/plain") -> FilePayload:
    return {"name": name, "mimeType": kind, "buffer": text.encode() if isinstance(text, str) else text}


def long_text(paragraphs: int) -> str:
    """All of it different, so that all of it has to be embedded."""
    words = ["river", "stone", "bridge", "winter", "harbour", "lantern", "valley", "copper", "orchard", "signal"]
    return "\n\n".join(
        " ".join(f"{words[(i * 7 + n * n) % 10]} {i} {n * i % 97}" for n in range(30)) + "." for i in range(paragraphs)
    )


def choose(page: Page, *files: FilePayload) -> Locator:
    """The sheet that opens for chosen files."""
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add files").click()
    chooser.value.set_files(list(files))
    return page.get_by_role("dialog", name=re.compile(r"^Add "))


def confirm(sheet: Locator) -> None:
    sheet.get_by_role("button", name="Add files").click()
    expect(sheet).to_have_count(0)


def tray(page: Page) -> Locator:
    return page.get_by_role("region", name="Files being added")


def row(page: Page, name: str) -> Locator:
    return tray(page).get_by_role("listitem").filter(has_text=name)


def sources(server: RealServer) -> list[str]:
    return sorted(each["source"] for each in server.http.get("/api/documents").json()["documents"])


def drop(page: Page, files: Sequence[tuple[str, str]], *, release: bool = True) -> None:
    page.evaluate(
        """([files, release]) => {
            const dataTransfer = new DataTransfer();
            for (const [name, text] of files) dataTransfer.items.add(new File([text], name));
            const send = (type) => document.body.dispatchEvent(
                new DragEvent(type, { bubbles: true, cancelable: true, dataTransfer }));
            for (const type of release ? ["dragenter", "dragover", "drop"] : ["dragenter", "dragover"]) send(type);
        }""",
        [list(files), release],
    )


def test_files_are_pasted_and_text_is_not_taken_for_one(page: Page) -> None:
    paste = """([kinds]) => {
        const clipboardData = new DataTransfer();
        clipboardData.items.add(new File(["words"], "pasted.txt"));
        if (kinds === "both") clipboardData.setData("text/plain", "words");
        document.body.dispatchEvent(new ClipboardEvent("paste", { bubbles: true, cancelable: true, clipboardData }));
    }"""
    expect(page.get_by_text("No documents yet")).to_be_visible()
    page.evaluate(paste, ["both"])
    page.evaluate(paste, ["file"])
    expect(page.get_by_role("dialog", name="Add 1 file")).to_contain_text("pasted.txt")


def test_bad_files_are_refused_with_their_reason_and_the_others_go_on(page: Page, server: RealServer) -> None:
    sheet = choose(
        page,
        text_file("good.txt", DAM),
        text_file("empty.txt", ""),
        text_file("photo.png", "x", "image/png"),
        text_file("many.zip", "x"),
        text_file("large.txt", "x" * MAX_UPLOAD),
        text_file("good.txt", BEES),
        text_file("broken.pdf", "%PDF-1.7 and no more"),
        text_file("odd.bin", b"\x00\x01\x02" * 50),
    )
    for why in ("is empty", "Pictures, sound", "Archives", "the limit of 1 MB", "the same name"):
        expect(sheet).to_contain_text(why)
    expect(sheet).to_contain_text("5 files cannot be added")
    confirm(sheet)
    expect(row(page, "good.txt")).to_contain_text("added")
    expect(row(page, "broken.pdf")).to_contain_text("The PDF is damaged or was cut off.")
    expect(row(page, "odd.bin")).to_contain_text("The content is binary data.")
    expect(tray(page)).to_contain_text("2 of 3 files not added")
    assert sources(server) == ["good.txt"]
    row(page, "broken.pdf").get_by_role("button", name="Retry broken.pdf").click()
    expect(row(page, "broken.pdf")).to_contain_text("damaged")
    page.get_by_role("button", name="Remove broken.pdf from this list").click()
    expect(row(page, "broken.pdf")).to_have_count(0)
    expect(tray(page).get_by_role("button").or_(tray(page).get_by_role("link")).first).to_be_visible()
    assert page.evaluate("document.activeElement !== document.body")


def test_a_file_again_is_unchanged_and_another_of_its_name_takes_its_place(page: Page, server: RealServer) -> None:
    add(server, "dam.txt", DAM)
    page.reload()
    sheet = choose(page, text_file("dam.txt", DAM))
    expect(sheet.locator("option:checked")).to_have_text("Documents")
    confirm(sheet)
    expect(row(page, "dam.txt")).to_contain_text("was there already, unchanged")
    confirm(choose(page, text_file("dam.txt", f"{DAM} It was painted.")))
    expect(row(page, "dam.txt")).to_contain_text("added in place of the earlier file of this name")
    assert sources(server) == ["dam.txt"]
    tray(page).get_by_role("button", name="Close").click()
    expect(tray(page)).to_have_count(0)


def test_an_upload_shows_how_much_has_gone_and_can_be_cancelled(page: Page, server: RealServer) -> None:
    wire = page.context.new_cdp_session(page)
    slow = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 100_000}
    wire.send("Network.emulateNetworkConditions", slow)
    confirm(choose(page, text_file("slow.txt", "word " * 180_000)))
    expect(row(page, "slow.txt")).to_contain_text(re.compile(r"sending, [1-9][\d.]* KB of 879 KB"))
    sent = row(page, "slow.txt").get_by_role("progressbar")
    assert 0 < float(sent.get_attribute("value") or 0) < 900_000
    page.get_by_role("button", name="Cancel slow.txt").click()
    expect(row(page, "slow.txt")).to_contain_text("cancelled")
    wire.send("Network.emulateNetworkConditions", {**slow, "uploadThroughput": -1})
    assert sources(server) == []
    assert all(job["status"] != "running" for job in server.http.get("/api/jobs").json()["jobs"])
    row(page, "slow.txt").get_by_role("button", name="Retry slow.txt").click()
    expect(row(page, "slow.txt")).to_contain_text(re.compile("reading|embedding|indexing|added"))


def test_what_is_being_read_is_there_after_a_reload_and_can_be_cancelled(page: Page, server: RealServer) -> None:
    confirm(choose(page, text_file("long.txt", long_text(1000))))
    begun = re.compile(r"embedding, [1-9][\d,]* of [\d,]+ passages")
    expect(row(page, "long.txt")).to_contain_text(begun, timeout=30_000)
    confirm(choose(page, text_file("dam.txt", DAM)))
    expect(row(page, "dam.txt")).to_contain_text("waits to be read")
    page.reload()
    expect(row(page, "long.txt")).to_contain_text(re.compile(r"embedding, [\d,]+ of"))
    expect(row(page, "long.txt").get_by_role("progressbar")).to_be_visible()
    page.get_by_role("button", name="Cancel long.txt").click()
    expect(row(page, "long.txt")).to_contain_text("cancelled")
    expect(row(page, "dam.txt")).to_contain_text("added")
    expect(page.get_by_role("list", name="Documents in All documents")).to_contain_text("dam.txt")
    assert sources(server) == ["dam.txt"]


def test_collections_are_made_renamed_and_deleted(page: Page, server: RealServer) -> None:
    page.get_by_role("button", name="New collection").click()
    expect(page.get_by_label("Name of the collection")).to_be_focused()
    page.keyboard.type("Work")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"/documents\?collection=\d+$"))
    expect(page.get_by_text("Nothing in this collection yet")).to_be_visible()
    confirm(choose(page, text_file("dam.txt", DAM)))  # goes to the collection that is shown
    expect(page.get_by_role("list", name="Documents in Work")).to_contain_text("dam.txt")

    page.get_by_role("button", name="More about “Work”").click()
    page.get_by_role("button", name="Rename").click()
    expect(page.get_by_label("Name of the collection")).to_be_focused()
    page.keyboard.type("Dams")  # in place of what was there
    page.keyboard.press("Enter")
    shelf = page.get_by_role("navigation", name="Collections").get_by_role("link", name="Dams")
    expect(shelf).to_have_attribute("aria-current", "page")

    page.get_by_role("button", name="More about “Dams”").click()
    page.get_by_role("button", name="Delete collection").click()
    sheet = page.get_by_role("dialog", name="Delete “Dams”?")
    expect(sheet).to_contain_text("Its 1 document will be deleted with it.")
    page.keyboard.press("Escape")
    assert sources(server) == ["dam.txt"]
    page.get_by_role("button", name="More about “Dams”").click()
    page.get_by_role("button", name="Delete collection").click()
    sheet.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_text("No documents yet")).to_be_visible()
    assert sources(server) == []


def test_a_collection_is_shared_and_asked_about(page: Page, server: RealServer) -> None:
    add(server, "dam.txt", DAM)
    page.reload()
    page.get_by_role("button", name="More about “Documents”").click()
    page.get_by_role("button", name="Share", exact=True).click()
    sheet = page.get_by_role("dialog", name="Share “Documents”")
    expect(sheet).to_contain_text("Nobody else sees this collection.")
    sheet.get_by_label("User").fill("bob")
    sheet.get_by_role("button", name="Invite").click()
    expect(sheet.get_by_role("listitem")).to_contain_text("bob")
    expect(sheet.get_by_role("listitem")).to_contain_text("invited")
    sheet.get_by_label("What bob may do").select_option("writer")
    sheet.get_by_role("button", name="Take it away from bob").click()
    expect(sheet).to_contain_text("Nobody else sees this collection.")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="More about “Documents”").click()
    page.get_by_role("button", name="Ask about these").click()
    expect(page.get_by_text("From Documents")).to_be_visible()


def test_a_long_list_is_fetched_as_it_is_read(page: Page, server: RealServer) -> None:
    named = [f"{number:03}.txt" for number in range(105)]
    parts = [("file", (name, f"Text number {name}.")) for name in named]
    assert server.http.post("/api/documents", files=parts, data={"wait": "60"}, timeout=90).status_code == 201
    page.reload()
    rows = page.get_by_role("list", name="Documents in All documents").get_by_role("listitem")
    expect(rows).to_have_count(100)
    page.get_by_role("button", name="Show more").click()
    expect(rows).to_have_count(105)
    expect(page.get_by_role("link", name="004.txt")).to_be_focused()  # the first of those that came
    expect(page.get_by_role("button", name="Show more")).to_have_count(0)
    page.get_by_role("button", name="Delete “000.txt”").click()
    page.get_by_role("button", name="Delete?").click()
    expect(rows).to_have_count(104)


def invited(server: RealServer, name: str) -> None:
    """Somebody else's collection with a document, and an invitation to it, written beside the server."""
    with closing(DocumentStore(server.folder / "data/documents/documents.db")) as store:
        number = store.rights.create("bob", name).id
        store.rights.invite("bob", number, LOCAL_USER, "reader")


def test_an_invitation_is_accepted_or_declined_and_what_was_accepted_is_left(page: Page, server: RealServer) -> None:
    invited(server, "Dams")
    invited(server, "Spam")
    page.reload()
    invitations = page.get_by_role("list", name="Invitations")
    expect(invitations.get_by_role("listitem")).to_have_count(2)
    expect(invitations).to_contain_text("bob shares “Dams” with you")
    shelves = page.get_by_role("navigation", name="Collections")
    expect(shelves.get_by_role("link", name="Dams")).to_have_count(0)

    page.get_by_role("button", name="Decline “Spam”").click()
    expect(invitations.get_by_role("listitem")).to_have_count(1)
    page.get_by_role("button", name="Accept “Dams”").click()
    expect(invitations).to_have_count(0)
    expect(shelves.get_by_role("link", name="Dams")).to_be_visible()

    page.get_by_role("button", name="More about “Dams”").click()
    page.get_by_role("button", name="Leave").click()
    expect(shelves.get_by_role("link", name="Dams")).to_have_count(0)
    assert server.http.get("/api/collections").json()["collections"] == []


def test_a_document_is_deleted_after_a_second_press(page: Page, server: RealServer) -> None:
    add(server, "dam.txt", DAM)
    add(server, "bees.txt", BEES)
    page.reload()
    page.get_by_role("button", name="Delete “dam.txt”").click()
    assert sources(server) == ["bees.txt", "dam.txt"]
    page.get_by_role("button", name="Delete?").click()
    expect(page.get_by_role("list", name="Documents in")).not_to_contain_text("dam.txt")
    expect(page.get_by_text("“dam.txt” was deleted.")).to_have_count(1)
    expect(page.get_by_role("list", name="Documents in").get_by_role("link", name="bees.txt")).to_be_focused()
    assert sources(server) == ["bees.txt"]


def test_a_search_finds_the_passage_and_leads_to_its_place(page: Page, server: RealServer) -> None:
    add(server, "dam.md", "# Hollow Creek\n\n" + long_text(60) + f"\n\n## The wall\n\n{DAM}\n\n" + long_text(40))
    page.get_by_role("main").get_by_role("searchbox").fill("when was the dam finished?")
    page.keyboard.press("Enter")
    hit = page.get_by_role("main").get_by_role("listitem").filter(has_text="Hollow Creek was finished")
    expect(hit.locator("mark").first).to_have_text(re.compile("finished", re.I))
    hit.get_by_role("link").click()
    expect(page).to_have_url(re.compile(r"/documents/\d+\?start=\d+&end=\d+$"))
    mark = page.locator("mark").filter(has_text="finished in 1931")
    expect(mark).to_be_in_viewport()
    expect(page.get_by_role("heading", name="The wall")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("main").get_by_role("searchbox")).to_have_value("when was the dam finished?")
    expect(hit).to_be_visible()


def test_a_pdf_shows_its_pages_with_the_boxes_of_the_passage(page: Page, server: RealServer) -> None:
    number = add(server, "dam.pdf", made.pdf(PDF_PAGES))
    text = server.http.get(f"/api/documents/{number}/text").json()["text"]
    start = text.index("1931")
    page.goto(f"{server.url}/documents/{number}?start={start}&end={start + 4}")
    expect(page).to_have_title("dam.pdf · Ponder")
    box = page.locator(".box")
    expect(box).to_be_in_viewport()
    picture = page.get_by_role("img", name="Page 9 of 9")
    expect(picture).to_have_js_property("complete", True)
    assert picture.evaluate("image => image.naturalWidth") >= 600
    assert page.locator("img").count() < 9  # those that are far are not asked for
    (drawn,) = made.drawn(PDF_PAGES, "1931")
    sheet, shown = picture.bounding_box(), box.bounding_box()
    assert sheet is not None and shown is not None
    scale = sheet["width"] / made.WIDTH
    assert shown["x"] - sheet["x"] == pytest.approx(drawn.left * scale, abs=4)
    assert shown["y"] + shown["height"] - sheet["y"] == pytest.approx((made.HEIGHT - drawn.baseline) * scale, abs=8)

    number_field = page.get_by_role("spinbutton", name="Page")
    expect(number_field).to_have_value("9")
    number_field.fill("2")
    number_field.press("Enter")
    expect(page.get_by_role("img", name="Page 2 of 9")).to_be_in_viewport()
    page.get_by_role("button", name="Zoom in").click()
    expect(page.get_by_text("125%")).to_be_visible()
    number_field.blur()
    page.keyboard.press("n")
    expect(number_field).to_have_value("3")
    page.get_by_role("button", name="To the passage").click()
    expect(box).to_be_in_viewport()
    page.get_by_role("button", name="Text", exact=True).click()
    expect(page.locator("mark")).to_have_text("1931")
    expect(page.locator("mark")).to_be_in_viewport()


def test_a_million_characters_open_at_their_end_without_being_loaded(page: Page, server: RealServer) -> None:
    lines = "The first line.\n" + "Nothing in particular is said here.\n" * 26_000  # the same passages: embedded once
    number = add(server, "long.txt", lines)
    size = server.http.get(f"/api/documents/{number}").json()["characters"]
    assert size > 900_000
    page.goto(f"{server.url}/documents/{number}?start={size - 9}&end={size - 2}")
    expect(page.locator("mark")).to_be_in_viewport()
    assert page.evaluate("document.querySelector('[aria-label=\"Text of the document\"]').innerText.length") < 100_000
    page.evaluate("scrollTo(0, 0)")
    expect(page.get_by_text("The first line.")).to_be_in_viewport()


def test_nothing_in_a_document_runs_or_asks_for_anything(page: Page, server: RealServer) -> None:
    evil = "<script>window.owned = 1</script><img src='http://evil.example/x.png' onerror='window.owned = 1'>"
    name = "<img src=x onerror=owned=1>.html"
    html = add(server, name, f"<html><title>{evil}</title><body>{evil}<p>{BEES}</p></body></html>")
    markdown = add(
        server, "evil.md", f"# Bees {evil}\n\n![x](http://evil.example/y.png) [go](javascript:owned=1) {BEES}"
    )
    scripted = made.pdf([[BEES]]).replace(
        b"/Type /Catalog", b"/Type /Catalog /OpenAction << /S /JavaScript /JS (app.alert(1)) >>"
    )
    pdf = add(server, "evil.pdf", scripted)
    page.reload()
    expect(page.get_by_role("list", name="Documents in")).to_contain_text(name)
    page.get_by_role("main").get_by_role("searchbox").fill("bees dance flowers")
    page.keyboard.press("Enter")
    expect(page.locator("main ol mark").first).to_be_visible()
    for number in (html, markdown):
        page.goto(f"{server.url}/documents/{number}")
        expect(page.get_by_role("region", name="Text of the document")).to_contain_text("Bees")
        assert page.locator("main img, main script").count() == 0
    page.goto(f"{server.url}/documents/{pdf}")
    expect(page.get_by_role("img", name="Page 1 of 1")).to_be_visible()
    assert page.evaluate("window.owned") is None  # that no other host was asked, `watch` checks


def test_a_document_that_is_not_there_is_said_to_be_gone(page: Page, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()
    for number in ("987654", "x"):
        page.goto(f"{server.url}/documents/{number}")
        expect(page.get_by_role("alert")).to_contain_text("There is no such document.")
    page.get_by_role("link", name="All documents").click()
    expect(page.get_by_text("No documents yet")).to_be_visible()


def test_a_pdf_whose_file_is_gone_is_shown_as_text(page: Page, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()
    folder = server.folder / "data/documents/files"
    before = set(folder.iterdir())
    number = add(server, "gone.pdf", made.pdf([[DAM]]))
    for path in set(folder.iterdir()) - before:
        path.unlink()
    page.goto(f"{server.url}/documents/{number}?start=0&end=7")
    expect(page.get_by_role("note")).to_contain_text("the file is not there any more")
    expect(page.locator("mark")).to_have_text("The dam")


def test_lines_run_in_their_own_direction_and_a_phone_shows_all(new_page: NewPage, server: RealServer) -> None:
    page = new_page(viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    number = add(server, "كتاب.txt", "تم الانتهاء من السد في عام 1931.\nThe dam, once more.\n" + "x" * 300)
    add(server, "w" * 120 + ".txt", BEES)
    pdf = add(server, "dam.pdf", made.pdf(PDF_PAGES))
    page.goto(f"{server.url}/documents")
    expect(page.get_by_role("link", name="كتاب.txt")).to_be_visible()
    assert not page.evaluate(SIDEWAYS)
    page.goto(f"{server.url}/documents/{number}?start=0&end=8")
    mark = page.locator("mark")
    expect(mark).to_be_visible()
    assert not page.evaluate(SIDEWAYS)
    at = mark.bounding_box()
    assert at is not None and at["x"] > 180  # an Arabic line begins at the right
    page.goto(f"{server.url}/documents/{pdf}")
    expect(page.get_by_role("img", name="Page 1 of 9")).to_be_visible()
    assert not page.evaluate(SIDEWAYS)


def test_no_state_of_documents_has_violations(new_page: NewPage, server: RealServer) -> None:
    if not AXE.exists():
        pytest.skip("web/node_modules has no axe-core: build the page once (make setup)")
    page = new_page(reduced_motion="reduce")
    number = add(server, "dam.pdf", made.pdf(PDF_PAGES))
    page.goto(f"{server.url}/documents?q=dam")
    expect(page.locator("main ol mark").first).to_be_visible()
    assert not violations(page)
    page.goto(f"{server.url}/documents/{number}?start=0&end=9")
    expect(page.locator(".box")).to_be_visible()
    assert not violations(page)
    page.get_by_role("button", name="Text", exact=True).click()
    expect(page.locator("mark")).to_be_visible()
    assert not violations(page)
    page.get_by_role("link", name="All documents").click()
    sheet = choose(page, text_file("empty.txt", ""), text_file("bees.txt", BEES), text_file("broken.pdf", "%PDF-1.7"))
    expect(sheet.locator("option:checked")).to_have_text("Documents")
    assert not violations(page)
    confirm(sheet)
    expect(tray(page)).to_contain_text("1 of 2 files not added")
    assert not violations(page)
    page.get_by_role("button", name="More about “Documents”").click()
    page.get_by_role("button", name="Share", exact=True).click()
    assert not violations(page)
