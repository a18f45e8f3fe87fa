"""Tokens that were written elsewhere, by a search say, as pieces of an answer: thinking separated by its markers.

Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.outputs import FinishReason
from reasoning.strategy import Context
from reasoning.thinking import Part, Piece


def pieces_of(tokens: Sequence[int], context: Context, finish: FinishReason | None) -> list[Piece]:
    """A piece for every part of `tokens`, the last one with the finish reason; its part is the one that may go on.
    Markers count, and are no text.
    """
    markers = context.markers
    part: Part = "thinking" if context.opened else "answer"
    pieces: list[Piece] = []
    run: list[int] = []
    strip_head = context.opened

    def flush() -> None:
        if run:
            text = context.tokenizer.decode(run)
            pieces.append(Piece(part, text.lstrip("\n") if strip_head else text, len(run), tuple(run)))
            run.clear()

    at = 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if markers is None or token not in (markers.opening, markers.closing):
            run.append(token)
            continue
        flush()
        around: Part = "thinking" if part == "thinking" or token == markers.opening else "answer"
        header = markers.with_header(token)[1:]
        follows = len(header) if list(tokens[at : at + len(header)]) == header else 0
        pieces.append(Piece(around, "", 1))
        part = "thinking" if token == markers.opening else "answer"
        if follows:
            pieces.append(Piece(part, "", follows))
            at += follows
        strip_head = True
    flush()
    return [*pieces, Piece(part, "", 0, finish_reason=finish)]
