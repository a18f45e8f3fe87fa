"""Titles of chats by the model: after a first exchange, when the engine is idle.

A title replaces the one that the first question gave, and none that a person gave. Text that is no title (sentences,
too long, nothing) is dropped. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from contextvars import Context
from dataclasses import dataclass

from app.answering.served_model import ServedModel
from app.db.run_store import question_title
from app.db.store import Store
from app.errors import ApiError
from engine.errors import ChatTemplateError, EngineError
from engine.params import GREEDY, Span

log = logging.getLogger("ponder")

MAX_WAITING = 16  # chats; the oldest is dropped for one more
MAX_WORDS, MAX_CHARACTERS, MAX_TOKENS = 8, 60, 24
PRIORITY = 1000  # below all requests
LOOK_S = 0.1  # between two looks at a busy engine
_EXCERPT = 1_500  # characters of a question and of an answer
_ASK = "Give this conversation a title of two to six words, in its language. Write only the title."
_PREFIX = re.compile(r"^(?:title|titel)\s*:\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FirstExchange:
    """A chat's first question with its answer, and the model that gave it."""

    served: ServedModel
    user: str
    chat_id: str
    question: str
    answer: str


class TitleWriter:
    """Writes the titles of chats, one at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[FirstExchange] = deque(maxlen=MAX_WAITING)
        self._task: asyncio.Task[None] | None = None

    def answered(self, exchange: FirstExchange) -> None:
        """Writes a title for its chat, when the engine is idle."""
        self._waiting.append(exchange)
        if self._task is None or self._task.done():
            # Without the request's context: its budget has ended, and nothing here counts for it.
            self._task = asyncio.get_running_loop().create_task(self._write(), name="titles", context=Context())

    async def close(self) -> None:
        """Writes no more."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _write(self) -> None:
        while self._waiting:
            engine = self._waiting[0].served.engine
            while engine.busy and engine.healthy:
                await asyncio.sleep(LOOK_S)
            if not self._waiting:
                return
            exchange = self._waiting.popleft()
            try:
                title = title_in(await _written(exchange))
            except (ApiError, ChatTemplateError, EngineError) as refusal:
                log.debug("A chat gets no title: %s", refusal)
                continue
            if title is not None:
                await self._store.chats.entitle(
                    exchange.user, exchange.chat_id, question_title(exchange.question), title
                )


async def _written(exchange: FirstExchange) -> str:
    served = exchange.served
    messages = [
        {"role": "user", "content": exchange.question[:_EXCERPT]},
        {"role": "assistant", "content": exchange.answer[:_EXCERPT]},
        {"role": "user", "content": _ASK},
    ]
    prompt = await served.chat_tokens(messages, {"enable_thinking": False})
    stops = () if served.markers is None else (served.markers.opening, served.markers.closing)
    async with await served.engine.open(prompt, tenant=exchange.user, priority=PRIORITY) as sequence:
        return (await sequence.generate_all(Span(GREEDY, MAX_TOKENS, stop_token_ids=stops))).text


def title_in(written: str) -> str | None:
    """Returns the title that a model wrote, without what stands around it; None where that is no title."""
    lines = [line for line in written.strip().split("\n") if line.strip()]
    if not lines:
        return None
    text = _PREFIX.sub("", lines[0].strip().strip("#*_ ")).strip("\"'“”„«»*_ ").rstrip(".,;:!… ")
    words = text.split()
    if not 2 <= len(words) <= MAX_WORDS or len(text) > MAX_CHARACTERS or re.search(r"[.!?`<>]\s|[`<>\[\]{}]", text):
        return None
    return " ".join(words)
