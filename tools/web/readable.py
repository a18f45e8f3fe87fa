"""What a person would read of a response's bytes: the main text of a page, or plain text as it is.

Knows nothing of where the bytes came from. trafilatura takes a second to import, so it is imported when first needed.
"""

from __future__ import annotations

import codecs
import html
import re
from dataclasses import dataclass

LONGEST_HTML = 500_000  # characters given to the extractor: a page made to be slow takes some seconds for so many
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
# No pattern here looks for its end more than once: a page of half tags costs no more than another.
# Codecs of Python's that are no web page's, and whose decoding can be slow or run through a second alphabet.
_STRANGE = frozenset({"idna", "punycode", "unicode_escape", "raw_unicode_escape", "utf-7", "undefined", "mbcs", "oem"})


@dataclass(frozen=True, slots=True)
class Reading:
    title: str
    text: str
    cut: bool = False  # the page was longer than is read


def is_textual(media_type: str) -> bool:
    """Whether a media type, without parameters, is one of text."""
    return media_type.startswith("text/") or media_type in _TEXTUAL or media_type.endswith(("+json", "+xml", "+yaml"))


def read(data: bytes, media_type: str, charset: str = "") -> Reading:
    """Title and text of what was fetched; `charset` is what the response said, if anything."""
    source = decode(data, charset)
    if media_type not in _HTML:
        return Reading("", _CONTROL.sub("", source).strip())
    found = _TITLE.search(source)
    title = " ".join(html.unescape(found[1]).split())[:300] if found else ""
    return Reading(title, _CONTROL.sub("", _main_text(source[:LONGEST_HTML])).strip(), len(source) > LONGEST_HTML)


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


def _main_text(source: str) -> str:
    import trafilatura

    try:
        text = trafilatura.extract(source, output_format="markdown", include_comments=False, favor_recall=True)
    except Exception:  # whatever a hostile page makes of the extractor, its words remain
        text = None
    return text or plain(source)


def plain(source: str) -> str:
    """All the words of a page, one line for each block."""
    text = html.unescape(_TAG.sub("", _BLOCK.sub("\n", _UNSEEN.sub(" ", _COMMENT.sub("", source)))))
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)
