"""Parses HTML as Markdown, and checks the markup of pages and office files before a tree is made of it.

The main text is found by trafilatura; the whole page is taken where that would lose much of it. Scripts, styles, menus
and hidden elements are dropped either way, and links are their text. The check is against markup made to harm its
parser. It is one pass that keeps nothing: how deep elements are nested, how many attributes one has, and in a sheet how
many cells are in a row.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.parsers import expat

import trafilatura
from lxml import etree, html
from markitdown.converters import HtmlConverter

from retrieval.parsing.markdown import clean, decode, outline, title
from retrieval.parsing.parsed import Parsed, Unreadable
from retrieval.parsing.sniff import HTML

MAX_DEPTH = 200  # elements inside each other
MAX_ATTRIBUTES = 1000  # of one element
MAX_COLUMNS = 16_384  # of a sheet, as in Excel
MAX_CELLS = 5_000_000
_LONG = 4096  # characters of a tag: shorter ones have too few attributes to matter
_PIECE = 1 << 16
_TAG = re.compile(r"<[a-zA-Z](?:=\s*+\"[^\"]*+\"|=\s*+'[^']*+'|[^>=]++|=)*+>?")
_VALUE = re.compile(r"=\s*+(?:\"[^\"]*+\"|'[^']*+')")


def check_archive(path: Path, *, sheets: bool = False) -> None:
    """Look at the XML of an office file.

    Raises:
        Unreadable: it is nested too deeply, an element has too many attributes, a row too many cells, or it declares
            entities.
    """
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.filename.endswith((".xml", ".rels")):
                _Looked(sheets and "worksheets/" in member.filename).read(archive, member)


class _Looked:
    """One XML file, as it is read."""

    def __init__(self, sheet: bool) -> None:
        self._depth = self._cells = self._all = 0  # the last two with the empty cells between others
        self._parser = parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartElementHandler = self._cell if sheet else self._start
        parser.EndElementHandler = self._end
        parser.EntityDeclHandler = self._entity

    def read(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
        # The parser proper reports damage.
        with contextlib.suppress(expat.ExpatError, zipfile.BadZipFile, zlib.error, ValueError, EOFError):
            with archive.open(member) as file:
                while piece := file.read(_PIECE):
                    self._parser.Parse(piece, False)
            self._parser.Parse(b"", True)

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable(f"The file is nested too deeply: more than {MAX_DEPTH} elements inside each other.")
        if len(attributes) > MAX_ATTRIBUTES:
            raise too_many_attributes()

    def _end(self, name: str) -> None:
        self._depth -= 1

    def _cell(self, name: str, attributes: dict[str, str]) -> None:
        self._start(name, attributes)
        name = name.rpartition(":")[2]
        if name == "row":
            self._all += self._cells
            self._cells = 0
            if self._all > MAX_CELLS:
                raise too_many_cells()
        elif name == "c":
            self._cells += 1
            column = attributes.get("r", "").rstrip("0123456789")
            if self._cells > MAX_COLUMNS or len(column) > 3 or (len(column) == 3 and column.upper() > "XFD"):
                raise Unreadable(f"A sheet has more than {MAX_COLUMNS:,} columns, the most that Excel has. Split it.")

            if column:
                self._cells = max(self._cells, _number(column))

    def _entity(self, *declared: object) -> None:
        raise Unreadable("The file declares XML entities, which office files have no use for. Save it anew.")


def _number(column: str) -> int:
    """A column's letters as a number, from 1."""
    number = 0
    for letter in column.upper():
        number = 26 * number + ord(letter) - ord("A") + 1
    return number


def too_many_cells() -> Unreadable:
    return Unreadable(f"The sheets have more than {MAX_CELLS:,} cells, empty ones between others included. Split them.")


def check_page(source: str) -> None:
    """Look at the HTML of a page.

    Raises:
        Unreadable: an element has too many attributes.
    """
    for tag in _TAG.finditer(source):
        if tag.end() - tag.start() > _LONG and len(_VALUE.sub(" ", tag[0]).split()) > MAX_ATTRIBUTES:
            raise too_many_attributes()


def too_many_attributes() -> Unreadable:
    return Unreadable(f"An element of the file has more than {MAX_ATTRIBUTES:,} attributes; no document needs them.")


_NO_TEXT = "The page has no text besides scripts and markup."
KEPT = 0.3  # of a page's text: a main part that is less is not taken for the main part
_LEFT = (
    "//script|//style|//noscript|//template|//nav|//iframe|//object|//svg|//dialog|//body/footer|//*[@hidden]"
    "|//body//*[contains(translate(@style, ' ', ''), 'display:none')]"
)
_CHARSET = re.compile(rb"(?:charset|encoding)\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_IMAGE = re.compile(r"!\[([^\[\]\n]*)\]\([^()\n]*\)")
_ESCAPE = re.compile(r"\\([*_`~\[\]<])")
PLAIN: dict[str, Any] = {
    "escape_underscores": False,
    "escape_asterisks": False,
    "strip": ["a"],
}  # elements that markdownify converts


def parse(data: bytes) -> Parsed:
    """
    Raises:
        Unreadable: there is no text in it.
    """
    declared = _CHARSET.search(data[:4096])
    source, faults = decode(data, declared[1].decode() if declared else None)
    check_page(source)
    parser = html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True)
    try:
        page = html.document_fromstring(source.encode(), parser=parser)
    except etree.LxmlError:  # there is not even an element
        raise Unreadable(_NO_TEXT) from None
    for element in page.xpath(_LEFT):
        if element.getparent() is not None:
            element.drop_tree()
    body = page.find("body")
    whole = " ".join(body.text_content().split()) if body is not None else ""
    if not whole:
        raise Unreadable(_NO_TEXT)
    name = page.findtext(".//title") or ""
    headings = _names(each.text_content() for each in page.xpath("//h1|//h2|//h3"))
    everything = html.tostring(page, encoding="unicode")  # before trafilatura changes the tree
    text = trafilatura.extract(page, output_format="markdown", include_comments=False, favor_recall=True) or ""
    lost = headings and not headings & _names(heading.title for heading in outline(text).headings)
    text = markdown(everything) if lost or len(text) < KEPT * len(whole) else _unescaped(text)
    name = " ".join(clean(name).split()) or title(text)
    return Parsed(clean(text), name, "markdown", HTML, (), faults)


def markdown(source: str) -> str:
    """All of a page as Markdown."""
    return without_images(HtmlConverter().convert_string(source, strict=True, **PLAIN).markdown)


def without_images(text: str) -> str:
    """Markdown where a picture is the text that stands for it."""
    return _IMAGE.sub(r"\1", text)


def _names(headings: Iterable[str]) -> set[str]:
    """Headings without markup, by their words."""
    return {" ".join(re.findall(r"\w+", heading)) for heading in headings}


def _unescaped(text: str) -> str:
    """Markdown as a reader would write it, without a mark before every `_`; code has none."""
    made, at = list[str](), 0
    for start, end in (*outline(text).fences, (len(text), len(text))):
        made += [_ESCAPE.sub(r"\1", text[at:start]), text[start:end]]
        at = end
    return "".join(made)
