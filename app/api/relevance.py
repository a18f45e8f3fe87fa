"""The served model as a judge of relevance: how much likelier it says yes than no to "does this text answer?".

The texts share the prompt up to the question, whose K/V is computed once; nothing is generated. Retrieval gets it as a
plain function.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.served import Served

QUESTION = "Does this text answer the question? Reply yes or no.\n\nQuestion: {query}\n\nText: {text}"
LONGEST = 4000  # characters of a text that are read
AT_ONCE = 8  # texts scored together: as many as leave room for people who chat


class Relevance:
    """A `retrieval.search.Scorer`, to be called from a thread that is not the loop's."""

    def __init__(self, served: Served, tenant: str, loop: asyncio.AbstractEventLoop) -> None:
        self._served = served
        self._tenant = tenant
        self._loop = loop
        tokenizer = served.engine.tokenizer
        self._answers = [tokenizer.encode("yes"), tokenizer.encode("no")]
        self._room = asyncio.Semaphore(AT_ONCE)

    def __call__(self, query: str, texts: Sequence[str]) -> list[float]:
        """For each text log p(yes) - log p(no)."""
        return asyncio.run_coroutine_threadsafe(self._scores(query, texts), self._loop).result()

    async def _scores(self, query: str, texts: Sequence[str]) -> list[float]:
        return list(await asyncio.gather(*(self._score(query, text) for text in texts)))

    async def _score(self, query: str, text: str) -> float:
        asked = QUESTION.format(query=query, text=text[:LONGEST])
        variables = {"enable_thinking": False} if self._served.markers else {}
        prompt = await self._served.chat_tokens([{"role": "user", "content": asked}], variables)
        async with self._room, await self._served.engine.open(prompt, tenant=self._tenant) as sequence:
            yes, no = await sequence.score(self._answers)
        return sum(yes) - sum(no)
