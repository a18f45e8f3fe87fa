"""Contents of a shared chat's file: its current branch, and what each answer rests on. Knows nothing of forms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from app.data.database import Row
from app.data.run_rows import LoggedEvent
from app.data.steps import Step
from app.data.tree import Tree
from app.runs.events import SourceShown

if TYPE_CHECKING:
    from app.store import Store


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, or an answer. `remark` says what is to be known of how it ended, if anything."""

    role: str
    content: str
    thinking: str = ""
    thinking_s: float | None = None
    steps: Sequence[Step] = ()
    sources: Sequence[SourceShown] = field(default=())
    remark: str = ""

    @property
    def thought(self) -> str:
        """Time that it thought, in words."""
        return "Thought" if self.thinking_s is None else f"Thought for {self.thinking_s:.1f} s"


@dataclass(frozen=True, slots=True)
class Told:
    title: str
    begun: datetime
    turns: list[Turn]


async def told(store: Store, user: str, chat_id: str) -> Told:
    """
    Raises:
        NotThere: the user has no such chat.
    """
    chat, messages = await store.chats.whole(user, chat_id)
    turns = []
    for message in Tree(messages).branch(chat["leaf_id"]):
        events = [] if message["run_id"] is None else await store.runs.events(message["run_id"])
        turns.append(_turn(message, events))
    return Told(chat["title"] or "Untitled chat", datetime.fromtimestamp(chat["created_at"], UTC), turns)


def _turn(message: Row, events: Sequence[LoggedEvent]) -> Turn:
    remarks = {
        "running": "This answer was still being written.", "cancelled": "This answer was stopped.",
        "failed": f"This answer failed. {message['error'] or ''}".strip(),
    }  # fmt: skip
    return Turn(
        message["role"], message["content"], message["thinking"], message["thinking_s"], message["steps"],
        _sources(events), remarks.get(message["status"], ""),
    )  # fmt: skip


def _sources(events: Sequence[LoggedEvent]) -> list[SourceShown]:
    """Those that the answer names; all that were found where it names none."""
    found = [json.loads(event.data) for event in events if event.type == "citation.sources"]
    refs = [json.loads(event.data) for event in events if event.type == "citation.ref"]
    sources = [SourceShown(**source) for each in found if each["verdict"] != "none" for source in each["sources"]]
    named = {citation["label"] for ref in refs for citation in ref["citations"]}
    return [source for source in sources if source.label in named] or sources
