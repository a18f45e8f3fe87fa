"""HTML: the main text as Markdown by trafilatura, scripts and styles left behind."""

from __future__ import annotations

import trafilatura

from retrieval.parsing.parsed import Fault, Parsed, Unreadable
from retrieval.parsing.sniff import HTML
from retrieval.parsing.text import heading


def parse(source: str, faults: tuple[Fault, ...] = ()) -> Parsed:
    """
    Raises:
        Unreadable: there is no text in it.
    """
    text = trafilatura.extract(
        source, output_format="markdown", include_tables=True, favor_recall=True, deduplicate=False
    )
    if not text or not text.strip():
        text = trafilatura.html2txt(source)
    if not text or not text.strip():
        raise Unreadable("The page has no text besides scripts and markup.")
    found = trafilatura.extract_metadata(source)
    title = (found.title if found else None) or heading(text) or ""
    return Parsed(text, title.strip(), "markdown", HTML, (), faults)
