"""Finds the chunks of a prompt: where its tokens have those of given texts.

A text's last tokens may depend on what stands behind it, so they are left out of its span: the rest is the same tokens
in every prompt, and so the same chunk. A text should begin a line, with its label: under another label it is another
chunk then, as the K/V of a passage says under which label it stands.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from engine.params import MAX_CHUNKS, ChunkSpans

EDGE = 4  # tokens at the end of a text that may differ
MIN_TOKENS = 32  # of a text that is looked for


def find_chunks(
    prompt: Sequence[int], texts: Iterable[str], encode: Callable[[str], Sequence[int]]
) -> ChunkSpans:  # fmt: skip
    """Returns the spans [start, end) of the texts that stand in a prompt, in order and apart; of a text that is not
    found, none. `encode` gives a text's tokens."""
    whole = array("q", prompt).tobytes()
    found = list[tuple[int, int]]()
    for text in texts:
        tokens = encode(text)[:-EDGE]
        if len(tokens) >= MIN_TOKENS and (start := _find(whole, array("q", tokens).tobytes())) is not None:
            found.append((start, start + len(tokens)))
    apart = list[tuple[int, int]]()
    for start, end in sorted(found):
        if not apart or apart[-1][1] <= start:
            apart.append((start, end))
    return tuple(apart[:MAX_CHUNKS])


def _find(whole: bytes, part: bytes) -> int | None:
    """Returns the first index at which numbers of 8 bytes stand in others."""
    at = whole.find(part)
    while at >= 0 and at % 8:
        at = whole.find(part, at + 1)
    return None if at < 0 else at // 8
