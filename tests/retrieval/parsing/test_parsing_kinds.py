"""Each kind of file that is read: its text, its title, its pages, and what must not be in it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path

import pytest

from retrieval.index.chunking import cut
from retrieval.parsing.parsed import Unreadable
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


PROSE = {
    "german": (
        "Der Damm am Bärenbach wurde im Herbst des Jahres neunzehnhunderteinunddreißig fertig. Man baute"
        " ihn aus grauem Granit, der auf einem schmalen Gleis aus dem Steinbruch hinter dem Wald geholt "
        "wurde. Im Frühling stieg das Wasser bis zur Krone, und der Wärter lief die ganze Nacht mit der "
        "Laterne über den Deich und hörte, ob es irgendwo rauschte. Gegen Morgen hörte der Regen auf, un"
        "d die Leute im Tal schliefen zum ersten Mal seit einer Woche ruhig."
    ),
    "french": (
        "Le barrage du ruisseau de l’Ours fut achevé à l’automne mil neuf cent trente et un. On l’éleva "
        "en granit gris, amené par une voie étroite depuis la carrière située derrière la forêt. Au prin"
        "temps, l’eau monta jusqu’à la crête, et le gardien passa la nuit entière à marcher sur la digue"
        ", sa lanterne à la main, écoutant s’il n’y avait pas de fuite. Vers le matin, la pluie cessa en"
        "fin."
    ),
    "russian": (
        "Плотину на Медвежьем ручье достроили осенью тысяча девятьсот тридцать первого года. Её сложили "
        "из серого гранита, который возили по узкой колее из карьера за лесом. Весной вода поднялась до "
        "самого гребня, и сторож всю ночь ходил по насыпи с фонарём, прислушиваясь, не шумит ли где-нибу"
        "дь течь. К утру дождь кончился, и люди в долине впервые за неделю уснули спокойно."
    ),
    "polish": (
        "Zaporę na Niedźwiedzim Potoku ukończono jesienią tysiąc dziewięćset trzydziestego pierwszego ro"
        "ku. Zbudowano ją z szarego granitu, który wożono wąskim torem z kamieniołomu za lasem. Wiosną w"
        "oda podniosła się aż po koronę, a strażnik przez całą noc chodził po wale z latarnią i nasłuchi"
        "wał, czy gdzieś nie szumi przeciek. Nad ranem deszcz ustał i ludzie w dolinie po raz pierwszy o"
        "d tygodnia zasnęli spokojnie."
    ),
    "greek": (
        "Το φράγμα στο ρέμα της Αρκούδας τελείωσε το φθινόπωρο του χίλια εννιακόσια τριάντα ένα. Χτίστηκ"
        "ε από γκρίζο γρανίτη, που τον έφερναν με στενή γραμμή από το λατομείο πίσω από το δάσος. Την άν"
        "οιξη το νερό ανέβηκε ως την κορυφή, και ο φύλακας όλη τη νύχτα περπατούσε στο ανάχωμα με το φαν"
        "άρι και άκουγε μήπως κάπου τρέχει νερό. Το πρωί η βροχή σταμάτησε και οι άνθρωποι κοιμήθηκαν ήσ"
        "υχοι."
    ),
    "japanese": (
        "熊沢の堤防は一九三一年の秋に完成した。灰色の花崗岩で築かれ、石は森の向こうの採石場から狭い線路で運ば"
        "れた。春になると水は天端まで上がり、見張りの男は一晩じゅう提灯を下げて土手を歩き、どこかで漏れる音が"
        "しないかと耳を澄ませた。朝には雨がやみ、谷の人々は一週間ぶりに安心して眠った。"
    ),
    "chinese": (
        "熊溪的水坝于一九三一年秋天建成。它用灰色的花岗岩砌成，石料沿着一条窄轨从森林后面的采石场运来。春天，"
        "水位涨到了坝顶，守坝人整夜提着灯笼在堤上走来走去，倾听哪里有漏水的声音。到了早晨，雨停了，山谷里的人"
        "们一个星期以来第一次安心地睡着了。"
    ),
}  # fmt: skip
ENCODED = [
    ("russian", "cp1251"), ("russian", "koi8-r"), ("russian", "cp866"), ("japanese", "shift_jis"),
    ("japanese", "euc-jp"), ("chinese", "gb18030"), ("german", "latin-1"), ("french", "cp1252"), ("polish", "cp1250"),
    ("polish", "iso8859-2"),
    ("greek", "cp1253"),
]  # fmt: skip


def _prose(language: str) -> str:
    return PROSE[language] * (1 + 300 // len(PROSE[language]))


@pytest.mark.parametrize(("language", "encoding"), ENCODED)
def test_prose_without_a_mark_is_read_in_its_encoding(write: Write, language: str, encoding: str) -> None:
    parsed = parse(write("a.txt", _prose(language).encode(encoding)), "a.txt")
    assert parsed.text == _prose(language) and len(parsed.faults) == 1


@pytest.mark.parametrize(("language", "encoding"), [("russian", "cp1251"), ("russian", "koi8-r"), ("greek", "cp1253")])
def test_a_sentence_is_enough_to_guess_by(write: Write, language: str, encoding: str) -> None:
    text = PROSE[language][:45]
    assert parse(write("a.txt", text.encode(encoding)), "a.txt").text == text


@pytest.mark.parametrize("mark", [b"", b"\xff\xfe", b"\xfe\xff"])
@pytest.mark.parametrize("language", ["german", "russian"])
def test_utf_16_is_read_with_and_without_a_mark(write: Write, language: str, mark: bytes) -> None:
    for encoding in ("utf-16-le",) if mark == b"\xff\xfe" else ("utf-16-be",) if mark else ("utf-16-le", "utf-16-be"):
        parsed = parse(write("a.txt", mark + _prose(language).encode(encoding)), "a.txt")
        assert (parsed.text, parsed.faults) == (_prose(language), ())


def test_utf_32_is_read_without_a_mark(write: Write) -> None:
    assert parse(write("a.txt", _prose("german").encode("utf-32-le")), "a.txt").text == _prose("german")


@pytest.mark.parametrize(
    "data", [b"\0\x01\x02 \0 \0" * 50, b"a \0b\0\0" * 99, b"\0" * 64, bytes(range(256)) * 4, b"MZ\0\0 \0 \0"]
)
def test_zero_bytes_do_not_make_binary_data_text(write: Write, data: bytes) -> None:
    with pytest.raises(Unreadable, match="binary data|a program"):
        parse(write("a.txt", data), "a.txt")


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
