"""A person's documents for a model: search them, read around a place, find a string, list them.

Each is the user's own way through the library, so nobody reads documents they may not. Every excerpt is cited. Knows
nothing of how documents are found: retrieval does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from pydantic import Field

from ponder import Context, Retry, Source, tool
from retrieval import BadQuery, NotFound
from retrieval.browse import Browser, Excerpt

T = TypeVar("T")


@tool(permission="read", timeout=20)
def search_documents(ctx: Context, query: str, limit: Annotated[int, Field(ge=1, le=20)] = 3) -> str:
    """Search the user's documents for passages that answer a question.

    Args:
        query: the question, or words.
        limit: the most passages to give.
    """
    return _rendered(ctx, _tried(lambda: ctx.get(Browser).search(query, limit)), "No document says anything of it.")


@tool(permission="read", timeout=20)
def open_document(ctx: Context, document: int, start: Annotated[int, Field(ge=0)] = 0) -> str:
    """Read what stands around a place of a document.

    Args:
        document: its number, as search_documents gives it.
        start: the character to read around.
    """
    return _rendered(ctx, [_tried(lambda: ctx.get(Browser).open(document, start))], "")


@tool(permission="read", timeout=20)
def find_in_documents(ctx: Context, text: str, document: int | None = None) -> str:
    """Find where exact words stand in the user's documents.

    Args:
        text: the words, as they are written there.
        document: the number of the only document to look in.
    """
    return _rendered(ctx, _tried(lambda: ctx.get(Browser).find(text, document)), "These words stand nowhere.")


@tool(permission="read", timeout=20)
def list_documents(ctx: Context, after: Annotated[int, Field(ge=0)] = 0) -> str:
    """List the user's documents, the newest first.

    Args:
        after: how many of the newest to leave out.
    """
    held = ctx.get(Browser).list(after)
    return "\n".join(f"{each.id}: {each.title}, {each.characters:,} characters" for each in held) or "There are none."


def _tried(look: Callable[[], T]) -> T:
    try:
        return look()
    except (BadQuery, NotFound) as error:
        raise Retry(str(error)) from None


def _rendered(ctx: Context, found: Sequence[Excerpt], nothing: str) -> str:
    """Excerpts by the numbers they are cited with."""
    lines = []
    for each in found:
        number = ctx.cite(
            Source(each.title, text=each.text, document=each.document, page=each.page, start=each.start, end=each.end)
        )
        where = f"document {each.document}, character {each.start}" + (f", page {each.page}" if each.page else "")
        lines.append(f"[S{number}] {' '.join(each.text.split())} ({each.title}; {where})")
    return "\n".join(lines) or nothing
