"""Files of every kind that is read, made here as bytes: small, real, and with content whose place is known."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import threading
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import openpyxl
import pptx as pptx_library

from retrieval.parsing import parser
from retrieval.parsing.parsed import Parsed
from retrieval.parsing.sniff import DOCX

_PACKAGE = "http://schemas.openxmlformats.org/package/2006"

# PDF, in Courier: all characters are equally wide, so where each is drawn is known

SIZE = 10.0  # points; a character is .6 of it wide
LEADING = 12.0
LEFT, TOP, WIDTH, HEIGHT = 72.0, 720.0, 612.0, 792.0


@dataclass(frozen=True)
class Drawn:
    """Place of a word, in points from the page's lower left corner."""

    page: int
    left: float
    right: float
    baseline: float


def pdf(
    pages: Sequence[Sequence[str]], title: str = "", *, encrypted: bool = False, unicode: str = "", about: str = ""
) -> bytes:
    """A PDF of pages of lines, each drawn on its own; an empty line is a gap.

    `unicode` are characters that no Latin encoding has, up to 30 of them, drawn as codes 1, 2, … that map to them.
    `about` is what else is said of each page, such as "/Rotate 90".
    """
    codes = {character: code for code, character in enumerate(unicode, 1)}
    objects = [b"", b""]  # the catalogue and the pages, made when their children are known
    mapped = "".join(f"<{code:02x}> <{character.encode('utf-16-be').hex()}>\n" for character, code in codes.items())
    cmap = (
        "/CIDInit /ProcSet findresource begin 12 dict begin begincmap /CMapName /Made def /CMapType 2 def\n"
        f"1 begincodespacerange <00> <ff> endcodespacerange\n{len(codes)} beginbfchar\n{mapped}endbfchar\n"
        "endcmap CMapName currentdict /CMap defineresource pop end end"
    )
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Courier /Encoding /WinAnsiEncoding"
    if codes:
        font += f" /FirstChar 1 /LastChar {len(codes)} /Widths [{'600 ' * len(codes)}] /ToUnicode 5 0 R"
    objects += [b"<< /Title " + _pdf_text(title) + b" >>", f"{font} >>".encode(), _stream(cmap.encode())]
    kids = []
    for lines in pages:
        objects.append(_stream(_drawing(lines, codes)))
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {WIDTH:.0f} {HEIGHT:.0f}] /Contents {len(objects)} 0 R "
            f"{about} /Resources << /Font << /F1 4 0 R >> >> >>".encode()
        )
        kids.append(f"{len(objects)} 0 R")
    objects[0] = b"<< /Type /Catalog /Pages 2 0 R >>"
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>".encode()
    trailer = b"/Root 1 0 R /Info 3 0 R"
    if encrypted:  # the standard handler with a password whose hash is not that of an empty one
        owner, user = hashlib.sha256(b"owner").hexdigest(), hashlib.sha256(b"user").hexdigest()
        objects.append(f"<< /Filter /Standard /V 1 /R 2 /O <{owner}> /U <{user}> /P -44 >>".encode())
        trailer += f" /Encrypt {len(objects)} 0 R /ID [<{'00' * 16}> <{'00' * 16}>]".encode()
    made, places = io.BytesIO(), []
    made.write(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n")
    for number, body in enumerate(objects, 1):
        places.append(made.tell())
        made.write(b"%d 0 obj\n%s\nendobj\n" % (number, body))
    table = made.tell()
    made.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    made.writelines(b"%010d 00000 n \n" % place for place in places)
    made.write(b"trailer\n<< /Size %d %s >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, trailer, table))
    return made.getvalue()


def drawn(pages: Sequence[Sequence[str]], word: str) -> list[Drawn]:
    """Everywhere that `pdf` draws a word."""
    return [
        Drawn(page, LEFT + at * 0.6 * SIZE, LEFT + (at + len(word)) * 0.6 * SIZE, TOP - row * LEADING)
        for page, lines in enumerate(pages, 1)
        for row, line in enumerate(lines)
        for at in range(len(line))
        if line.startswith(word, at)
    ]


def _drawing(lines: Sequence[str], codes: dict[str, int]) -> bytes:
    shown = [
        b"1 0 0 1 %.1f %.1f Tm (%s) Tj" % (LEFT, TOP - row * LEADING, _escaped(line, codes))
        for row, line in enumerate(lines)
        if line
    ]
    return b"BT /F1 %.1f Tf\n%s\nET" % (SIZE, b"\n".join(shown))


def _escaped(line: str, codes: dict[str, int]) -> bytes:
    coded = b"".join(b"\\%03o" % codes[c] if c in codes else c.encode("cp1252") for c in line.replace("\\", "\\\\"))
    return coded.replace(b"(", b"\\(").replace(b")", b"\\)")


def _stream(body: bytes) -> bytes:
    return b"<< /Length %d >>\nstream\n%s\nendstream" % (len(body), body)


def _pdf_text(text: str) -> bytes:
    return b"<" + ("\ufeff" + text).encode("utf-16-be").hex().encode() + b">"


# Office


def docx(*paragraphs: tuple[str, str], table: Sequence[Sequence[str]] = ()) -> bytes:
    """A DOCX of paragraphs, each a style ("Heading1", "Title", or none) and a text, and of a table at its end."""
    body = "".join(
        f'<w:p><w:pPr><w:pStyle w:val="{style}"/></w:pPr><w:r><w:t>{escape(text)}</w:t></w:r></w:p>'
        for style, text in paragraphs
    )
    if table:
        rows = (
            "".join(f"<w:tc><w:p><w:r><w:t>{escape(cell)}</w:t></w:r></w:p></w:tc>" for cell in row) for row in table
        )
        body += f"<w:tbl>{''.join(f'<w:tr>{row}</w:tr>' for row in rows)}</w:tbl>"
    return _archive(
        {
            "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types"><Default Extension="rels" '
            'ContentType="application/vnd.openxmlformats-package.relationships+xml"/><Override '
            f'PartName="/word/document.xml" ContentType="{DOCX}.main+xml"/></Types>',
            "_rels/.rels": f'<Relationships xmlns="{_PACKAGE}/relationships"><Relationship Id="r1" '
            'Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" '
            'Target="word/document.xml"/></Relationships>',
            "word/document.xml": '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'
            f"<w:body>{body}</w:body></w:document>",
            "word/styles.xml": '<w:styles xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'
            + "".join(
                f'<w:style w:type="paragraph" w:styleId="{name.replace(" ", "")}"><w:name w:val="{name}"/></w:style>'
                for name in ("Title", "heading 1", "heading 2")
            )
            + "</w:styles>",
        }
    )


def bomb(mebibytes: int = 600) -> bytes:
    """A DOCX of less than a MiB that unpacks to many."""
    made = io.BytesIO(docx(("", "Harmless.")))
    with (
        zipfile.ZipFile(made, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("word/media/image1.bmp", "w", force_zip64=True) as member,
    ):
        for _ in range(mebibytes):
            member.write(b"\0" * (1 << 20))
    return made.getvalue()


def pptx(*slides: tuple[str, str]) -> bytes:
    """A PPTX of slides, each a title and a text."""
    show = pptx_library.Presentation()
    for title, text in slides:
        slide = show.slides.add_slide(show.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = text
    made = io.BytesIO()
    show.save(made)
    return made.getvalue()


def xlsx(**sheets: Sequence[Sequence[object]]) -> bytes:
    """An XLSX of sheets of rows."""
    book = openpyxl.Workbook(write_only=True)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(list(row))
    made = io.BytesIO()
    book.save(made)
    return made.getvalue()


def _archive(members: dict[str, str]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return made.getvalue()


def page(body: str, title: str = "A page", head: str = "") -> bytes:
    """HTML with scripts and styles in all places where they occur; they contain the word `evil`."""
    return (
        f"<!doctype html><html><head><title>{title}</title>{head}<style>.evil {{ color: red }}</style>"
        "<script>evil()</script></head><body onload='evil()'><nav><a href='/'>Start</a></nav>"
        f"<script type='module'>if (1 < 2) evil('</p>')</script>{body}<p style='display: none'>evil</p>"
        "<p hidden>evil</p><noscript>evil</noscript><template>evil</template><!-- evil --><style>evil{}</style>"
        "</body></html>"
    ).encode()


# Parsers that go wrong, for a process that parses


def misbehave(path: Path, name: str) -> Parsed:
    """Does what the name says, or parses the file."""
    if name == "crash.txt":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang.txt":
        threading.Event().wait()
    if name == "swell.txt":
        bytearray(64 << 30)
    if name == "nest.txt":
        raise RecursionError
    return parser.parse(path, name)


# Files that are small and would take their reader's time or memory


def nested_docx(levels: int = 200_000) -> bytes:
    """Paragraphs within paragraphs: a few KiB."""
    start, end = "<w:p><w:r>" * levels, "</w:r></w:p>" * levels
    whole = docx(("", "MARK"))
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        members = {name: archive.read(name).decode() for name in archive.namelist()}
    members["word/document.xml"] = members["word/document.xml"].replace("<w:body>", f"<w:body>{start}{end}")
    return _archive(members)


def attributes(count: int = 1_000_000) -> bytes:
    """A page with an element of so many attributes."""
    return (
        b"<!doctype html><html><body><p "
        + b" ".join(b"a%d=1" % at for at in range(count))
        + b">Text.</p></body></html>"
    )


def wide_xlsx(columns: int = 1_000_000) -> bytes:
    """A sheet of one row of so many cells."""
    return _sheet(f"<row>{'<c><v>1</v></c>' * columns}</row>")


def swelling_xlsx(bytes_: int = 1 << 30) -> bytes:
    """A sheet that unpacks to so much, in rows as there may be."""
    rows = b"<row>" + b"<c><v>1</v></c>" * 1000 + b"</row>"
    made = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(_sheet("MARK"))) as source,
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
    ):
        for name in source.namelist():
            before, mark, after = source.read(name).partition(b"MARK")
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(before)
                for _ in range(bytes_ // (64 * len(rows)) if mark else 0):
                    member.write(64 * rows)
                member.write(after)
    return made.getvalue()


def tall_xlsx(rows: int = 1_000_000) -> bytes:
    """A sheet of rows whose one cell is in the last column: each is as wide as a sheet may be."""
    return _sheet("".join(f'<row r="{at}"><c r="XFD{at}"><v>1</v></c></row>' for at in range(1, rows + 1)))


def _sheet(rows: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(xlsx(A=[["a"]]))) as archive:
        members = {name: archive.read(name).decode() for name in archive.namelist()}
    name = "xl/worksheets/sheet1.xml"
    start, _, rest = members[name].partition("<sheetData>")
    members[name] = f"{start}<sheetData>{rows}</sheetData>{rest.partition('</sheetData>')[2]}"
    return _archive(members)


def looping_pdf() -> bytes:
    """A page tree whose branches are the tree itself, with as many pages as are read."""
    whole = pdf([["Text."]] * 3)
    kids = whole[whole.index(b"/Kids [") : whole.index(b"]", whole.index(b"/Kids ["))]
    return whole.replace(kids, b"/Kids [2 0 R 2 0 R 2 0 R"[: len(kids)].ljust(len(kids))).replace(
        b"/Count 3", b"/Count 4999"
    )


def deflated_pdf(size: int = 2 << 30) -> bytes:
    """A page whose content is packed twice, and `size` bytes long."""
    inner = zlib.compressobj(1)
    once = b"".join(inner.compress(b" " * (1 << 20)) for _ in range(size >> 20)) + inner.flush()
    twice = zlib.compress(once, 9)
    whole = pdf([["MARK"]])
    start = whole.index(b"<< /Length", whole.index(b"CMapName"))
    end = whole.index(b"endstream", start)
    stream = b"<< /Length %d /Filter [/FlateDecode /FlateDecode] >>\nstream\n%b\n" % (len(twice), twice)
    return whole[:start] + stream + whole[end:]


def huge_page_pdf(width: str = "1", height: str = "100000000") -> bytes:
    """A page of any size."""
    return pdf([["Text."]]).replace(b"[0 0 612 792]", f"[0 0 {width} {height}]".encode())


def patterned_pdf(size: int = 14_400) -> bytes:
    """A large page that is painted over and over with what is slow to paint."""
    paint = b"q 0 0 %d %d re W n " % (size, size)
    shapes = b"".join(
        b"%d %d m %d %d %d %d %d %d c S " % (at % size, 0, size, at % 77, at % 99, size, size - at % 55, size)
        for at in range(60_000)
    )
    whole = pdf([["MARK"]]).replace(b"[0 0 612 792]", b"[0 0 %d %d]" % (size, size))
    start = whole.index(b"<< /Length", whole.index(b"CMapName"))
    end = whole.index(b"endstream", start)
    packed = zlib.compress(b"40 w BT /F1 10 Tf (Text.) Tj ET " + (paint + shapes + b"Q ") * 10, 9)
    return whole[:start] + b"<< /Length %d /Filter /FlateDecode >>\nstream\n%b\n" % (len(packed), packed) + whole[end:]
