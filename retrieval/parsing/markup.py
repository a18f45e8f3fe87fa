"""Markup that is made to harm whoever reads it: XML and HTML are looked at before a tree is made of them.

One pass, which keeps nothing: how deep elements are nested, how many attributes one has, and in a sheet how many cells
are in a row. Knows nothing of what the elements mean.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
import zlib
from pathlib import Path
from xml.parsers import expat

from retrieval.parsing.parsed import Unreadable

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
        # What is damaged is said by whoever reads it for good.
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
