"""Parses a reply of the model: thinking, content and tool calls. Knows nothing of judges."""

from __future__ import annotations

import json
import re

from training.conversation import ModelReply, SpokenCall

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def read(text: str, *, ended: bool = True) -> ModelReply:
    """A reply as generated, without the end-of-turn token; `ended` false when it stopped for lack of tokens."""
    head, closed, rest = text.rpartition("</think>")
    thinking = head.replace("<think>", "", 1).strip() if closed else ""
    calls: list[SpokenCall] = []
    broken = not ended
    for body in _CALL.findall(rest):
        try:
            call = json.loads(body)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, KeyError, TypeError):
            broken = True
            continue
        if isinstance(name, str) and isinstance(arguments, dict):
            calls.append(SpokenCall(name, arguments))
        else:
            broken = True
    content = _CALL.sub("", rest).strip()
    return ModelReply(thinking, content, tuple(calls), broken or "<tool_call>" in content or "<think>" in content)


def written(reply: ModelReply) -> str:
    """Writes a reply as the model would: the inverse of `read`."""
    calls = "\n".join(call.written() for call in reply.calls)
    answer = f"{reply.content}\n{calls}" if reply.content and calls else reply.content or calls
    return f"<think>\n{reply.thinking}\n</think>\n\n{answer}"
