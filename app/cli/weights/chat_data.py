"""Chats of a JSONL file in OpenAI's fine-tuning format, checked line by line, as examples for a model.

Stricter than a request (`app.openai.chat_messages`): a gap that a server fills would be learned here, and a field that
nothing reads would be missed by whoever wrote it. Both are refused, with the line's number and the field.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, StrictBool, ValidationError

from app.config import BadSetting
from app.errors import ApiError
from app.openai.chat_messages import turns
from engine.errors import ChatTemplateError, InvalidParameter
from engine.model.finetuning.chat_examples import ChatExample, chat_examples
from engine.model.tokenizer import Tokenizer
from engine.tool_parsers.tools import read_tools

ACCEPTED = (
    "a JSON object with messages, the last of them the assistant's, and where need be tools, parallel_tool_calls and "
    "chat_template_kwargs"
)
MAX_LINE_BYTES = 16 << 20
_FIELDS = {
    "system": ("content",),
    "developer": ("content",),
    "user": ("content",),
    "assistant": ("content", "tool_calls", "reasoning_content", "weight"),
    "tool": ("content", "tool_call_id", "name"),
}
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}


@dataclass(frozen=True, slots=True)
class LearnedChat:
    """A line's examples. `line` is its number, from 1."""

    line: int
    examples: tuple[ChatExample, ...]

    @property
    def longest(self) -> int:
        """Returns the tokens of its longest example."""
        return max(len(each.token_ids) for each in self.examples)


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")
    messages: list[dict[str, Any]]  # Any: JSON, checked below
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: StrictBool = True
    chat_template_kwargs: dict[str, Any] = {}


class _BadLine(ValueError):
    pass


def read_chats(path: Path, tokenizer: Tokenizer) -> list[LearnedChat]:
    """Returns the chats of a file, in its order; empty lines are passed over.

    Raises:
        BadSetting: the file cannot be read or has no chat, or a line is none; the message has its number, the field and
            what is accepted.
    """
    if path.suffix != ".jsonl":
        raise BadSetting(f"{path} is no file of chats; accepted: .jsonl, each line {ACCEPTED}.")
    chats = list[LearnedChat]()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                if number == 1:
                    line = line.removeprefix(BOM_UTF8)
                if line.strip():
                    chats.append(LearnedChat(number, _examples(path, number, line, tokenizer)))
    except OSError as error:
        raise BadSetting(f"{path} cannot be read: {error}.") from None
    if not chats:
        raise BadSetting(f"{path} has no chat; accepted: on each line {ACCEPTED}.")
    return chats


def _examples(path: Path, number: int, line: bytes, tokenizer: Tokenizer) -> tuple[ChatExample, ...]:
    if len(line) > MAX_LINE_BYTES:
        raise BadSetting(f"{path}, line {number} has too many bytes; accepted: at most {MAX_LINE_BYTES:,}.")
    try:
        read = _Line.model_validate_json(line)
        messages, left_out = _checked(read)
        specs = read_tools(read.tools or [])
        tools = [dict(tool) for tool in read.tools or []] if specs else None
        return tuple(chat_examples(tokenizer, messages, tools, read.chat_template_kwargs, left_out))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        said = f"{where + ': ' if where else ''}{first['msg']}; accepted: {ACCEPTED}"
    except (_BadLine, ChatTemplateError, InvalidParameter) as error:
        said = str(error)
    except ApiError as error:
        said = error.message
    raise BadSetting(f"{path}, line {number}: {said.removesuffix('.')}.")


def _checked(line: _Line) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns the messages as templates take them, and the places of those of the assistant that are only read."""
    left_out = list[int]()
    if reserved := _RESERVED & line.chat_template_kwargs.keys():
        raise _BadLine(f"chat_template_kwargs.{min(reserved)} is the line's own; accepted: other variables")
    for at, message in enumerate(line.messages):
        role, where = message.get("role"), f"messages[{at}]"
        fields = _FIELDS.get(role) if isinstance(role, str) else None
        if fields is None:
            raise _BadLine(f"{where}.role is {role!r:.60}; accepted: {', '.join(_FIELDS)}")
        unknown = [name for name in message if name != "role" and name not in fields]
        if unknown:
            raise _BadLine(
                f"{where}.{unknown[0]:.60} is not read; accepted of a message of {role}: {', '.join(fields)}"
            )
        weight = message.get("weight", 1)
        if isinstance(weight, bool) or weight not in (0, 1):
            raise _BadLine(
                f"{where}.weight is {weight!r:.60}; accepted: 1, or 0 for a turn that is read and not learned"
            )
        if role == "assistant" and weight == 0:
            left_out.append(at)
        calls = message.get("tool_calls")
        if role == "assistant" and not calls and not message.get("content"):
            raise _BadLine(f"{where} has neither content nor tool_calls; accepted: one of them, or both")
        if isinstance(calls, list) and len(calls) > 1 and not line.parallel_tool_calls:
            raise _BadLine(
                f"{where}.tool_calls has {len(calls)} calls where parallel_tool_calls is false; accepted: one"
            )
    if not line.messages or line.messages[-1]["role"] != "assistant":
        raise _BadLine("messages end with no turn of the assistant; accepted: the last one is the assistant's")
    if not any(m["role"] == "assistant" and at not in left_out for at, m in enumerate(line.messages)):
        raise _BadLine("messages have no turn to learn, as all have weight 0; accepted: at least one of weight 1")
    made = turns(line.messages)[: len(line.messages)]
    _check_calls(line, made)
    return made, left_out


def _check_calls(line: _Line, made: Sequence[dict[str, Any]]) -> None:
    """Refuses the gaps that `turns` fills: calls without a result, and results without a call."""
    named = {tool.name for tool in read_tools(line.tools or [])}
    for at, (item, message) in enumerate(zip(line.messages, made, strict=True)):
        wanted = "system" if item["role"] == "developer" else item["role"]
        if message["role"] != wanted:
            answered = "a call before it that has no other result, by tool_call_id"
            if message["role"] == "tool":
                raise _BadLine(f"messages[{at}] comes where a call has no result; accepted: a tool's message")
            raise _BadLine(f"messages[{at}].tool_call_id is of no call; accepted: {answered}")
        if message.get("images"):
            raise _BadLine(f"messages[{at}].content has an image; accepted: text")
        for place, call in enumerate(message.get("tool_calls", [])):
            name = call["function"]["name"]
            if name not in named:
                accepted = ", ".join(sorted(named)) or "none, as the line has no tools"
                raise _BadLine(f"messages[{at}].tool_calls[{place}] calls {name!r:.60}; accepted: {accepted}")


def within(chats: Sequence[LearnedChat], length: int) -> list[LearnedChat]:
    """Returns the chats whose examples have at most `length` tokens; others are left out whole, since a turn
    that is cut would be learned without its end."""
    return [chat for chat in chats if chat.longest <= length]


def split(chats: Sequence[LearnedChat], share: float, seed: int) -> tuple[list[LearnedChat], list[LearnedChat]]:
    """Returns the chats to learn and those that are held out, about `share` of them, drawn by `seed`. Equal chats are
    on one side.

    Raises:
        BadSetting: there are not two different chats.
    """
    if share == 0:
        return list(chats), []
    kinds = list(dict.fromkeys(chat.examples for chat in chats))
    if len(kinds) < 2:
        raise BadSetting("There is one chat, and nothing to hold out; accepted: more chats, or --eval-share 0.")
    order = torch.randperm(len(kinds), generator=torch.Generator().manual_seed(seed)).tolist()
    held = {kinds[at] for at in order[: min(len(kinds) - 1, max(1, round(share * len(kinds))))]}
    learned = [chat for chat in chats if chat.examples not in held]
    return learned, [chat for chat in chats if chat.examples in held]
