"""The model's tokens as a constraint sees them: what bytes each stands for, and which are not text at all.

Control tokens, ends of sequence and ids without a token stand for no text, so no constraint can let one into a string.
Knows nothing of constraints.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads torch, which the processes that know a vocabulary do without
    from engine.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[id]` is the text of a token as bytes, empty where it is none; its length is the width of the logits.

    `encode` is how the model's tokenizer writes a text; it never gives ids that are no text.
    """

    tokens: tuple[bytes, ...]
    eos: tuple[int, ...]
    encode: Callable[[str], list[int]] = field(compare=False)

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int) -> Vocabulary:
        """The tokenizer's, filled up with nothing to the `size` of the model's output."""
        eos = tuple(id for id in tokenizer.eos_token_ids if id < size)
        silent = {*tokenizer.control_ids, *eos, *range(tokenizer.vocab_size, size)}
        tokens = tuple(b"" if id in silent else tokenizer.token_bytes(id) for id in range(size))
        return cls(tokens, eos, tokenizer.encode)

    @property
    def size(self) -> int:
        return len(self.tokens)

    @cached_property
    def ids(self) -> dict[bytes, list[int]]:
        """The tokens of each text; several may have the same."""
        ids: dict[bytes, list[int]] = {}
        for id, token in enumerate(self.tokens):
            if token:
                ids.setdefault(token, []).append(id)
        return ids

    def warm(self) -> None:
        """Make the look-up tables now, and not when the first run of forced tokens is asked for."""
        self._goes_on(b"")

    def tokenize(self, text: bytes) -> list[int]:
        """Tokens that are together exactly `text`: the tokenizer's own where it keeps every byte, else the longest.

        Some tokenizers put a space in front or normalise; what a constraint forces is neither. A character that is cut
        off at the end is left out.
        """
        characters = text.decode(errors="ignore")
        wanted = characters.encode()
        ids = self.encode(characters)
        if b"".join(self.tokens[id] for id in ids) == wanted:
            return ids
        ids, at = [], 0
        while at < len(wanted):
            end = next((e for e in range(min(len(wanted), at + self._longest), at, -1) if wanted[at:e] in self.ids), at)
            if end == at:
                break  # a byte that no token has: what comes before it is still right
            ids.append(self.ids[wanted[at:end]][0])
            at = end
        return ids

    def settled(self, text: bytes, tokens: list[int]) -> list[int]:
        """Of the `tokens` of a text that goes on somehow, those that no longer token could take in."""
        at = 0
        for n, token in enumerate(tokens):
            if self._goes_on(text[at:]):
                return tokens[:n]
            at += len(self.tokens[token])
        return tokens

    def _goes_on(self, text: bytes) -> bool:
        """Returns whether some token begins with `text` and is longer."""
        at = bisect_right(self._sorted, text)
        return at < len(self._sorted) and self._sorted[at].startswith(text)

    @cached_property
    def _sorted(self) -> list[bytes]:
        return sorted(self.ids)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.tokens), default=0)
