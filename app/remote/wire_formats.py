"""A remote model's prompt as OpenAI's and Anthropic's APIs take it, and their events as deltas of an answer.

Of an event only text, reasoning, calls, usage and the end are taken, each by its type: a remote's text stays text, and
it has no way to say that a tool returned something. Knows nothing of connections.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from app.config.remote_settings import RemoteSettings
from app.errors import ApiError
from reasoning.turn import Content, Reasoning

Json = dict[str, Any]
Finish = Literal["stop", "length"]
_BYTES_PER_TOKEN = 4  # of an estimate
IMAGE_TOKENS = 1600  # of an estimate, for each image
_MAX_IMAGE_TOKENS = 1 << 16  # more than any API counts for one


@dataclass(frozen=True, slots=True)
class SentImage:
    """A picture as it is sent: `data` is its file in base64."""

    media_type: str
    data: str
    detail: Literal["auto", "low", "high"] = "auto"

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


@dataclass(frozen=True)
class RemotePrompt:
    """A request to a remote model. `messages` are as chat templates take them, `tools` as OpenAI's API has them.

    The content of a user's message with images is a list of its texts and `SentImage`s, in order. `sampling` has
    OpenAI's names. `response_format` is OpenAI's, too.
    """

    messages: Sequence[Json]
    max_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Any = None
    parallel: bool | None = None
    response_format: Mapping[str, Any] | None = None

    @cached_property
    def characters(self) -> int:
        """Characters that leave with the request, those of images' files left out."""
        return len(self._text)

    @cached_property
    def images(self) -> int:
        """Images that leave with the request."""
        return sum(part["type"] == "image" for message in self.messages for part in parts_of(message["content"]))

    @cached_property
    def estimated_tokens(self) -> int:
        return estimated(self._text) + IMAGE_TOKENS * self.images

    @cached_property
    def most_tokens(self) -> int:
        """Tokens that the prompt has at most: none is shorter than a byte, and little is added on the way."""
        around = 64 * (len(self.messages) + len(self.tools)) + 4096
        return len(self._text.encode()) + _MAX_IMAGE_TOKENS * self.images + around

    @cached_property
    def _text(self) -> str:
        """The texts that are sent: thinking of earlier turns is not."""
        calls = [call["function"] for message in self.messages for call in message.get("tool_calls") or ()]
        values = [*calls, *self.tools, *([] if self.response_format is None else [self.response_format])]
        texts = [part.get("text", "") for message in self.messages for part in parts_of(message["content"])]
        return "".join([*texts, *(json.dumps(value, ensure_ascii=False) for value in values)])


def parts_of(content: str | list[Json]) -> list[Json]:
    """Returns a message's content as a list of its parts."""
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def estimated(text: str) -> int:
    """Returns a guess at the tokens of a text, for a remote that does not say how many there are."""
    return math.ceil(len(text.encode()) / _BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of the call of this index: its name, once, and pieces of its arguments' text."""

    index: int
    name: str | None
    text: str


@dataclass(frozen=True, slots=True)
class RemoteUsage:
    """Token counts as the remote reports them; None: it has not."""

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    reasoning: int | None = None  # of the completion


@dataclass(frozen=True, slots=True)
class RemoteEnd:
    finish: Finish


RemoteItem = Content | Reasoning | CallPart | RemoteUsage | RemoteEnd


class RemoteError(ApiError):
    """A remote model's failure. `again`: the same request may succeed if it is sent once more, after `wait_s`."""

    def __init__(
        self, status: int, message: str, code: str, *, again: bool = False, wait_s: float | None = None
    ) -> None:
        headers = {} if wait_s is None else {"Retry-After": str(max(1, math.ceil(wait_s)))}
        kind = "rate_limit_error" if status == 429 else "server_error"
        super().__init__(status, message, param="model", code=code, kind=kind, headers=headers)
        self.again = again
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class WireFormat:
    """One API: the path below the remote's address, the headers of a key, the body of a request, and its events."""

    path: str
    headers: Callable[[str | None], dict[str, str]]
    body: Callable[[RemoteSettings, RemotePrompt], Json]
    items: Callable[[Json], list[RemoteItem]]


def wire_format(settings: RemoteSettings) -> WireFormat:
    if settings.api == "openai":
        return WireFormat("/chat/completions", _openai_headers, _openai_body, _openai_items)
    path = "/messages" if settings.url.endswith("/v1") else "/v1/messages"
    return WireFormat(path, _anthropic_headers, _anthropic_body, _anthropic_items)


# -- OpenAI's chat completions


def _openai_headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _openai_body(settings: RemoteSettings, prompt: RemotePrompt) -> Json:
    body: Json = {
        "model": settings.model, "messages": [_openai_message(each) for each in prompt.messages], "stream": True,
        "stream_options": {"include_usage": True}, settings.max_tokens_field: prompt.max_tokens, **prompt.sampling,
    }  # fmt: skip
    if prompt.tools:
        body["tools"] = list(prompt.tools)
        chosen = {"tool_choice": prompt.tool_choice, "parallel_tool_calls": prompt.parallel}
        body |= {name: value for name, value in chosen.items() if value is not None}
    if prompt.response_format is not None:
        body["response_format"] = prompt.response_format
    return body


def _openai_message(message: Mapping[str, Any]) -> Json:
    made = {name: message[name] for name in ("role", "content", "tool_call_id") if name in message}
    if isinstance(message["content"], list):
        made["content"] = [_openai_part(part) for part in message["content"]]
    if calls := message.get("tool_calls"):
        made["content"] = message["content"] or None
        functions = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
        made["tool_calls"] = [
            {
                "id": id,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for id, name, arguments in functions
        ]
    return made


def _openai_part(part: Json) -> Json:
    if part["type"] == "text":
        return part
    image: SentImage = part["image"]
    detail = {} if image.detail == "auto" else {"detail": image.detail}
    return {"type": "image_url", "image_url": {"url": image.url, **detail}}


def _openai_items(event: Json) -> list[RemoteItem]:
    if event.get("error"):
        raise reported(event["error"])
    items: list[RemoteItem] = []
    match event.get("choices"):
        case [{"delta": Mapping() as delta, **choice}, *_]:
            items += _openai_delta(delta)
            if isinstance(reason := choice.get("finish_reason"), str):
                if reason == "content_filter":
                    raise filtered()
                items.append(RemoteEnd("length" if reason == "length" else "stop"))
    if isinstance(usage := event.get("usage"), Mapping):
        cached = _inside(usage, "prompt_tokens_details", "cached_tokens")
        reasoning = _inside(usage, "completion_tokens_details", "reasoning_tokens")
        read, written = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
        items.append(RemoteUsage(read, cached, written, reasoning))
    return items


def _openai_delta(delta: Mapping[str, Any]) -> list[RemoteItem]:
    items: list[RemoteItem] = []
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    if isinstance(thought, str) and thought:
        items.append(Reasoning(thought))
    if isinstance(text := delta.get("content"), str) and text:
        items.append(Content(text))
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        match call:
            case {"index": int(index), "function": Mapping() as function} if index >= 0:
                name, text = function.get("name"), function.get("arguments")
                named = name if isinstance(name, str) and name else None
                items.append(CallPart(index, named, text if isinstance(text, str) else ""))
    return items


# -- Anthropic's messages


def _anthropic_headers(key: str | None) -> dict[str, str]:
    return {"anthropic-version": "2023-06-01", **({} if key is None else {"x-api-key": key})}


def _anthropic_body(settings: RemoteSettings, prompt: RemotePrompt) -> Json:
    names = {"stop": "stop_sequences"}
    body: Json = {
        "model": settings.model, "messages": _anthropic_messages(prompt.messages), "stream": True,
        "max_tokens": prompt.max_tokens, **{names.get(name, name): value for name, value in prompt.sampling.items()},
    }  # fmt: skip
    system = [each["content"] for each in prompt.messages if each["role"] == "system" and each["content"]]
    if system:
        body["system"] = "\n\n".join(system)
    if prompt.tools:
        body["tools"] = [_anthropic_tool(tool["function"]) for tool in prompt.tools]
        choice = _anthropic_choice(prompt.tool_choice)
        if prompt.parallel is False and choice["type"] != "none":
            choice["disable_parallel_tool_use"] = True
        body["tool_choice"] = choice
    if prompt.response_format is not None:
        schema = prompt.response_format["json_schema"]["schema"]
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    return body


def _anthropic_messages(messages: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Messages of blocks; those of one role that follow each other are one. Ids of calls are numbered anew."""
    made: list[Json] = []
    ids: dict[str, str] = {}
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        blocks: list[Json] = []
        if message["role"] == "system":
            continue
        if message["role"] == "tool":
            id = ids.get(message.get("tool_call_id", ""), "call_0")
            blocks.append({"type": "tool_result", "tool_use_id": id, "content": message["content"]})
        else:
            parts = parts_of(message["content"])
            blocks += [_anthropic_block(part) for part in parts if part["type"] == "image" or part["text"].strip()]
        for call in message.get("tool_calls") or ():
            id = ids[call["id"]] = f"call_{len(ids) + 1}"
            function = call["function"]
            blocks.append({"type": "tool_use", "id": id, "name": function["name"], "input": function["arguments"]})
        if made and made[-1]["role"] == role:
            made[-1]["content"] += blocks
        elif blocks:
            made.append({"role": role, "content": blocks})
    return made


def _anthropic_block(part: Json) -> Json:
    if part["type"] == "text":
        return part
    image: SentImage = part["image"]
    return {"type": "image", "source": {"type": "base64", "media_type": image.media_type, "data": image.data}}


def _anthropic_tool(function: Mapping[str, Any]) -> Json:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    made = {"name": function["name"], "description": function.get("description"), "input_schema": schema}
    return {name: value for name, value in made.items() if value is not None}


def _anthropic_choice(choice: Any) -> Json:
    if isinstance(choice, Mapping):
        return {"type": "tool", "name": choice["function"]["name"]}
    return {"type": {"required": "any", "none": "none"}.get(choice, "auto")}


def _anthropic_items(event: Json) -> list[RemoteItem]:
    match event:
        case {"type": "error"}:
            raise reported(event.get("error"))
        case {"type": "message_start", "message": {"usage": Mapping() as usage}}:
            return [_anthropic_usage(usage)]
        case {
            "type": "content_block_start",
            "index": int(at),
            "content_block": {"type": "tool_use", "name": str(name)},
        }:
            return [CallPart(at, name, "")]
        case {"type": "content_block_start", "content_block": {"type": "text", "text": str(text)}} if text:
            return [Content(text)]
        case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": str(text)}} if text:
            return [Content(text)]
        case {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": str(text)}} if text:
            return [Reasoning(text)]
        case {
            "type": "content_block_delta", "index": int(at),
            "delta": {"type": "input_json_delta", "partial_json": str(text)},
        } if text:  # fmt: skip
            return [CallPart(at, None, text)]
        case {"type": "message_delta", "delta": Mapping() as delta}:
            return _anthropic_end(delta, event.get("usage"))
    return []


def _anthropic_end(delta: Mapping[str, Any], usage: Any) -> list[RemoteItem]:
    items: list[RemoteItem] = [_anthropic_usage(usage)] if isinstance(usage, Mapping) else []
    reason = delta.get("stop_reason")
    if reason == "refusal":
        raise filtered()
    if isinstance(reason, str):
        items.append(RemoteEnd("length" if reason in ("max_tokens", "model_context_window_exceeded") else "stop"))
    return items


def _anthropic_usage(usage: Mapping[str, Any]) -> RemoteUsage:
    """Each token of the prompt is in one of three counts."""
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    counts = [_count(usage.get(name)) for name in names]
    prompt = None if counts[0] is None else sum(each or 0 for each in counts)
    thinking = _inside(usage, "output_tokens_details", "thinking_tokens")
    return RemoteUsage(prompt, counts[2], _count(usage.get("output_tokens")), thinking)


# -- both


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _inside(usage: Mapping[str, Any], name: str, count: str) -> int | None:
    details = usage.get(name)
    return _count(details.get(count)) if isinstance(details, Mapping) else None


def reported(error: Any) -> RemoteError:
    """Returns the failure that a remote reports within its stream."""
    text = error.get("message") if isinstance(error, Mapping) else error
    return RemoteError(502, f"ended with an error: {text if isinstance(text, str) else error!r}", "remote_failed")


def filtered() -> RemoteError:
    return RemoteError(502, "ended the answer by its own content filter", "remote_filtered")
