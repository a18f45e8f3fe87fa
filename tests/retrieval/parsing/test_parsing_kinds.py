"""Each kind of file that is read: its text, its title, its pages, and what must not be in it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path

import pytest

from retrieval.chunking import cut
from retrieval.parsing.parser import parse
from tests.retrieval import made
from tests.retrieval.words import WordEmbedder

Write = Callable[[str, str | bytes], Path]
Rows = list[list[object]]


def test_docx_gives_headings_paragraphs_and_tables(write: Write) -> None:
    content = made.docx(
        ("Title", "Lakes of the North"),
        ("", "Ice_cover & depth vary."),
        ("Heading1", "Lake Ladoga"),
        ("", "It is 230 m deep."),
        table=[["lake", "area"], ["Ladoga", "17891"]],
    )
    parsed = parse(write("lakes.docx", content), "lakes.docx")
    assert parsed.title == "Lakes of the North" and parsed.kind == "markdown"
    assert "Ice_cover & depth vary." in parsed.text  # nothing is escaped
    assert "# Lake Ladoga\n\nIt is 230 m deep." in parsed.text
    assert "| lake | area |" in parsed.text and "| Ladoga | 17891 |" in parsed.text


def test_slides_are_pages(write: Write) -> None:
    content = made.pptx(("Why bees", "They pollinate."), ("How many", "Some 20,000 species\vare known."))
    parsed = parse(write("bees.pptx", content), "bees.pptx")
    assert parsed.title == "Why bees" and [page.number for page in parsed.pages] == [1, 2]
    first, second = (parsed.text[page.start : page.end] for page in parsed.pages)
    assert first == "# Why bees\nThey pollinate.\n\n"
    assert second.startswith("# How many\nSome 20,000 species\nare known.")


def test_sheets_are_tables_with_values_as_a_reader_sees_them(write: Write) -> None:
    rows: Rows = [
        ["name", "found", "mass"],
        ["Vega", dt.date(2021, 3, 4), 2.135],
        ["a | b", None, 3.0],
        [None, None, 1e-7],
    ]
    content = made.xlsx(Stars=rows, Empty=[], Moons=[["moon"], ["Io\nof Jupiter"]])
    parsed = parse(write("sky.xlsx", content), "sky.xlsx")
    assert parsed.text.splitlines() == [
        "## Stars", "", "| name | found | mass |", "| --- | --- | --- |", "| Vega | 2021-03-04 | 2.135 |",
        "| a \\| b |  | 3 |", "|  |  | 1e-07 |", "", "## Moons", "", "| moon |", "| --- |", "| Io of Jupiter |",
    ]  # fmt: skip


def test_a_table_after_an_empty_row_of_a_sheet_has_its_own_header(write: Write) -> None:
    rows: Rows = [["name", "mass"], ["Vega", 2], [], ["Sirius", 3], [], ["moon", "planet"], ["Io", "Jupiter"]]
    parsed = parse(write("sky.xlsx", made.xlsx(Sky=rows)), "sky.xlsx")
    chunks = cut(parsed, WordEmbedder().pieces).chunks
    assert "| Sirius | 3 |\n\n| moon | planet |\n| --- | --- |\n| Io | Jupiter |" in parsed.text
    assert chunks[0].context == "Sky"


def test_html_gives_its_text_and_none_of_its_scripts_and_styles(write: Write) -> None:
    body = (
        "<h1>Otters</h1><p>They hold <b>hands</b>; see <a href='https://x.test'>the film</a>.</p><script>evil</script>"
        "<h2>Food</h2><ul><li>crabs</li><li>snail_shells</li></ul><table><tr><th>kind</th><th>kg</th></tr>"
        "<tr><td>sea</td><td>30</td></tr></table><pre><code># no heading\nswim()</code></pre>"
    )
    parsed = parse(write("otters.html", made.page(body, "All of &amp; about otters")), "otters.html")
    assert parsed.title == "All of & about otters"
    assert "evil" not in parsed.text and "https" not in parsed.text and "Start" not in parsed.text
    for expected in ("# Otters", "the film", "## Food", "crabs", "snail_shells", "| kind | kg |", "swim()"):
        assert expected in parsed.text
    assert {chunk.context for chunk in cut(parsed, WordEmbedder().pieces).chunks} <= {"Otters", "Otters › Food"}


@pytest.mark.parametrize(
    "wrapped", ["<article>{}</article>", "<main><div>{}</div></main>", "<div class='x'>{}</div>", "{}"]
)
def test_no_section_of_a_page_is_lost(write: Write, wrapped: str) -> None:
    sections = "".join(f"<h2>Part {n}</h2><p>{f'The part {n} says a thing or two. ' * 9}</p>" for n in range(8))
    text = parse(write("long.html", made.page(wrapped.format(sections))), "long.html").text
    assert "evil" not in text
    assert [f"## Part {n}" in text and f"The part {n} says" in text for n in range(8)] == [True] * 8


def test_html_in_the_encoding_it_declares(write: Write) -> None:
    source = made.page("<p>Добрый день, мир.</p>", head='<meta charset="koi8-r">').decode().encode("koi8-r")
    parsed = parse(write("ru.html", source), "ru.html")
    assert "Добрый день, мир." in parsed.text and not parsed.faults


def test_markdown_is_kept_as_it_is_and_its_first_heading_is_the_title(write: Write) -> None:
    source = "```sh\n# a comment\n```\n\n# The *real* C# #\n\nText.\n"
    parsed = parse(write("a.md", source), "a.md")
    assert (parsed.text, parsed.title, parsed.kind) == (source, "The *real* C#", "markdown")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.txt", "prose"), ("README", "prose"), ("a.csv", "table"), ("a.py", "code"), ("A.JSON", "code")],
)
def test_text_is_kept_as_it_is(write: Write, name: str, kind: str) -> None:
    parsed = parse(write(name, "a,b\r\n\tc,d\n"), name)
    assert (parsed.text, parsed.kind, parsed.pages, parsed.faults) == ("a,b\n\tc,d\n", kind, (), ())


SAID = "Über die Größe: „klein“ – naïve cafés, señor, œuvre. "


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_unicode_needs_no_guess(write: Write, encoding: str) -> None:
    parsed = parse(write("a.txt", SAID.encode(encoding)), "a.txt")
    assert (parsed.text, parsed.faults) == (SAID, ())


@pytest.mark.parametrize("text", [SAID, SAID * 50, "Ein Wort: Größe."])
def test_a_guessed_encoding_is_said(write: Write, text: str) -> None:
    parsed = parse(write("a.txt", text.encode("cp1252")), "a.txt")
    assert parsed.text == text
    (fault,) = parsed.faults
    assert "Windows-1252" in fault.message


def test_cyrillic_without_a_mark_is_guessed(write: Write) -> None:
    text = "Съешь же ещё этих мягких французских булок, да выпей чаю. " * 20
    parsed = parse(write("a.txt", text.encode("cp1251")), "a.txt")
    assert parsed.text == text and "Windows-1251" in parsed.faults[0].message


def test_lines_of_another_encoding_are_read_by_themselves(write: Write) -> None:
    content = "Größe\n".encode() * 5 + "café\n".encode("latin-1") + b"plain\n"
    parsed = parse(write("a.txt", content), "a.txt")
    assert parsed.text == "Größe\n" * 5 + "café\nplain\n"
    assert parsed.faults[0].message.startswith("1 of 7 lines are not UTF-8")


def test_a_character_that_was_cut_in_two_spoils_no_other(write: Write) -> None:
    parsed = parse(write("a.txt", ("Größe " * 50).encode() + "ö".encode()[:1]), "a.txt")
    assert parsed.text.startswith("Größe " * 50) and "not UTF-8" in parsed.faults[0].message


def test_control_characters_go(write: Write) -> None:
    parsed = parse(write("a.txt", b"a\x01b\x1b[0mc\x7fd\r\ne\rf\x0bg\x0ch\n"), "a.txt")
    assert parsed.text == "a b [0mc d\ne\nf\ng\fh\n"


def test_a_title_is_no_longer_than_a_title(write: Write) -> None:
    assert len(parse(write("a.md", "# " + "long " * 10_000), "a.md").title) <= 300
    assert parse(write("b.md", "x" * 10_000 + "\n===\n"), "b.md").title == ""
