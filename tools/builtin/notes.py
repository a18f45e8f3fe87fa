"""Memory between chats: the model keeps notes for a person, and finds them again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ponder import Context, Retry, Toolset, tool
from tools.builtin.notebook import Note, Notebook, NoteError


class Notes(Toolset):
    """Tools over one file of notes; each call sees the notes of its user alone."""

    def __init__(self, path: Path | str) -> None:
        self._path = path

    async def open(self) -> None:
        self.book = await asyncio.to_thread(Notebook, self._path)

    @tool(permission="write", approval="never", timeout=10, rate="30/min", idempotent=True)
    def remember(self, ctx: Context, text: Annotated[str, Field(min_length=1, max_length=2000)]) -> str:
        """Keep a note about the user or their work for later chats.

        Args:
            text: one fact, in a sentence that is understood without this chat.
        """
        try:
            note = self.book.remember(ctx.user, text)
        except NoteError as error:
            raise Retry(str(error)) from None
        return f"Kept as note {note.number}."

    @tool(permission="read", timeout=10, rate="60/min")
    def recall(self, ctx: Context, words: str, count: Annotated[int, Field(ge=1, le=20)] = 5) -> str:
        """Find notes of earlier chats by their words.

        Args:
            words: words that the note may have.
            count: how many notes at most.
        """
        return _listed(self.book.recall(ctx.user, words, count)) or "No note has any of these words."

    @tool(permission="write", timeout=10, rate="30/min")
    def forget(self, ctx: Context, number: int) -> str:
        """Delete a note.

        Args:
            number: its number, as recall and list_notes show it.
        """
        try:
            return f"Forgotten: {self.book.forget(ctx.user, number).text}"
        except NoteError as error:
            raise Retry(str(error)) from None

    @tool(permission="read", timeout=10, rate="60/min")
    def list_notes(self, ctx: Context) -> str:
        """List all notes that are kept for the user, the newest first."""
        return _listed(self.book.all(ctx.user)) or "There are no notes."


def _listed(notes: Iterable[Note]) -> str:
    return "\n".join(f"{note.number}. {note.text} ({note.made[:10]})" for note in notes)
