"""Log-probabilities in the two shapes that OpenAI's API has: one for chat, one for plain completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.outputs import TokenLogprob

if TYPE_CHECKING:
    from engine import Tokenizer

_FLOOR = -9999.0  # JSON has no infinity


def _finite(value: float) -> float:
    return value if value > _FLOOR else _FLOOR  # also turns a NaN into the floor


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": tokenizer.token_text(token), "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        {**one(e.token_id, e.logprob), "top_logprobs": [one(token, lp) for token, lp in e.top[:top]]} for e in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of a plain completion, in instalments: text offsets run on from one to the next."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0

    def take(self, entries: Sequence[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        """The next tokens, each with its log-probability: None for a prompt's first, which nothing precedes."""
        text = self._tokenizer.token_text
        tokens = [text(token) for token, _ in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if e is None else _finite(e.logprob) for _, e in entries],
            "top_logprobs": [
                None if e is None else {text(t): _finite(lp) for t, lp in self._with_chosen(e)} for _, e in entries
            ]
            if self._top
            else None,
            "text_offset": offsets,
        }

    def _with_chosen(self, entry: TokenLogprob) -> list[tuple[int, float]]:
        # As OpenAI documents it, the chosen token is always there, so there may be one more than asked for. It goes
        # first: should two ids share a text, the likeliest one's value stands.
        likeliest = list(entry.top[: self._top])
        return [(entry.token_id, entry.logprob), *likeliest[::-1]]
