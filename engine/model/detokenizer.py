"""Decodes tokens as they are generated, and matches stop strings.

The idea: text is the UTF-8 reading of the tokens' bytes, so a stream needs to remember at most three bytes of an
unfinished character, at any length; nothing is ever decoded twice. Text that may be the beginning of a stop
string is held back until the next tokens decide it. `Detokenizer` knows nothing of sequences or stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """The part of a tokenizer that a detokeniser needs."""

    @property
    def strips_first_space(self) -> bool:
        """Returns whether text begins without the space that its first token carries (SentencePiece)."""

    def visible_bytes(self, id: int, skip_special: bool) -> bytes:
        """Returns the bytes of a token in running text; empty for a special token to be skipped."""


class Detokenizer:
    """Incremental decoding: the pieces, joined, equal `Tokenizer.decode` of all ids, however they were split.

    A piece never ends within a character. Bytes that can no longer become one are shown as U+FFFD, as Unicode
    recommends (chapter 3.9, substitution of maximal subparts). For well-formed text that equals the result of
    `tokenizers`; of a malformed run of byte tokens `tokenizers` would replace the whole, which no stream could take
    back.
    """

    def __init__(self, tokenizer: TokenBytes, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.strips_first_space
        self._partial = False  # inside a character

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens complete; possibly empty."""
        if len(token_ids) == 1:
            data = self._tokenizer.visible_bytes(token_ids[0], self._skip_special)
            if data.isascii() and not self._partial:  # the common case: nothing to decode
                return self._begin(data.decode("ascii"))
        else:
            data = b"".join(self._tokenizer.visible_bytes(id, self._skip_special) for id in token_ids)
        text = self._utf8.decode(data)
        self._partial = bool(self._utf8.getstate()[0])
        return self._begin(text)

    def flush(self) -> str:
        """Returns the rest of an unfinished character, as U+FFFD; the detokeniser then starts afresh within the
        text."""
        self._partial = False
        return self._begin(self._utf8.decode(b"", final=True))

    def fork(self) -> Detokenizer:
        """Copies the decoder; both go on separately."""
        copy = Detokenizer(self._tokenizer, skip_special=self._skip_special)
        copy._utf8.setstate(self._utf8.getstate())
        copy._at_start, copy._partial = self._at_start, self._partial
        return copy

    def _begin(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class Utf8Decoder(Protocol):
    """Turns token ids into text piece by piece, whole characters only."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class StopMatcher:
    """Finds the first stop string in a stream of text pieces."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns (text that is safe to show, the stop string that matched or None)."""
        if not self._stop:
            return text, None
        self._held += text
        found = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            at, matched = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            shown, self._held = self._held[:at], ""
            return shown, matched
        keep = self._undecided()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown, None

    def release(self) -> str:
        """Returns the text still held back, when nothing more will come."""
        held, self._held = self._held, ""
        return held

    def _undecided(self) -> int:
        """Returns the length of the longest suffix of the held text that is a proper prefix of a stop string."""
        longest = min(len(self._held), max(map(len, self._stop)) - 1)
        for size in range(longest, 0, -1):
            tail = self._held[-size:]
            if any(s.startswith(tail) for s in self._stop if len(s) > size):
                return size
        return 0


class SpanText:
    """Detokenising and stop strings of one span, together."""

    def __init__(self, decoder: Utf8Decoder, stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._stop = StopMatcher(stop)

    def push(self, token: int, *, may_stop: bool) -> tuple[str, str | None]:
        """Returns the text that this token decides, and the stop string it completes. `may_stop=False`: nothing stops
        yet."""
        text = self._decoder.push((token,))
        if may_stop:
            return self._stop.push(text)
        return self._stop.release() + text, None

    def finish(self, *, whole: bool = False) -> tuple[str, str | None]:
        """Returns the rest, when the span ends for another reason; a stop string in it still counts.

        A character that was cut in two is shown as U+FFFD, or with `whole` not at all.
        """
        shown, matched = self._stop.push("" if whole else self._decoder.flush())
        return (shown, matched) if matched is not None else (shown + self._stop.release(), None)
