"""Conversations of content blocks as chat messages, which every API here shares: what they lack is repaired there.

The results of a message come before its text, as a chat template takes a result right after its call. Thinking must be
this server's own, by its signature. Knows nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from app.answering.thinking_signature import ThinkingSigner
from app.errors import invalid
from app.openai.chat_messages import PLACE

Json = dict[str, Any]  # Any: JSON
REDACTED = "redacted thinking "  # with a block's nonce it is what the block's data sign

# Claude Code sends one as its first system block, and it changes with each request: no prefix would ever be found.
_METADATA = "x-anthropic-"
_JOINT = "\n\n"  # between blocks that are texts of their own
_CACHE_KEYS = {"ttl", "scope"}
_TEXT = '{"type": "text", "text": "…"}'
_SOURCES = '{"type": "text", "media_type": "text/plain", "data": "…"} or {"type": "content", "content": …}'


@dataclass(slots=True)
class Conversation:
    """Chat messages, and for each the place of the request that it comes from. `loaded`: the tools that results refer
    to."""

    messages: list[Json] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    loaded: set[str] = field(default_factory=set)

    def add(self, place: str, role: str, content: str | list[Json], **more: Any) -> None:
        self.messages.append({"role": role, "content": content, **more})
        self.places.append(place)


def conversation(
    system: Any, messages: Sequence[Any], signer: ThinkingSigner, tools: Mapping[str, str] = MappingProxyType({})
) -> Conversation:
    """The chat messages of a request's JSON. `tools` are described by their names, for results that refer to them.

    Raises:
        ApiError: 400, naming the place.
    """
    made = Conversation()
    if instructions := system_text(system):
        made.add("system", "system", instructions)
    for at, message in enumerate(messages):
        _add(made, message, f"messages[{at}]", signer, tools)
    if made.messages[-1]["role"] == "assistant" and not made.messages[-1].get("tool_calls"):
        raise invalid(
            "messages", "messages ends with an assistant's message, which this server does not continue; accepted: a "
            "user's message at the end.",
        )  # fmt: skip
    return made


def system_text(system: Any) -> str:
    """The system prompt without lines of metadata at the beginning of a block.

    Raises:
        ApiError: 400, naming the place.
    """
    texts = []
    for place, block in _blocks(system or [], "system"):
        text = _text(block, place)
        while text.startswith(_METADATA):
            text = text.partition("\n")[2]
        texts += [text] if text else []
    return _JOINT.join(texts)


def _add(made: Conversation, message: Any, place: str, signer: ThinkingSigner, tools: Mapping[str, str]) -> None:
    if not isinstance(message, Mapping):
        raise invalid(place, f"{place} is {message!r:.60}; accepted: an object with role and content.")
    for name in message:
        if name not in ("role", "content"):
            raise invalid(f"{place}.{name}", f"{place}.{name:.60} is not known; accepted: role, content.")
    blocks = list(_blocks(message.get("content"), f"{place}.content"))
    match message.get("role"):
        case "user":
            _add_user(made, place, blocks, tools)
        case "assistant":
            _add_assistant(made, place, blocks, signer)
        case "system":
            made.add(place, "system", _JOINT.join(_text(block, where) for where, block in blocks))
        case role:
            raise invalid(f"{place}.role", f"{place}.role is {role!r:.60}; accepted: user, assistant, system.")


def _blocks(content: Any, place: str) -> Iterator[tuple[str, Json]]:
    if isinstance(content, str):
        yield place, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        raise invalid(place, f"{place} is {content!r:.60}; accepted: a string, or a list of blocks such as {_TEXT}.")
    for at, block in enumerate(content):
        where = f"{place}[{at}]"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise invalid(where, f"{where} is {block!r:.60}; accepted: a block with a type, such as {_TEXT}.")
        _check_cache_control(block.get("cache_control"), f"{where}.cache_control")
        yield where, block


def _check_cache_control(value: Any, place: str) -> None:
    match value:
        case None:
            return
        case {"type": "ephemeral", **more} if more.get("ttl") in (None, "5m", "1h") and not more.keys() - _CACHE_KEYS:
            return
    accepted = '{"type": "ephemeral", "ttl"?: "5m" or "1h"}'
    raise invalid(place, f"{place} is {value!r:.60}; accepted: {accepted}; the prefix cache works without it.")


def _add_user(made: Conversation, place: str, blocks: Sequence[tuple[str, Json]], tools: Mapping[str, str]) -> None:
    parts: list[Json] = []
    for where, block in blocks:
        if block["type"] == "tool_result":
            text = _result(block, where, made, tools)
            made.add(place, "tool", text, tool_call_id=_string(block, "tool_use_id", where))
        elif block["type"] == "image":
            parts.append(_image(block, where))
        else:
            text = _READERS.get(block["type"], _refused_in_user)(block, where)
            joint = _JOINT if parts and parts[-1]["type"] == "text" else ""
            parts.append({"type": "text", "text": joint + text})
    if any(part["type"] == "image_url" for part in parts):
        made.add(place, "user", parts)
    elif parts or not blocks:
        made.add(place, "user", "".join(part["text"] for part in parts))


def _add_assistant(made: Conversation, place: str, blocks: Sequence[tuple[str, Json]], signer: ThinkingSigner) -> None:
    texts, thoughts, calls = list[str](), list[str](), list[Json]()
    for where, block in blocks:
        match block["type"]:
            case "text":
                texts.append(_text(block, where))
            case "thinking":
                thoughts.append(_thinking(block, where, signer))
            case "redacted_thinking":
                _check_redacted(block, where, signer)
            case "tool_use":
                calls.append(_call(block, where))
            case kind:
                accepted = "text, thinking, redacted_thinking or tool_use in an assistant's message"
                raise invalid(f"{where}.type", f"{where}.type is {kind!r:.60}; accepted: {accepted}.")
    more: Json = {"tool_calls": calls} if calls else {}
    if thinking := "\n".join(filter(None, thoughts)):
        more["reasoning_content"] = thinking
    made.add(place, "assistant", "".join(texts), **more)


def _thinking(block: Json, where: str, signer: ThinkingSigner) -> str:
    text = _string(block, "thinking", where)
    if not signer.verify(text, _string(block, "signature", where)):
        raise invalid(
            f"{where}.signature", f"{where}.signature is not this server's signature of that thinking; accepted: a "
            "thinking block as this server gave it, unchanged, or the message without it.",
        )  # fmt: skip
    return text


def _check_redacted(block: Json, where: str, signer: ThinkingSigner) -> None:
    nonce, _, signature = _string(block, "data", where).partition(".")
    if not signer.verify(REDACTED + nonce, signature):
        raise invalid(
            f"{where}.data", f"{where}.data is not of this server; accepted: a redacted_thinking block as this server "
            "gave it, or the message without it.",
        )  # fmt: skip


def _call(block: Json, where: str) -> Json:
    if not isinstance(block.get("input"), dict):
        raise invalid(f"{where}.input", f"{where}.input is {block.get('input')!r:.60}; accepted: an object.")
    function = {"name": _string(block, "name", where), "arguments": block["input"]}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _result(block: Json, where: str, made: Conversation, tools: Mapping[str, str]) -> str:
    failed, content = block.get("is_error") or False, block.get("content") or []
    if not isinstance(failed, bool):
        raise invalid(f"{where}.is_error", f"{where}.is_error is {failed!r:.60}; accepted: true or false.")
    texts = []
    for place, each in _blocks(content, f"{where}.content"):
        if each["type"] == "tool_reference":
            name = _string(each, "tool_name", place)
            made.loaded.add(name)
            texts.append(tools.get(name, f"There is no tool {name} any more."))
        else:
            texts.append(_READERS.get(each["type"], _refused_in_result)(each, place))
    text = _JOINT.join(texts)
    return f"Error: {text}" if failed else text


def _image(block: Json, where: str) -> Json:
    """Returns an image as a part of a chat's message."""
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            url = f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)}:
            pass
        case source:
            accepted = '{"type": "base64", "media_type": "image/png", "data": "…"} or {"type": "url", "url": "…"}'
            raise invalid(f"{where}.source", f"{where}.source is {source!r:.60}; accepted: {accepted}.")
    return {"type": "image_url", "image_url": {"url": url}, PLACE: f"{where}.source"}


def _text(block: Json, where: str) -> str:
    if block["type"] != "text":
        raise invalid(f"{where}.type", f"{where}.type is {block['type']!r:.60}; accepted: {_TEXT}.")
    return _string(block, "text", where)


def _document(block: Json, where: str) -> str:
    """Title, context and text of a document, in lines."""
    if block.get("citations") not in (None, {}, {"enabled": False}):
        field = f"{where}.citations"
        raise invalid(field, f'{field} is {block["citations"]!r:.60}; accepted: {{"enabled": false}}.')
    match block.get("source"):
        case {"type": "text", "data": str(text)}:
            pass
        case {"type": "content", "content": content}:
            text = "\n".join(_text(each, place) for place, each in _blocks(content, f"{where}.source.content"))
        case source:
            raise invalid(f"{where}.source", f"{where}.source is {source!r:.60}; accepted: {_SOURCES}.")
    return "\n".join([*_optional(block, ("title", "context"), where), text])


def _search_result(block: Json, where: str) -> str:
    found = [_text(each, place) for place, each in _blocks(block.get("content"), f"{where}.content")]
    return "\n".join([*_optional(block, ("title", "source"), where), *found])


_READERS: Mapping[str, Callable[[Json, str], str]] = {
    "text": _text, "document": _document, "search_result": _search_result,
}  # fmt: skip


def _refused_in_user(block: Json, where: str) -> str:
    return _refused(block, where, f"{', '.join(_READERS)}, image or tool_result in a user's message")


def _refused_in_result(block: Json, where: str) -> str:
    return _refused(block, where, f"{', '.join(_READERS)} or tool_reference in a result")


def _refused(block: Json, where: str, accepted: str) -> str:
    raise invalid(f"{where}.type", f"{where}.type is {block['type']!r:.60}; accepted: {accepted}.")


def _string(block: Json, name: str, where: str) -> str:
    if not isinstance(value := block.get(name), str):
        raise invalid(f"{where}.{name}", f"{where}.{name} is {value!r:.60}; accepted: a string.")
    return value


def _optional(block: Json, names: Sequence[str], where: str) -> list[str]:
    return [_string(block, name, where) for name in names if block.get(name) is not None]
