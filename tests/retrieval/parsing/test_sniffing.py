"""Tests what a file is: bytes before names, and a name that contradicts them is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from retrieval.parsing import sniff
from retrieval.parsing.parsed import Unreadable
from tests.retrieval import made

Write = Callable[[str, str | bytes], Path]
PDF, DOCX = made.pdf([["Text."]]), made.docx(("", "Text."))
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.pdf", PDF, sniff.PDF),
        ("a.PDF", b"HTTP/1.1 200 OK\r\n\r\n" + PDF, sniff.PDF),
        ("paper", PDF, sniff.PDF),
        ("paper.v2", PDF, sniff.PDF),
        ("a.docx", DOCX, sniff.DOCX),
        ("a.pptx", made.pptx(("a", "b")), sniff.PPTX),
        ("a.xlsx", made.xlsx(A=[["a"]]), sniff.XLSX),
        ("a.html", b"text", sniff.HTML),
        ("page", b"\xef\xbb\xbf \n<!DOCTYPE html><p>x", sniff.HTML),
        ("page.txt", "<html>".encode("utf-16"), sniff.HTML),
        ("a.php", b"<html><?php ?>", sniff.CODE),
        ("a.md", b"# a", sniff.MARKDOWN),
        ("a.tsv", b"a\tb", sniff.CSV),
        ("a.csv", b"MZ,intensity\n1,2\n", sniff.CSV),
        ("a.csv", b"ID3,ID4\n1,2\n", sniff.CSV),
        ("a.txt", "Größe".encode("utf-16"), sniff.PLAIN),
        ("a.txt", "Größe".encode("latin-1"), sniff.PLAIN),
        ("Makefile", b"all:\n\ttrue\n", sniff.PLAIN),
        ("../../etc/x.rs", b"fn main() {}", sniff.CODE),
    ],
)
def test_a_file_is_known_by_its_bytes_then_its_name(write: Write, name: str, content: bytes, expected: str) -> None:
    assert sniff.media_type(write("upload", content), name) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.pdf", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a PNG picture.*What can be read: PDF, DOCX"),
        ("a.txt", PDF, "content is PDF, but the name ends in .txt. Rename"),
        ("a.pdf", DOCX, "content is DOCX, but the name ends in .pdf"),
        ("a.py", DOCX, "content is DOCX, but the name ends in .py"),
        ("a.pdf", b"only text", "content is not PDF"),
        ("a.docx", b"only text", "content is not DOCX"),
        ("a", b"\x7fELF\2\1\1" + bytes(60), "a program"),
        ("a.exe", b"MZ\x90\0\3\0\0\0", "a program"),
        ("a.md", b"text" + bytes(9), "binary data"),
        ("report.doc", OLE, "before 2007 \\(.doc\\) are not read. Save it as DOCX"),
        ("report.xls", OLE, "Save it as XLSX"),
        ("report.docx", OLE, "encrypted, or .* without a password"),
        ("a.txt", b"{\\rtf1 text}", "RTF. Save it as DOCX"),
        ("a.zip", b"PK\x03\x04" + bytes(30), "damaged or was cut off"),
        ("a.docx", DOCX[:-50], "damaged or was cut off"),
    ],
)
def test_what_is_not_read_is_refused_with_what_would_be(write: Write, name: str, content: bytes, message: str) -> None:
    with pytest.raises(Unreadable, match=message):
        sniff.media_type(write("upload", content), name)
