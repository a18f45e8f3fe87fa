"""A chat as Markdown: questions and answers as they were written, the rest in quotations and lists beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from app.runs.events import SourceShown
from app.share.told import Told, Turn

NAMES = {"user": "You", "assistant": "Ponder"}


def markdown(chat: Told) -> str:
    parts = [f"# {_line(chat.title)}", f"*{chat.begun:%Y-%m-%d %H:%M} UTC*"]
    for turn in chat.turns:
        parts += [f"## {NAMES[turn.role]}", *_parts(turn)]
    return "\n\n".join(parts) + "\n"


def _parts(turn: Turn) -> Iterator[str]:
    if turn.thinking:
        yield _quote(f"*{turn.thought}*\n\n{turn.thinking.strip()}")
    for step in turn.steps:
        for call, result in zip(step.calls, step.results, strict=False):
            yield f"Called {_code(f'{call.name}({call.arguments})')}:\n\n{_fenced(result.text)}"
    if turn.content:
        yield turn.content.strip()
    if turn.remark:
        yield f"*{turn.remark}*"
    if turn.sources:
        yield "Sources:\n\n" + "\n".join(map(_source, turn.sources))


def _source(source: SourceShown) -> str:
    page = "" if source.page is None else f", page {source.page}"
    return f"- [{source.label}] {_line(source.title)}{page}: “{_line(source.text)}”"


def _line(text: str) -> str:
    """Text that is Markdown of one line, and nothing but text."""
    return re.sub(r"([\\`*_{}\[\]<>#|!])", r"\\\1", " ".join(text.split()))


def _quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def _longest(text: str) -> int:
    """Of the runs of backticks in it."""
    return max(map(len, re.findall(r"`+", text)), default=0)


def _code(text: str) -> str:
    ticks = "`" * (_longest(text) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{space}{' '.join(text.split())}{space}{ticks}"


def _fenced(text: str) -> str:
    fence = "`" * max(3, _longest(text) + 1)
    return f"{fence}\n{text}\n{fence}"
