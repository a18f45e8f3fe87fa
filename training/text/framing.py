"""Results as Ponder's own tools hand them to a model: others' text between marks, and passages with their places.

The same marks and the same tools as in `tools/`, written down here because training knows nothing of servers; a test
holds the two together. Knows nothing of tasks.
"""

from __future__ import annotations

from random import Random

from training.conversation import Tool

SEARCH: Tool = {
    "type": "function",
    "function": {
        "name": "search_documents",
        "description": "Search the user's documents for passages that answer a question.",
        "parameters": {
            "additionalProperties": False,
            "properties": {
                "query": {"description": "the question, or words.", "type": "string"},
                "limit": {
                    "default": 3,
                    "description": "the most passages to give.",
                    "maximum": 20,
                    "minimum": 1,
                    "type": "integer",
                },
            },
            "required": ["query"],
            "type": "object",
        },
    },
}
_TITLES = (
    "notes.txt",
    "report.pdf",
    "guide.md",
    "history.docx",
    "handbook.pdf",
    "letters.txt",
    "minutes.md",
    "faq.html",
)


def frame(text: str, name: str) -> str:
    """Returns text that others may have written, as the result of the tool `name`."""
    return f'<untrusted from="{name}">\n{text}\n</untrusted>'


def often_framed(rng: Random, text: str, name: str, share: float = 0.5) -> str:
    return frame(text, name) if rng.random() < share else text


def placed(rng: Random, line: str) -> str:
    """A labelled passage with its document and place behind it, as the search tool gives it."""
    page = f", page {rng.randint(1, 90)}" if rng.random() < 0.4 else ""
    return f"{line} ({rng.choice(_TITLES)}; document {rng.randint(1, 60)}, character {rng.randint(0, 9000)}{page})"
