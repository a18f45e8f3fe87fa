"""Hits into sources for a prompt: their surroundings, within one budget of tokens, labelled S1, S2, … in a fixed order.

Sources are chosen by score and laid out by document and place: the same set always makes the same text, so that the K/V
of a prompt's beginning can be found again. Knows nothing of models; tokens are counted by a function passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retrieval.records import Hit, NotFound
from retrieval.store import DocumentStore

CountTokens = Callable[[str], int]
OVERHEAD = 8  # tokens of a label, brackets and a line end


@dataclass(frozen=True, slots=True)
class Source:
    """Characters `start` to `end` of a document, under a label."""

    label: str
    document: int
    title: str
    page: int | None
    start: int
    end: int
    text: str
    score: float


@dataclass(slots=True)
class _Window:
    hit: Hit
    start: int
    end: int
    text: str
    size: int


def sources(
    store: DocumentStore, user: str, hits: Sequence[Hit], budget: int, count: CountTokens, *, parents: bool = True
) -> list[Source]:
    """The best hits with their parents, or alone where those do not fit, in at most `budget` tokens."""
    windows, left = list[_Window](), budget
    for hit in hits:
        passage = hit.passage
        if any(
            w.hit.passage.document == passage.document and w.start <= passage.start and passage.end <= w.end
            for w in windows
        ):
            continue  # a window that is there already holds it
        for window in _windows(store, user, hit, count, parents):
            overlaps = any(
                w.hit.passage.document == passage.document and w.start < window.end and window.start < w.end
                for w in windows
            )
            if window.size + OVERHEAD <= left and not overlaps:
                windows.append(window)
                left -= window.size + OVERHEAD
                break
    windows.sort(key=lambda window: (window.hit.passage.document, window.start))
    return [
        Source(
            f"S{number}",
            w.hit.passage.document,
            w.hit.passage.title,
            w.hit.passage.page,
            w.start,
            w.end,
            w.text,
            w.hit.score,
        )
        for number, w in enumerate(windows, 1)
    ]


def _windows(store: DocumentStore, user: str, hit: Hit, count: CountTokens, parents: bool) -> list[_Window]:
    """What may stand for a hit, the largest first."""
    passage = hit.passage
    made = []
    if parents:
        try:
            start, end, text = store.parent(user, passage.document, passage.parent)
        except NotFound:
            return []  # it went meanwhile
        made.append(_Window(hit, start, end, text, count(text)))
    made.append(_Window(hit, passage.start, passage.end, passage.text, count(passage.text)))
    return made


def layout(found: Sequence[Source]) -> str:
    """The sources as a prompt has them, one a line."""
    return "\n".join(f"[{source.label}] {' '.join(source.text.split())}" for source in found)
