"""The work of finding a page's main text, in a worker's process: trafilatura, on HTML that anybody may have written.

Knows nothing of fetching, or of the fallback.
"""

from __future__ import annotations

import trafilatura


def answer(source: str) -> str | None:
    """The main text of HTML as Markdown; None where there is none to be found."""
    text: str | None = trafilatura.extract(source, output_format="markdown", include_comments=False, favor_recall=True)
    return text
