"""Files that tools made, as the page shows them: cards under their call, previews, versions, downloads."""

from __future__ import annotations

import base64
import json

import pytest

from app.runs.events import ToolArtifact
from tests.e2e.answers.answer_page import ENDED, ask, card
from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.fake_artifacts import keep, with_files
from tests.e2e.support.fake_server import FakeServer
from tests.e2e.support.told import call

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Locator, Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]

DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
CSV = 'city,people,note\nKöln,1087863,"a ""quoted"", <b>cell</b>"\nBonn,-331885,=1+1\n'
PAGE = "<!doctype html><title>t</title><h1>Made</h1><p id=out></p><script>out.textContent = 6 * 7</script>"
DRAWING = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 40 20"><circle cx="20" cy="10" r="8"/></svg>'


def made(page: Page, fake: FakeServer, *files: ToolArtifact) -> None:
    fake.play([call("python", '{"code": "…"}'), with_files("python", "It ran.", *files)], ENDED)
    ask(page)
    expect(card(page, "python").get_by_role("list", name="Files").get_by_role("button")).to_have_count(len(files))


def card_of(page: Page, file: ToolArtifact) -> Locator:
    facts = f" version {file.version} ·" if file.version > 1 else " "
    return page.get_by_role("button", name=f"{file.name}{facts}")


def opened(page: Page, file: ToolArtifact) -> Locator:
    card_of(page, file).click()
    panel = page.get_by_role("dialog", name=file.name)
    expect(panel).to_be_visible()
    return panel


def test_a_table_is_shown_by_the_page_and_downloaded_as_it_is(page: Page, fake: FakeServer) -> None:
    file = keep(fake.world.artifacts, "../out/Städte.csv", CSV)
    made(page, fake, file)
    panel = opened(page, file)
    table = panel.get_by_role("table")
    expect(table.get_by_role("columnheader")).to_have_text(["city", "people", "note"])
    for at, text in enumerate(["Köln", "1087863", 'a "quoted", <b>cell</b>']):
        expect(table.get_by_role("cell").nth(at)).to_have_text(text)
    expect(panel).to_contain_text("Some cells begin as formulas do.")
    with page.expect_download() as download:
        panel.get_by_role("link", name="Download").click()
    assert download.value.suggested_filename == "out_Städte.csv"
    assert download.value.path().read_text("utf-8") == CSV
    page.keyboard.press("Escape")
    expect(panel).to_have_count(0)
    expect(card_of(page, file)).to_be_focused()


def test_html_drawings_and_pictures_are_shown_in_a_frame_of_their_own(page: Page, fake: FakeServer) -> None:
    files = [keep(fake.world.artifacts, *each) for each in (("a.html", PAGE), ("b.svg", DRAWING), ("c.png", DOT))]
    made(page, fake, *files)
    for file, sandbox in zip(files, ("allow-scripts", "", ""), strict=True):
        panel = opened(page, file)
        frame = panel.locator("iframe")
        assert frame.get_attribute("sandbox") == sandbox
        inside = frame.content_frame
        shown = {"a.html": "#out", "b.svg": "circle", "c.png": "img"}[file.name]
        expect(inside.locator(shown)).to_be_visible()
        if file.name == "a.html":
            expect(inside.locator(shown)).to_have_text("42")
            assert inside.locator("html").evaluate("() => origin") == "null"
        panel.get_by_role("button", name="Close").click()
        expect(panel).to_have_count(0)


def test_versions_are_told_apart_and_chosen(page: Page, fake: FakeServer) -> None:
    keep(fake.world.artifacts, "a.txt", "the first")
    second = keep(fake.world.artifacts, "a.txt", "the <i>second</i>")
    keep(fake.world.artifacts, "b.txt", "another")
    made(page, fake, second)
    panel = opened(page, second)
    expect(panel.get_by_role("region")).to_have_text("the <i>second</i>")
    versions = panel.get_by_label("Version")
    expect(versions.get_by_role("option")).to_have_count(2)
    versions.select_option(index=1)
    expect(panel.get_by_role("region")).to_have_text("the first")
    assert str(panel.get_by_role("link", name="Download").get_attribute("href")).endswith("/art_0")


def test_a_file_of_another_kind_is_downloaded_alone_and_one_that_is_gone_says_so(
    page: Page, fake: FakeServer, watch: Watch
) -> None:
    watch.expect_errors()
    other = keep(fake.world.artifacts, "a.bin", b"\0\1")
    lost = keep(fake.world.artifacts, "b.txt", "x")
    made(page, fake, other, lost)
    expect(opened(page, other)).to_contain_text("There is no preview of this kind of file.")
    page.keyboard.press("Escape")
    del fake.world.artifacts[lost.id]
    expect(opened(page, lost).get_by_role("alert")).to_have_text("This file is not there any more.")


def test_cards_stay_after_a_reload_and_speak_german_on_a_phone(new_page: NewPage, fake: FakeServer) -> None:
    page = new_page(viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    page.goto(fake.url)
    file = keep(fake.world.artifacts, f"{'long' * 25}.csv", CSV)
    made(page, fake, file)
    page.evaluate("localStorage.setItem('ponder.language', 'de')")
    page.reload()
    panel = opened(page, file)
    expect(panel.get_by_role("link", name="Herunterladen")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    box = panel.bounding_box()
    assert box is not None and box["width"] <= 360


@pytest.mark.parametrize(
    ("columns", "rows", "chart"),
    [
        (
            ["city", "people"],
            [["Bonn", 331885], ["Köln", 1087863], ["Ulm", None]],
            "Bar chart of people by city, 3 points",
        ),
        (["day", "n", "m"], [["2026-01-01", 1, -2], ["2026-01-02", 4, 3]], "Line chart of n, m by day, 2 points"),
    ],
)
def test_a_result_of_sql_is_a_table_with_a_chart(
    page: Page, fake: FakeServer, columns: list[str], rows: list[list[object]], chart: str
) -> None:
    text = json.dumps({"columns": columns, "rows": rows}, ensure_ascii=False)
    fake.play([call("sql_query", '{"sql": "SELECT 1"}'), with_files("sql_query", text)], ENDED)
    ask(page)
    sql = card(page, "sql_query")
    sql.get_by_role("button", name="sql_query").click()
    expect(sql.get_by_role("table").get_by_role("row")).to_have_count(len(rows) + 1)
    toggle = sql.get_by_role("button", name="Chart", exact=True)
    drawn = sql.get_by_role("img", name=chart)
    expect(drawn).to_have_count(0)
    toggle.focus()
    page.keyboard.press("Enter")
    expect(drawn).to_be_visible()
    expect(toggle).to_have_attribute("aria-pressed", "true")
    known = sum(value is not None for row in rows for value in row[1:])
    expect(drawn.locator("g :is(rect, circle)")).to_have_count(known)
    expect(sql.get_by_role("table")).to_be_visible()  # it says the same, to everybody
    toggle.click()
    expect(drawn).to_have_count(0)


def test_a_table_without_numbers_has_no_chart(page: Page, fake: FakeServer) -> None:
    text = json.dumps({"columns": ["a", "b"], "rows": [["x", "y"], ["z", "w"]]})
    fake.play([call("sql_query", "{}"), with_files("sql_query", text)], ENDED)
    ask(page)
    sql = card(page, "sql_query")
    sql.get_by_role("button", name="sql_query").click()
    expect(sql.get_by_role("table")).to_be_visible()
    expect(sql.get_by_role("button", name="Chart", exact=True)).to_have_count(0)
