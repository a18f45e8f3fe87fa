"""Detects a file's media type by its first bytes; its name only decides among kinds of text.

A name that contradicts the bytes is refused rather than obeyed: the name may be wrong.
"""

from __future__ import annotations

import codecs
import zipfile
from pathlib import Path, PurePosixPath

from retrieval.parsing.parsed import Unreadable

PDF = "application/pdf"
DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
PPTX = "application/vnd.openxmlformats-officedocument.presentationml.presentation"
XLSX = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"
HTML, MARKDOWN, CSV, CODE, PLAIN = "text/html", "text/markdown", "text/csv", "text/x-code", "text/plain"

ACCEPTED = "PDF, DOCX, PPTX, XLSX, HTML, Markdown, CSV, plain text and source code"
_BY_SUFFIX = {
    ".pdf": PDF, ".docx": DOCX, ".pptx": PPTX, ".xlsx": XLSX,
    ".html": HTML, ".htm": HTML, ".xhtml": HTML,
    ".md": MARKDOWN, ".markdown": MARKDOWN, ".mdx": MARKDOWN,
    ".csv": CSV, ".tsv": CSV,
    ".txt": PLAIN, ".text": PLAIN, ".log": PLAIN, ".rst": PLAIN,
}  # fmt: skip
_CODE = frozenset(
    [
        "py", "pyi", "js", "jsx", "ts", "tsx", "svelte", "vue", "java", "kt", "kts", "c", "h", "cc",
        "cpp", "cxx", "hpp", "cs", "go", "rs", "rb", "php", "swift", "scala", "sh", "bash", "zsh",
        "ps1", "sql", "r", "jl", "lua", "pl", "pm", "ex", "exs", "erl", "hs", "ml", "clj", "dart",
        "zig", "css", "scss", "less", "json", "jsonl", "yaml", "yml", "toml", "ini", "cfg", "conf",
        "xml", "tex", "bib", "cu", "cuh", "m", "mm", "f90", "asm", "s", "proto", "graphql", "tf",
        "dockerfile",
    ]
)  # fmt: skip
_OLD = {".doc": "DOCX", ".xls": "XLSX", ".ppt": "PPTX", ".dot": "DOCX", ".pps": "PPTX"}
_OFFICE = {"word/document.xml": DOCX, "ppt/presentation.xml": PPTX, "xl/workbook.xml": XLSX}
_NAMES = {PDF: "PDF", DOCX: "DOCX", PPTX: "PPTX", XLSX: "XLSX"}
_FOREIGN = (
    (b"\x7fELF", "a program"), (b"MZ", "a program"), (b"\x89PNG", "a PNG picture"), (b"\xff\xd8\xff", "a JPEG picture"),
    (b"GIF8", "a GIF picture"), (b"\x1f\x8b", "a gzip archive"), (b"Rar!", "a RAR archive"),
    (b"7z\xbc\xaf", "a 7z archive"), (b"ID3", "sound"), (b"OggS", "sound"), (b"SQLite format 3", "a SQLite database"),
)  # fmt: skip
_WIDE = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")  # how UTF-16 and UTF-32 begin: they are text with zero bytes


def media_type(path: Path, name: str) -> str:
    """The media type of a file that was called `name`.

    Raises:
        Unreadable: it is empty, of a kind that is not read, or of another kind than its name says.
    """
    with path.open("rb") as file:
        head = file.read(4096)
    if not head:
        raise Unreadable("The file is empty.")
    suffix = PurePosixPath(name.lower()).suffix
    if suffix in _OLD:
        raise Unreadable(f"Office files from before 2007 ({suffix}) are not read. Save it as {_OLD[suffix]}.")
    named = CODE if suffix[1:] in _CODE else _BY_SUFFIX.get(suffix)
    found = _by_bytes(path, head, named)
    if found is None:
        if named in _NAMES:
            raise Unreadable(
                f"The name ends in {suffix}, but the content is not {_NAMES[named]}. Was it damaged or renamed?"
            )
        if named in (None, PLAIN):
            return HTML if _is_html(head) else PLAIN
        return named
    if named not in (None, found):
        raise Unreadable(f"The content is {_NAMES[found]}, but the name ends in {suffix}. Rename it and send it again.")
    return found


def _by_bytes(path: Path, head: bytes, named: str | None) -> str | None:
    """The kind of a file that is not text; None for text."""
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"%PDF-") or (named == PDF and b"%PDF-" in head[:1024]):
        return PDF
    if head.startswith(b"PK\x03\x04"):
        return _office(path)
    if head.startswith(b"\xd0\xcf\x11\xe0"):
        raise Unreadable(
            "The file is encrypted, or in the format of Office before 2007. "
            "Save it without a password as DOCX, PPTX or XLSX."
        )
    if head.startswith(b"{\\rtf"):
        raise Unreadable("The content is RTF. Save it as DOCX.")
    binary = b"\0" in head and not head.startswith(_WIDE) and unmarked_unicode(head) is None
    for mark, what in _FOREIGN:
        if head.startswith(mark) and (binary or not mark.isascii()):
            raise Unreadable(f"The content is {what}. What can be read: {ACCEPTED}.")
    if binary:
        raise Unreadable(f"The content is binary data. What can be read: {ACCEPTED}.")
    return None


def unmarked_unicode(head: bytes) -> str | None:
    """The encoding of a file that is UTF-16 or UTF-32 without a mark, by its first bytes; None for any other.

    In the right one all characters can be printed and some are spaces or line ends. A space has a zero byte; read in
    the other order it is U+2000, which texts hardly have.
    """
    if b"\0" not in head:
        return None
    best, most = None, 0
    for encoding, width in (("utf-32-le", 4), ("utf-32-be", 4), ("utf-16-le", 2), ("utf-16-be", 2)):
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(head[: len(head) // width * width])
        except UnicodeDecodeError:
            continue
        breaks = sum(map(text.count, " \n"))
        if breaks > most and all(character.isprintable() or character.isspace() for character in text):
            best, most = encoding, breaks
    return best


def _office(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise Unreadable(f"The file is damaged or was cut off: {error}.") from None
    for member, kind in _OFFICE.items():
        if member in names:
            return kind
    raise Unreadable(f"The content is a ZIP archive. Send the files in it one by one. What can be read: {ACCEPTED}.")


def _is_html(head: bytes) -> bool:
    start = head.replace(b"\0", b"").lstrip(b"\xef\xbb\xbf\xff\xfe \t\r\n")[:200].lower()
    return start.startswith((b"<!doctype html", b"<html", b"<head", b"<body"))
