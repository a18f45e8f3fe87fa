"""Memory in a run: the notes that its prompt begins with, and those that its question adds.

All notes are given while they are few, else those nearest to the questions of the chat. They follow the system prompt
in the order of their numbers, so that a prompt begins as the one before it did. Knows nothing of tables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from app.config import Settings
from app.db.memory_store import KeptNote, Memory, MemoryFull, MemoryOff, NoteInPrompt, Origin
from app.db.sqlite import NotThere, Row
from app.middleware import is_loopback
from app.runs.stated_facts import attribute_of, stated_facts
from tools.builtin.notes import Note, NoteError

if TYPE_CHECKING:
    from app.runs.prompt_builder import History
    from retrieval.embedding import Embedder

FEW = 20  # notes: no more are given to a model
SHARE, MAX_TOKENS = 1 / 8, 1000  # of the model's context that notes may take, and tokens
HEADING = "The user has said about themselves in earlier chats:"
_WORDS_WEIGHT = 0.5  # of shared words, beside the cosine
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "a an and are at be by can could did do does for from have how i in is it me my of on or so that the this to "
        "we what when where which who why will with would you your ich mein meine was wie wo wer und der die das ist",
    )
)


def keeps_memory(settings: Settings) -> bool:
    """Returns whether a server has memory: in `auto`, where each user is known, or only this machine can reach it."""
    if settings.memory == "auto":
        return settings.auth == "keys" or is_loopback(settings.host)
    return settings.memory == "on"


@dataclass(frozen=True, slots=True)
class RunMemory:
    """The memory of one run: the notes that its prompt may have, and the question that may add to them.

    `message_id`: of a new question; None for one that is answered again.
    """

    memory: Memory
    embedder: Embedder | None
    user: str
    chat_id: str
    notes: Sequence[NoteInPrompt]
    message_id: str | None

    def added_to(self, history: History, count: Callable[[str], int], max_tokens: int) -> History:
        """Returns the history with notes after its system prompt, in a thread. `count` tells a text's tokens."""
        room = min(MAX_TOKENS, int(SHARE * max_tokens)) - count(HEADING)
        sized = [(note, count(_line(note)) + 1) for note in self.notes]
        if len(sized) > FEW or sum(size for _, size in sized) > room:
            questions = [message["content"] for message in history.plain if message["role"] == "user"]
            sizes = {note.number: size for note, size in sized}
            sized = []
            for note in rank(self.notes, questions, self.embedder):
                if sizes[note.number] <= room:
                    sized.append((note, sizes[note.number]))
                    room -= sizes[note.number]
        if not sized:
            return history
        text = "\n".join([HEADING, *(_line(note) for note, _ in sorted(sized, key=lambda each: each[0].number))])
        messages, plain = (_after_system(each, text) for each in (history.messages, history.plain))
        return replace(history, messages=messages, plain=plain)

    async def keep_stated(self, question: str) -> tuple[list[KeptNote], bool]:
        """Keeps the facts that a new question states; returns those that are new, and whether others found no room."""
        kept = list[KeptNote]()
        if self.message_id is None:
            return kept, False
        origin = Origin("stated", self.chat_id, self.message_id)
        for fact in stated_facts(question):
            try:
                kept.append(await self.memory.keep(self.user, fact.text, fact.attribute, origin))
            except MemoryFull:
                return [note for note in kept if note.new], True
            except (MemoryOff, NotThere):  # switched off, or the chat deleted, since the run began
                break
        return [note for note in kept if note.new], False


def _line(note: NoteInPrompt) -> str:
    return f"- {' '.join(note.text.split())}"


def _after_system(messages: Sequence[Row], text: str) -> list[Row]:
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def rank(notes: Sequence[NoteInPrompt], questions: Sequence[str], embedder: Embedder | None) -> list[NoteInPrompt]:
    """Returns the `FEW` notes that fit the questions best: for each question a share, the newest question first."""
    rows = [_scores(question, notes, embedder) for question in reversed(questions[-8:])]
    orders = [[at for *_, at in sorted((-row[at], -notes[at].number, at) for at in range(len(notes)))] for row in rows]
    chosen = dict[int, None]()
    for place in range(len(notes)):
        for order in orders:
            chosen.setdefault(order[place])
            if len(chosen) == FEW:
                return [notes[at] for at in chosen]
    return [notes[at] for at in chosen]


def _scores(question: str, notes: Sequence[NoteInPrompt], embedder: Embedder | None) -> list[float]:
    asked = _words(question)
    shared = [len(asked & _words(note.text)) / math.sqrt(len(asked) or 1) for note in notes]
    if embedder is None:
        return shared
    near = embedder.embed([note.text[:500] for note in notes]) @ embedder.embed_query(question[:500])[0]
    return [float(score) for score in np.asarray(near) + _WORDS_WEIGHT * np.array(shared)]


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"\w+", text.casefold()) if word not in _COMMON}


class MemoryNotes:
    """The store of the notes' tools: a user's memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def remember(self, user: str, text: str, chat: str | None) -> Note:
        """
        Raises:
            NoteError: memory is off there, or full.
        """
        text = " ".join(text.replace("\0", "").split())
        if not text:
            raise NoteError("A note has 1 to 2,000 characters; this one has 0.")
        try:
            kept = self._memory.keep_now(user, text, attribute_of(text), Origin("tool", chat))
        except (MemoryOff, MemoryFull, NotThere) as error:
            raise NoteError(str(error)) from None
        return Note(kept.number, text, _day(datetime.now(UTC).timestamp()), kept.replaced)

    def recall(self, user: str, words: str, count: int, chat: str | None) -> list[Note]:
        """
        Raises:
            NoteError: memory is off there.
        """
        asked = _words(words)
        notes = [(len(asked & _words(note.text)), note) for note in self.all(user, chat)]
        found = sorted((each for each in notes if each[0]), key=lambda each: (-each[0], -each[1].number))
        return [note for _, note in found[:count]]

    def forget(self, user: str, number: int, chat: str | None) -> Note:
        """
        Raises:
            NoteError: there is no such note, or memory is off there.
        """
        try:
            return _note(self._memory.erase_now(user, number, chat))
        except NotThere:
            raise NoteError(f"There is no note {number}; list_notes tells which there are.") from None
        except MemoryOff as error:
            raise NoteError(str(error)) from None

    def all(self, user: str, chat: str | None) -> list[Note]:
        """The newest first.

        Raises:
            NoteError: memory is off there.
        """
        try:
            return [_note(row) for row in reversed(self._memory.all_now(user, chat))]
        except (MemoryOff, NotThere) as error:
            raise NoteError(str(error)) from None


def _note(row: Row) -> Note:
    return Note(row["number"], row["text"], _day(row["changed_at"]))


def _day(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
