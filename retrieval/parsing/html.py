"""HTML as Markdown: the main text by trafilatura, or the whole page where that would lose much of it.

Scripts, styles, menus and what is not shown stay behind either way, and links are their text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import trafilatura
from lxml import etree, html
from markitdown.converters import HtmlConverter

from retrieval.parsing.markdown import outline, title
from retrieval.parsing.markup import check_page
from retrieval.parsing.parsed import Parsed, Unreadable
from retrieval.parsing.sniff import HTML
from retrieval.parsing.text import clean, decode

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
}  # what markdownify takes


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
    """Headings without what marks their letters."""
    return {" ".join(re.findall(r"\w+", heading)) for heading in headings}


def _unescaped(text: str) -> str:
    """Markdown as a reader would write it, without a mark before every `_`; code has none."""
    made, at = list[str](), 0
    for start, end in (*outline(text).fences, (len(text), len(text))):
        made += [_ESCAPE.sub(r"\1", text[at:start]), text[start:end]]
        at = end
    return "".join(made)
