"""Warms the next turn of a chat: after an answer, the prompt that the chat template will make of it is prefilled.

Templates drop the thinking of earlier turns, so the next prompt leaves the tokens in the cache where the thinking
began, and the answer would be read again before the next one begins. The history is rendered with the answer in it and
two different next messages: what both prompts begin with, every next turn begins with. The engine reads it while it has
nothing else to do, and skips the blocks that are cached. Nothing of it counts as use. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.errors import ApiError
from engine.errors import EngineError

if TYPE_CHECKING:
    from engine import Engine

log = logging.getLogger("ponder")

Messages = Sequence[dict[str, Any]]  # as chat templates take them; Any: JSON
Render = Callable[[Messages], Awaitable[list[int]]]

MAX_TURNS = 16  # answers whose next turn waits to be rendered; the oldest is dropped for one more
_LOOK_S = 0.1  # between two looks at a busy engine: rendering would take time from its answers
_NEXT = ("a", "?")  # messages of a user that begin with different tokens


@dataclass(frozen=True, slots=True)
class NextTurn:
    """An answer that was given: `render` makes the prompt of its chat with further messages, and `said` returns the
    answer as the next request will have it. `priority`: class of the answered request."""

    render: Render
    said: Callable[[], Messages]
    tenant: str
    priority: int = 0

    async def shared_prompt(self) -> list[int]:
        """Returns the tokens with which the next prompt begins, whatever the user says. There are none after an
        answer without text, nor where results come first: soon, and templates keep the thinking before them.

        Raises:
            ApiError: the conversation is too long for another turn.
            ChatTemplateError: the template does not take it.
        """
        said = self.said()
        if not said or said[-1]["role"] != "assistant" or said[-1].get("tool_calls") or not said[-1]["content"]:
            return []
        first, other = [await self.render([*said, {"role": "user", "content": text}]) for text in _NEXT]
        same = next((at for at, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]), len(first))
        return first[:same]


class NextTurnWarmer:
    """Warms the next turns of one model's chats, one at a time."""

    def __init__(self, engine: Engine, adapter: str | None = None) -> None:
        self._engine, self._adapter = engine, adapter
        self._turns: deque[NextTurn] = deque(maxlen=MAX_TURNS)
        self._task: asyncio.Task[None] | None = None

    def answered(self, turn: NextTurn) -> None:
        """Warms what follows an answer, when the engine is idle."""
        self._turns.append(turn)
        if self._task is None or self._task.done():
            # Without the request's context: its budget has ended, and nothing here counts for it.
            self._task = asyncio.get_running_loop().create_task(self._warm(), name="next turn", context=Context())

    def close(self) -> None:
        """Warms no more."""
        self._turns.clear()
        if self._task is not None:
            self._task.cancel()

    async def _warm(self) -> None:
        while self._turns:
            while self._engine.busy and self._engine.healthy:
                await asyncio.sleep(_LOOK_S)
            turn = self._turns.popleft()
            try:
                tokens = await turn.shared_prompt()
                self._engine.warm(tokens, tenant=turn.tenant, priority=turn.priority, adapter=self._adapter)
            except (ApiError, EngineError) as refusal:
                log.debug("The next turn is not warmed: %s", refusal)  # it would be refused itself
