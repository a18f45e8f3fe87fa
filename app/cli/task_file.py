"""The tasks of `ponder eval reasoning`: on each line a JSON object, a question and its right answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, ValidationError

from app.config import BadSetting
from reasoning.evaluate import BadAnswer, Choices, Puzzle, Task, judge_of

ACCEPTED = (
    'a JSON object with question (text) or messages (a chat\'s), answer, and where need be compare ("exact", "number", '
    '"contains", "choice", "regex" or "puzzle") and choices'
)


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: str = Field(pattern="^(system|user|assistant)$")
    content: StrictStr


class _Numbers(BaseModel):
    model_config = ConfigDict(extra="forbid")
    numbers: list[StrictInt] = Field(min_length=1, max_length=12)
    target: StrictInt


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")
    question: StrictStr | None = Field(None, min_length=1)
    messages: list[_Message] | None = Field(None, min_length=1)
    answer: StrictStr | StrictInt | StrictFloat | list[StrictStr] | _Numbers
    compare: str | None = None
    choices: list[StrictStr] | None = None


@dataclass(frozen=True, slots=True)
class TaskFile:
    """The tasks, and the text that they came from."""

    tasks: tuple[Task, ...]
    text: str


def read_tasks(path: Path, most: int | None = None) -> TaskFile:
    """The first `most` tasks of a file, or all of them. Empty lines are passed over.

    Raises:
        BadSetting: it cannot be read, has no tasks, or a line is none; the message has its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"{path} cannot be read: {error}.") from None
    tasks: list[Task] = []
    taken: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if most is not None and len(tasks) == most:
            break
        try:
            tasks.append(_task(line))
        except (BadAnswer, ValueError) as error:
            raise BadSetting(f"{path}, line {number}: {_why(error)}") from None
        taken.append(line)
    if not tasks:
        raise BadSetting(f"{path} has no tasks; accepted: on each line {ACCEPTED}.")
    return TaskFile(tuple(tasks), "\n".join(taken))


def _task(line: str) -> Task:
    """Raises ValueError (of JSON or pydantic) or BadAnswer."""
    read = _Line.model_validate(json.loads(line))
    if (read.question is None) == (read.messages is None):
        raise BadAnswer("there must be question or messages, one of the two.")
    if read.messages is not None and read.messages[-1].role != "user":
        raise BadAnswer(f"messages end with {read.messages[-1].role!r}; accepted: a question, by 'user'.")
    messages = [{"role": "user", "content": read.question}] if read.messages is None else _plain(read.messages)
    compare = read.compare or _default(read)
    wanted: Any = read.answer  # Any: of the kinds that answer may have
    if isinstance(read.answer, _Numbers):
        wanted = Puzzle(tuple(read.answer.numbers), read.answer.target)
    if read.choices is not None and compare != "choice":
        raise BadAnswer(f"choices are given, and compare is {compare!r}; accepted: 'choice'.")
    if read.choices is not None and isinstance(read.answer, str):
        wanted = Choices(read.answer, tuple(read.choices))
    judge = judge_of(compare, wanted)
    return Task(tuple(messages), judge, (lambda text: float(judge(text))) if isinstance(wanted, Puzzle) else None)


def _plain(messages: list[_Message]) -> list[dict[str, Any]]:
    return [message.model_dump() for message in messages]


def _default(read: _Line) -> str:
    if read.choices is not None:
        return "choice"
    match read.answer:
        case str():
            return "exact"
        case list():
            return "contains"
        case _Numbers():
            return "puzzle"
    return "number"


def _why(error: ValueError) -> str:
    match error:
        case BadAnswer():
            return str(error)
        case ValidationError():
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"][:1])
            return f"{where + ': ' if where else ''}{first['msg']}; accepted: {ACCEPTED}."
        case json.JSONDecodeError():
            return f"it is no JSON ({error.msg}); accepted: {ACCEPTED}."
    return str(error)
