"""Extracts a response's readable text: the main text of a page, or plain text as it is.

A page's main text is found in a process beside the server, for a page may be made to be slow, to swell or to crash its
parser. Then all its words are given instead, by a few expressions that take no longer for one page than for another.
Knows nothing of where the bytes came from.
"""

from __future__ import annotations

import codecs
import html
import logging
import re
from dataclasses import dataclass

from tools.calling import in_thread
from tools.workers.process_pool import ProcessPool, WorkerFailed

MAX_HTML_LENGTH = 500_000  # characters given to the extractor
EXTRACT_S = 5.0
EXTRACT_BYTES = 512 << 20  # of memory, beyond the extractor itself
log = logging.getLogger("ponder")

_HTML = ("text/html", "application/xhtml+xml")
_TEXTUAL = frozenset(
    {
        "application/ecmascript",
        "application/javascript",
        "application/json",
        "application/ld+json",
        "application/rtf",
        "application/sql",
        "application/toml",
        "application/x-ndjson",
        "application/x-sh",
        "application/x-yaml",
        "application/xml",
        "application/yaml",
    }
)
_META = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
_TITLE = re.compile(r"<title[^<>]{0,500}>([^<]{0,2000})</title", re.IGNORECASE)
_UNSEEN = re.compile(r"<(script|style|noscript|template|svg|head)\b.*?(?:</\1\s*>|\Z)", re.IGNORECASE | re.DOTALL)
_BLOCK = re.compile(r"<(?:/?(?:p|div|li|tr|h[1-6]|section|article|table|ul|ol|pre)|br)\b[^<>]*>", re.IGNORECASE)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_TAG = re.compile(r"<[^<>]*>")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
# No pattern here looks for its end more than once: a page of half tags costs no more than another. Codecs of Python's
# that are no web page's, and that can be slow or run through a second alphabet.
_STRANGE = frozenset({"idna", "punycode", "unicode_escape", "raw_unicode_escape", "utf-7", "undefined", "mbcs", "oem"})


@dataclass(frozen=True, slots=True)
class ReadablePage:
    title: str
    text: str
    cut: bool = False  # the page was longer than is read


def is_textual(media_type: str) -> bool:
    """Returns whether a media type, without parameters, is one of text."""
    return media_type.startswith("text/") or media_type in _TEXTUAL or media_type.endswith(("+json", "+xml", "+yaml"))


class PageReader:
    """Reads pages, two at a time. `close` it: it has processes from the first page of HTML on."""

    def __init__(self, *, timeout_s: float = EXTRACT_S, memory_bytes: int = EXTRACT_BYTES) -> None:
        self._workers = ProcessPool("tools.web.extraction", timeout_s=timeout_s, memory_bytes=memory_bytes, count=2)

    async def read(self, data: bytes, media_type: str, charset: str = "") -> ReadablePage:
        """Title and text of the fetched bytes; `charset` is the response's, if it has one."""
        source = await in_thread(lambda: decode(data, charset))
        if media_type not in _HTML:
            return ReadablePage("", await in_thread(lambda: _CONTROL.sub("", source).strip()))
        page = source[:MAX_HTML_LENGTH]
        try:
            found: object = await self._workers.ask(page)
        except (WorkerFailed, ValueError) as error:  # even if a page breaks the extractor, its words remain
            log.info("The main text of a page was not found: %s", error)
            found = None
        text = found if isinstance(found, str) and found else await in_thread(lambda: plain(page))
        return ReadablePage(_title(source), _CONTROL.sub("", text).strip(), len(source) > MAX_HTML_LENGTH)

    def close(self) -> None:
        self._workers.close()


def decode(data: bytes, charset: str = "") -> str:
    """Text by its byte order mark, else by the response's word, else by the page's own, else UTF-8 or Windows-1252."""
    declared = _META.search(data[:4096])
    said = [name for mark, name in _BOMS if data.startswith(mark)] + [charset, declared[1].decode() if declared else ""]
    for name in said:
        try:
            codec = codecs.lookup(name)
        except (LookupError, ValueError):
            continue
        if codec.name not in _STRANGE and codec._is_text_encoding:
            return data.decode(codec.name, "replace")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        # A cut page may end within a character.
        cut = error.start >= len(data) - 3 and error.reason == "unexpected end of data"
        return data.decode("utf-8" if cut else "cp1252", "replace")


def _title(source: str) -> str:
    found = _TITLE.search(source)
    return " ".join(html.unescape(found[1]).split())[:300] if found else ""


def plain(source: str) -> str:
    """All the words of a page, one line for each block."""
    text = html.unescape(_TAG.sub("", _BLOCK.sub("\n", _UNSEEN.sub(" ", _COMMENT.sub("", source)))))
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)
