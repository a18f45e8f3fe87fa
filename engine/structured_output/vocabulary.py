"""The model's tokens for constraints: their bytes, and the tokens that are no text.

Control tokens, ends of sequence and ids without a token stand for no text, so no constraint can let one into a string.
Knows nothing of constraints.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads torch, and other users of a vocabulary do without torch
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
        """Reads the tokenizer's vocabulary, padded to the `size` of the model's output."""
        eos = tuple(id for id in tokenizer.eos_token_ids if id < size)
        silent = {*tokenizer.control_ids, *eos, *range(tokenizer.vocab_size, size)}
        tokens = tuple(b"" if id in silent else tokenizer.token_bytes(id) for id in range(size))
        return cls(tokens, eos, tokenizer.encode)

    @property
    def size(self) -> int:
        return len(self.tokens)

    @cached_property
    def ids(self) -> dict[bytes, list[int]]:
        """Returns the tokens of each text; several may have the same."""
        ids: dict[bytes, list[int]] = {}
        for id, token in enumerate(self.tokens):
            if token:
                ids.setdefault(token, []).append(id)
        return ids

    def warm(self) -> None:
        """Makes the look-up tables now, and not with the first jump-forward."""
        self._goes_on(b"")

    def tokenize(self, text: bytes) -> list[int]:
        """Returns tokens that are together exactly `text`: the tokenizer's own where it keeps every byte, else the
        longest.

        Some tokenizers put a space in front or normalise; a forced text has neither. A character that is cut off at the
        end is left out.
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
                break  # a byte that no token has: the tokens before it are still right
            ids.append(self.ids[wanted[at:end]][0])
            at = end
        return ids

    def settled(self, text: bytes, tokens: list[int]) -> list[int]:
        """Returns those of the `tokens` of an unfinished text that no longer token could take in."""
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
