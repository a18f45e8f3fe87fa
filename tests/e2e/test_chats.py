"""The list of chats on the real server: found, named, ordered, deleted and taken back, by mouse and by keyboard."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.chatting import begun_elsewhere, file, imported, message
from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.real_server import RealServer, running
from tests.e2e.support.scripted_model import write_scripted

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.e2e.support.real_pages import (
    ask,
    box,
    opened,
    reply,
    settled,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]

DAY = 86400.0
RTL, CJK, LONG = "كيف تعمل محركات البحث؟", "什么是动态规划", "word " * 39


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("chats")
    model = write_scripted(folder / "model", {"red": "The answer is red."})
    with running(folder, "--model", str(model), "--dtype", "float32") as server:
        yield server


@pytest.fixture
def server(listing: RealServer) -> Iterator[RealServer]:
    yield listing
    while chats := listing.http.get("/api/chats?limit=500").json()["chats"]:
        for chat in chats:
            listing.http.delete(f"/api/chats/{chat['id']}")
    for folder in listing.http.get("/api/folders").json()["folders"]:
        listing.http.delete(f"/api/folders/{folder['id']}")
    listing.as_new()


@pytest.fixture
def page(new_page: NewPage) -> Page:
    return new_page()


def kept(server: RealServer, *titles: str, age: float = 0, **fields: Any) -> list[str]:
    """Chats of these titles, the last one used last."""
    now = time.time()
    chats = []
    for at, title in enumerate(titles, 1):
        said = (message("a", None, "user", f"About {title}"), message("b", "a", "assistant", "So it is."))
        made = file(*said, title=title, updated_at=now - age - len(titles) + at, **fields)
        chats += made["chats"]
    sent = {"format": "ponder.chats", "version": 1, "chats": chats}
    reply = server.http.post("/api/chats/import", json=sent)
    assert reply.status_code == 201, reply.text
    return list(reply.json()["chat_ids"])


def rows(page: Page) -> list[str]:
    return page.get_by_role("navigation", name="Chats").get_by_role("link").all_inner_texts()


def row(page: Page, title: str) -> Locator:
    return page.get_by_role("navigation", name="Chats").get_by_role("link", name=title, exact=True)


def more(page: Page, title: str) -> Locator:
    return page.get_by_role("button", name=f"More for “{title}”")


def choose(page: Page, title: str, *items: str) -> None:
    """An item of a row's menu, and of the one in its place."""
    more(page, title).click()
    for item in items:
        page.get_by_role("menu").get_by_text(item, exact=True).click()


def notice(page: Page, words: str) -> Locator:
    return page.get_by_role("status", name="Notices").get_by_role("listitem").filter(has_text=words)


def test_chats_stand_in_groups_by_when_they_were_used(page: Page, server: RealServer) -> None:
    kept(server, "Ancient", age=500 * DAY)
    kept(server, "Last week", age=5 * DAY)
    kept(server, RTL, CJK, LONG.strip())
    kept(server, "Ever", age=400 * DAY, pinned=True)
    page.goto(server.url)
    expect(row(page, "Ancient")).to_be_visible()
    headings = page.get_by_role("navigation", name="Chats").get_by_role("heading").all_inner_texts()
    assert headings[:3] == ["Pinned", "Today", "The last 7 days"] and re.fullmatch(r"\w+ 20\d\d", headings[3])
    assert rows(page) == ["Ever", LONG.strip(), CJK, RTL, "Last week", "Ancient"]
    assert row(page, RTL).evaluate("e => getComputedStyle(e).direction") == "rtl"
    wide = row(page, LONG.strip()).bounding_box()
    assert wide is not None and wide["width"] < 260
    choose(page, CJK, "Pin")
    expect(page.get_by_role("region", name="Pinned").get_by_role("link")).to_have_text([CJK, "Ever"])
    expect(more(page, CJK)).to_be_focused()
    choose(page, CJK, "Unpin")
    expect(page.get_by_role("region", name="Pinned").get_by_role("link")).to_have_text(["Ever"])


def test_a_menu_is_used_with_the_keyboard(page: Page, server: RealServer) -> None:
    kept(server, "One", folder="Work")
    kept(server, "Two")
    page.goto(server.url)
    more(page, "Two").focus()
    page.keyboard.press("Enter")
    focused = page.locator("[role^=menuitem]:focus")
    for press, expected in (
        ("", "Rename"), ("ArrowDown", "Pin"), ("End", "Erase, with its notes"), ("ArrowDown", "Rename"),
        ("ArrowUp", "Erase, with its notes"), ("ArrowUp", "Delete"), ("Home", "Rename"),
        ("s", "Save as a file"), ("m", "Move to a folder"), ("Enter", "Back"),
        ("ArrowDown", "No folder"), ("Escape", "Move to a folder"),
    ):  # fmt: skip
        if press:
            page.keyboard.press(press)
        expect(focused).to_have_text(expected)
    page.keyboard.press("Escape")
    expect(page.get_by_role("menu")).to_have_count(0)
    expect(more(page, "Two")).to_be_focused()
    for press, expected in (("Enter", "Rename"), ("m", "Move to a folder"), ("Enter", "Back"), ("w", "Work")):
        page.keyboard.press(press)
        expect(focused).to_have_text(expected)
    page.keyboard.press("Enter")
    expect(notice(page, "“Two” is in “Work” now")).to_be_visible()
    expect(page.get_by_role("button", name="Work, 2 chats")).to_be_visible()
    assert rows(page) == []


def test_names_are_changed_in_place_and_refusals_are_told(page: Page, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()
    kept(server, "Plans", folder="Work")
    (chat,) = kept(server, "Notes")
    opened(page, server, chat)
    choose(page, "Notes", "Rename")
    field = page.get_by_role("textbox", name="New title of “Notes”")
    expect(field).to_be_focused()
    field.fill("Better notes")
    field.press("Escape")
    expect(row(page, "Notes")).to_be_focused()
    choose(page, "Notes", "Rename")
    field.fill("Better <b>notes</b>")
    field.press("Enter")
    expect(row(page, "Better <b>notes</b>")).to_be_focused()
    expect(page).to_have_title("Better <b>notes</b> · Ponder")
    page.get_by_role("button", name="More for all chats").click()
    page.get_by_role("menuitem", name="New folder").click()
    name = page.get_by_role("textbox", name="Name of the folder")
    name.fill("Work")
    name.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("There is a folder 'Work' already")
    name.fill("Play")
    name.press("Enter")
    expect(page.get_by_role("button", name="Play, 0 chats")).to_have_attribute("aria-expanded", "true")
    expect(page.get_by_text("Drag chats here, or move them by their menu.")).to_be_visible()


def test_chats_are_dragged_into_folders_that_stay_as_they_were_left(page: Page, server: RealServer) -> None:
    kept(server, "Plans", folder="Work")
    kept(server, "Notes")
    page.goto(server.url)
    folder = page.get_by_role("button", name=re.compile(r"^Work, \d"))
    expect(folder).to_have_attribute("aria-expanded", "false")
    row(page, "Notes").drag_to(folder)
    expect(folder).to_have_accessible_name("Work, 2 chats")
    folder.click()
    expect(row(page, "Plans")).to_be_visible()
    assert sorted(rows(page)) == ["Notes", "Plans"]
    page.reload()
    expect(row(page, "Plans")).to_be_visible()
    row(page, "Plans").drag_to(page.get_by_role("navigation", name="Chats"), target_position={"x": 100, "y": 280})
    expect(page.get_by_role("region", name="Today").get_by_role("link")).to_have_text(["Plans"])
    notice(page, "“Plans” is in no folder now").get_by_role("button", name="Undo").click()
    expect(folder).to_have_accessible_name("Work, 2 chats")
    choose(page, "Work", "Delete")
    expect(page.get_by_role("region", name="Today").get_by_role("link")).to_have_text(["Notes", "Plans"])
    notice(page, "Deleted the folder “Work”; its chats stay").get_by_role("button", name="Undo").click()
    expect(folder).to_have_accessible_name("Work, 2 chats")
    expect(page.get_by_role("region", name="Today")).to_have_count(0)


def test_what_is_deleted_comes_back(page: Page, server: RealServer) -> None:
    kept(server, "One", "Two", "Three", "Four")
    page.goto(server.url)
    row(page, "Two").click()
    expect(page.get_by_text("About Two")).to_be_visible()
    for title in ("Four", "Two", "One"):
        choose(page, title, "Delete")
        expect(row(page, title)).to_have_count(0)
        expect(notice(page, f"Deleted “{title}”")).to_be_visible()
        assert page.evaluate("document.activeElement !== document.body"), "the focus is lost"
    expect(page).to_have_url(re.compile("/$"))
    assert [each["title"] for each in server.http.get("/api/chats").json()["chats"]] == ["Three"]
    undo = notice(page, "Deleted “Two”").get_by_role("button", name="Undo")
    undo.focus()
    undo.press("Enter")
    expect(page.get_by_text("About Two")).to_be_visible()  # it was shown, and is again
    row(page, "Two").focus()
    page.keyboard.press("Control+z")  # the last
    expect(row(page, "One")).to_be_visible()
    page.keyboard.press("Control+z")
    expect(row(page, "Four")).to_be_visible()
    assert rows(page) == ["Four", "Three", "Two", "One"]
    box(page).fill("words")
    box(page).press("Control+z")  # is the box's own
    assert rows(page) == ["Four", "Three", "Two", "One"]


def test_words_are_found_in_titles_and_in_any_branch(page: Page, server: RealServer) -> None:
    said = [
        message("a", None, "user", "Tell of stones"), message("b", "a", "assistant", "dull " * 900 + "GRANITE!"),
        message("c", "a", "assistant", "New and short."), message("d", None, "user", "Another beginning"),
    ]  # fmt: skip
    sent = file(*said, title="Stones", leaf="c")
    server.http.post("/api/chats/import", json=sent)
    kept(server, "Granite countertops", "Other")
    page.goto(server.url)
    expect(box(page)).to_be_focused()
    page.keyboard.press("Control+k")
    search = page.get_by_role("searchbox", name="Search chats")
    expect(search).to_be_focused()
    page.keyboard.type("granit")
    found = page.get_by_role("navigation", name="Chats")
    expect(found.get_by_role("status")).to_have_text("2 chats found")
    stones = found.get_by_role("link").filter(has_text="Stones")
    expect(stones.locator("mark")).to_have_text("GRANITE")
    page.keyboard.press("ArrowDown")
    expect(found.get_by_role("link").first).to_be_focused()
    stones.click()
    message_found = page.locator("article.found")
    expect(message_found).to_contain_text("GRANITE!")
    expect(message_found).to_be_focused()
    expect(message_found.get_by_role("group", name=re.compile("Version 1 of 2"))).to_be_attached()
    expect(page.locator("article.found")).to_have_count(0)  # after a moment
    expect(page).to_have_url(re.compile(r"/c/chat_\w+$"))
    search.fill("nothing of the kind")
    expect(found.get_by_role("status")).to_contain_text("No chat has “nothing of the kind”")
    search.press("Escape")
    expect(search).to_have_value("")
    expect(row(page, "Other")).to_be_visible()


def test_many_chats_come_as_one_scrolls(page: Page, server: RealServer) -> None:
    kept(server, *(f"Chat {i:03}" for i in range(500)), age=60)
    page.goto(server.url)
    expect(row(page, "Chat 499")).to_be_visible()
    assert len(rows(page)) < 200
    nav = page.get_by_role("navigation", name="Chats")
    while len(rows(page)) < 500:
        before = len(rows(page))
        nav.evaluate("e => e.scrollTop = e.scrollHeight")
        expect(nav.get_by_role("link").nth(before)).to_be_attached()
    assert rows(page) == [f"Chat {i:03}" for i in reversed(range(500))]
    row(page, "Chat 000").click()
    expect(page.get_by_text("About Chat 000")).to_be_visible()
    choose(page, "Chat 001", "Rename")  # what is listed stays listed
    page.get_by_role("textbox", name="New title").fill("Chat one")
    page.keyboard.press("Enter")
    expect(row(page, "Chat one")).to_be_visible()
    assert len(rows(page)) == 500


def test_a_long_chat_opens_at_its_end_and_has_all_its_messages(page: Page, server: RealServer) -> None:
    roles = ("user", "assistant")
    words = [message(f"m{at}", f"m{at - 1}" if at else None, roles[at % 2], f"Words number {at}.") for at in range(90)]
    (chat,) = imported(server.http, file(*words))
    page.goto(f"{server.url}/c/{chat}")
    expect(page.get_by_text("Words number 89.")).to_be_in_viewport()
    expect(page.locator("main article")).to_have_count(90)
    expect(page.get_by_text("Words number 89.")).to_be_in_viewport()
    first = page.locator("main article").first.get_attribute("id")
    page.goto("about:blank")
    page.goto(f"{server.url}/c/{chat}#{first}")
    expect(page.get_by_text("Words number 0.")).to_be_in_viewport()


def test_a_long_chat_is_shown_while_its_beginning_is_not_there(page: Page, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()  # of the request that fails
    said = [
        message(f"m{at}", f"m{at - 1}" if at else None, ("user", "assistant")[at % 2], f"Words number {at}.")
        for at in range(90)
    ]
    (chat,) = imported(server.http, file(*said))
    held, refused = list[Route](), list[Route]()

    def hold(route: Route) -> None:
        if route.request.method != "GET":
            route.continue_()
        elif refused:
            held.append(route)
        else:
            refused.append(route)
            route.abort()

    page.route(f"**/api/chats/{chat}", hold)
    page.goto(f"{server.direct}/c/{chat}")
    articles = page.locator("main article")
    expect(articles).to_have_count(24)
    expect(page.get_by_text("Words number 89.")).to_be_in_viewport()
    questions = page.get_by_role("article", name="You")
    questions.first.get_by_role("button", name="Edit the question").click()
    page.get_by_role("textbox", name="Your question").fill("red please")
    page.keyboard.press("Enter")
    expect(articles).to_have_count(2)
    expect(articles.last).to_contain_text("The answer is red.")
    while not held:
        page.wait_for_timeout(50)
    for route in held:
        route.continue_()
    page.unroute(f"**/api/chats/{chat}")
    expect(articles).to_have_count(68)  # those before the question, in its branch
    expect(articles.first).to_contain_text("Words number 0.")
    expect(articles.last).to_contain_text("The answer is red.")
    expect(articles.last).to_be_in_viewport()
    said_now = [each["content"] for each in server.http.get(f"/api/chats/{chat}").json()["messages"]]
    assert said_now == [f"Words number {at}." for at in range(66)] + ["red please", "The answer is red."]


def test_a_chat_is_asked_for_with_its_page_and_once(page: Page, server: RealServer) -> None:
    said = [
        message(f"m{at}", f"m{at - 1}" if at else None, ("user", "assistant")[at % 2], f"Number {at}.")
        for at in range(60)
    ]
    (chat,) = imported(server.http, file(*said))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(server.direct).split("-")[0]))
    page.goto(f"{server.direct}/c/{chat}")
    expect(page.locator("main article")).to_have_count(60)
    expect(page.get_by_text("Number 59.")).to_be_in_viewport()
    page.wait_for_load_state("networkidle")
    wanted = (f"/api/chats/{chat}?last=24", f"/api/chats/{chat}", "/api/session")
    assert [asked.count(each) for each in wanted] == [1, 1, 1], asked
    assert not any("/Picks" in each for each in asked), "the first screen was drawn before the chat"
    within = page.locator("main .messages > div > article")
    expect(within).to_have_count(60)  # in stretches that come into sight together
    assert page.locator("main .messages > div").count() == 8


def test_other_tabs_see_what_is_done(page: Page, server: RealServer) -> None:
    kept(server, "Notes")
    page.goto(server.url)
    other = page.context.new_page()
    other.goto(server.url)
    expect(row(other, "Notes")).to_be_visible()
    choose(page, "Notes", "Rename")
    page.get_by_role("textbox", name="New title").fill("Shared notes")
    page.keyboard.press("Enter")
    expect(row(other, "Shared notes")).to_be_visible()
    server.turn(hold=True)
    ask(page, "red please")
    marked = other.get_by_role("listitem").filter(has_text="red please")
    expect(marked).to_contain_text("is being answered")
    server.turn()
    settled(page)
    expect(marked).not_to_contain_text("is being answered")


def test_a_chat_is_deleted_while_it_is_answered(page: Page, server: RealServer) -> None:
    page.goto(server.url)
    server.turn(hold=True)
    ask(page, "red please")
    expect(reply(page)).to_contain_text("Thinking…")
    choose(page, "red please", "Delete")
    expect(page).to_have_url(re.compile("/$"))
    server.turn()
    notice(page, "Deleted").get_by_role("button", name="Undo").click()
    expect(reply(page)).to_contain_text("You stopped this answer.")
    ask(page, "red again")
    expect(reply(page)).to_contain_text("red.")


def test_files_go_out_and_come_in(page: Page, server: RealServer, watch: Watch, tmp_path: Path) -> None:
    watch.expect_errors()
    kept(server, "Plans", folder="Work")
    kept(server, "Notes")
    page.goto(server.url)
    page.get_by_role("button", name="More for all chats").click()
    with page.expect_download() as exported:
        page.get_by_role("menuitem", name="Export all chats").click()
    everything = tmp_path / "all.json"
    exported.value.save_as(everything)
    assert len(json.loads(everything.read_text())["chats"]) == 2
    more(page, "Notes").click()
    page.get_by_role("menuitem", name="Save as a file").click()
    with page.expect_download() as shared:
        page.get_by_role("menuitem", name="Web page, to read").click()
    assert shared.value.suggested_filename == "Notes.html"

    def take_in(path: Path) -> Locator:
        page.get_by_role("button", name="More for all chats").click()
        with page.expect_file_chooser() as chosen:
            page.get_by_role("menuitem", name="Import chats…").click()
        chosen.value.set_files(path)
        return page.get_by_role("dialog")

    report = take_in(everything)
    expect(report).to_contain_text("2 chats were here already, and came in no second time.")
    page.keyboard.press("Escape")
    expect(report).to_have_count(0)
    sent, more_chats = json.loads(everything.read_text()), tmp_path / "more.json"
    more_chats.write_text(json.dumps({**sent, "chats": [*begun_elsewhere(sent)["chats"], sent["chats"][0]]}))
    report = take_in(more_chats)
    expect(report).to_contain_text("2 chats with 4 messages came in.")
    expect(report).to_contain_text("1 chat was here already, and came in no second time.")
    expect(report).to_contain_text("In folders: Work")
    report.get_by_role("link", name="Notes").click()
    expect(page.get_by_text("About Notes")).to_be_visible()
    expect(row(page, "Notes")).to_have_count(2)
    expect(page.get_by_role("button", name="Work, 2 chats")).to_be_visible()

    broken = tmp_path / "broken.json"
    for text, why in (("{", "This file is not JSON"), ('{"chats": [{"title": 3}]}', "format"), ("[]", "object")):
        broken.write_text(text)
        report = take_in(broken)
        expect(report).to_contain_text("Nothing was imported")
        expect(report.get_by_role("alert")).to_contain_text(why)
        page.keyboard.press("Escape")
        expect(report).to_have_count(0)
    expect(row(page, "Notes")).to_have_count(2)


def test_a_shared_file_opens_without_a_server(browser: Browser, server: RealServer, tmp_path: Path) -> None:
    said = (
        message("a", None, "user", f"{CJK}\n<script>window.owned = 1</script>"),
        message("b", "a", "assistant", "![x](http://127.0.0.1:1/x)\n\n| a | b |\n|---|---|\n| 1 | 2 |", thinking="Hm."),
    )  # fmt: skip
    (chat,) = server.http.post("/api/chats/import", json=file(*said, title=RTL)).json()["chat_ids"]
    shared = tmp_path / "shared.html"
    shared.write_text(server.http.get(f"/api/chats/{chat}/export?format=html").text, "utf-8")
    requests: list[str] = []
    lightness = []
    for scheme in ("light", "dark"):
        reader = browser.new_page(color_scheme=scheme)
        reader.on("request", lambda request: requests.append(request.url))
        reader.goto(shared.as_uri())
        expect(reader.get_by_role("heading", level=1)).to_have_text(RTL)
        expect(reader.get_by_role("article", name="You")).to_contain_text("<script>window.owned = 1</script>")
        expect(reader.get_by_role("cell", name="2")).to_be_visible()
        expect(reader.get_by_text("Hm.")).to_be_hidden()
        reader.get_by_text("Thought", exact=True).click()
        expect(reader.get_by_text("Hm.")).to_be_visible()
        assert reader.evaluate("window.owned") is None
        colour = reader.evaluate("getComputedStyle(document.body).backgroundColor")
        lightness.append(sum(map(int, re.findall(r"\d+", colour)[:3])))
        reader.close()
    assert lightness[0] > 700 and lightness[1] < 150
    assert requests == [shared.as_uri()] * 2
