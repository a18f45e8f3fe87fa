"""Visibility of an answer's thinking: all of it, a summary made by a model, or that there was some.

One policy for the whole server, kept here for every API that answers a chat. A user who may open sequences of their own
(`/api/sequences`, `/v1/completions`) reads the model's output there. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from app.answering.served_model import ServedModel
from engine.params import GREEDY, Span
from reasoning.turn import Delta, Reasoning

Policy = Literal["shown", "summarised", "hidden"]
SUMMARY_TOKENS = 96
_ASK = "Summarise these thoughts in one or two short sentences.\n\n{text}"


@dataclass(frozen=True, slots=True)
class Summariser:
    """Asks a model for a summary of a user's (`tenant`) thoughts, of at most `SUMMARY_TOKENS` tokens."""

    served: ServedModel
    tenant: str

    async def __call__(self, text: str) -> str:
        """The summary; empty where the model writes nothing. Long thoughts lose their middle, as they must fit.

        Raises the engine's errors.
        """
        engine = self.served.engine
        tokens = engine.tokenizer.encode(text)
        limit = engine.max_model_len // 2
        if len(tokens) > limit:
            half = limit // 2
            text = f"{engine.tokenizer.decode(tokens[:half])} … {engine.tokenizer.decode(tokens[-half:])}"
        messages = [{"role": "user", "content": _ASK.format(text=text)}]
        prompt = await self.served.chat_tokens(messages, {"enable_thinking": False})
        markers = self.served.markers
        stops = () if markers is None else (markers.opening, markers.closing)
        async with await engine.open(prompt, tenant=self.tenant) as seq:
            written = await seq.generate_all(Span(GREEDY, SUMMARY_TOKENS, stop_token_ids=stops))
        return written.text.strip()


@dataclass(slots=True)
class ThinkingSummary:
    """One answer's deltas on their way to people. Without a `summarise` a policy of summaries shows nothing."""

    policy: Policy = "shown"
    summarise: Summariser | None = None
    _held: list[str] = field(default_factory=list)

    async def seen(self, deltas: Sequence[Delta], *, ended: bool) -> list[Delta]:
        """Returns `deltas` as shown. A summary comes when another part follows the thinking, or `ended` is set."""
        if self.policy == "shown":
            return list(deltas)
        shown: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Reasoning):
                self._held.append(delta.text)
            else:
                shown += [*await self._summary(), delta]
        return [*shown, *await self._summary()] if ended else shown

    async def _summary(self) -> list[Delta]:
        text = "".join(self._held).strip()
        self._held.clear()
        if not text or self.summarise is None or self.policy == "hidden":
            return []
        summary = await self.summarise(text)
        return [Reasoning(summary)] if summary else []
