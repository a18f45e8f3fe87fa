"""The text of a span: tokens become characters, and stop strings are found before anyone sees them.

Text that may be the beginning of a stop string is held back until the next tokens decide it. Knows nothing of
sequences or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """Turns token ids into text piece by piece, whole characters only."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class StopMatcher:
    """Finds the first stop string in a stream of text pieces."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return (text that is safe to show, the stop string that matched or None)."""
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
        """What is still held back, when nothing more will come."""
        held, self._held = self._held, ""
        return held

    def _undecided(self) -> int:
        """Length of the longest suffix of the held text that is a proper prefix of a stop string."""
        longest = min(len(self._held), max(map(len, self._stop)) - 1)
        for size in range(longest, 0, -1):
            tail = self._held[-size:]
            if any(s.startswith(tail) for s in self._stop if len(s) > size):
                return size
        return 0


class SpanText:
    """Detokenising and stop strings of one span, together."""

    def __init__(self, decoder: Decoder, stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._stop = StopMatcher(stop)

    def push(self, token: int, *, may_stop: bool) -> tuple[str, str | None]:
        """Text that this token decides, and the stop string it completes. `may_stop=False`: nothing stops yet."""
        text = self._decoder.push((token,))
        if may_stop:
            return self._stop.push(text)
        return self._stop.release() + text, None

    def finish(self, *, whole: bool = False) -> tuple[str, str | None]:
        """The rest, when the span ends for another reason; a stop string in it still counts.

        A character that was cut in two is shown as U+FFFD, or with `whole` not at all.
        """
        shown, matched = self._stop.push("" if whole else self._decoder.flush())
        return (shown, matched) if matched is not None else (shown + self._stop.release(), None)
