"""Messages of a chat request as a chat template takes them: checked, and repaired where a history has gaps.

A history is whatever a client kept, perhaps from another server, so one that is readable is never refused: gaps are
filled by the rule of docs/api.md ("Histories"). Refused is what is no text, and what has the wrong type. Messages are
checked by hand, as their errors are the most common. In the result each tool's message answers a call of the turn
before it, and each call is answered, as most templates take for granted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from app.errors import invalid
from app.request_body import json_value

NO_RESULT = "There is no result: the call was interrupted."
_ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip
_ACCEPTED_ROLES = "system, developer, user, assistant, tool"
MAX_NAME_LENGTH = 256  # characters of a tool's name in an old call

DETAILS = ("auto", "low", "high")  # of an image; low is one tile
PLACE = "ponder_place"  # of a part that this server made of another API's: its place in that request

Message = dict[str, Any]  # as templates take it; Any: JSON


def turns(items: list[Any]) -> list[Message]:
    """The messages with joined text, and with calls as chat templates take them. Any: they are a client's JSON.

    Raises:
        ApiError: 400, naming the place.
    """
    made: list[Message] = []
    waiting: dict[str, str] = {}  # calls of the newest turn that wait for their result: id -> name
    for index, item in enumerate(items):
        where = f"messages[{index}]"
        message = _message(item, where)
        if message["role"] == "tool":
            made.append(_result(item, message, where, waiting))
            continue
        made += unanswered(waiting)
        waiting.clear()
        calls = message.get("tool_calls", [])
        for at, call in enumerate(calls):
            if call["id"] in waiting:  # ids only tell which result is whose
                call["id"] = f"{call['id']}-{at}"
            waiting[call["id"]] = call["function"]["name"]
        made.append(message)
    return [*made, *unanswered(waiting)]


def unanswered(calls: dict[str, str]) -> Iterable[Message]:
    """Returns a result for each call (id -> name) that has none."""
    return [{"role": "tool", "content": NO_RESULT, "name": name, "tool_call_id": id} for id, name in calls.items()]


def stray(text: str, name: str | None) -> Message:
    """Returns a result whose call is not in the history, as a user's message."""
    return {"role": "user", "content": f"Result of {name or 'a tool'}:\n{text}"}


def arguments_of(text: str) -> dict[str, Any]:
    """Returns the arguments of a call in a history. Those that are no JSON object stay as text, under one name."""
    try:
        value = json_value(text or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise invalid(where, f"{where} is {item!r:.60}; accepted: an object with role and content.")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{where}.role", f"{where}.role is {role!r:.60}; accepted: {_ACCEPTED_ROLES}.")
    if item.get("audio"):
        raise invalid(f"{where}.audio", f"{where}.audio is not supported; accepted: content, tool_calls.")
    images: list[Message] = []
    message: Message = {"role": _ROLES[role], "content": _content(item.get("content"), where, images)}
    if images:
        if role != "user":
            raise invalid(images[0]["where"], f"{images[0]['where']} is an image; accepted: in a user's message.")
        message["images"] = images
    calls = _calls(item, role, where)
    if calls:
        message["tool_calls"] = calls
    reasoning = item.get("reasoning_content")
    if reasoning is None:  # vLLM's newer name for it
        reasoning = item.get("reasoning")
    if role == "assistant" and reasoning is not None:
        if not isinstance(reasoning, str):
            field = f"{where}.reasoning_content"
            raise invalid(field, f"{field} is {reasoning!r:.60}; accepted: a string.")
        message["reasoning_content"] = reasoning
    return message


def _content(content: Any, where: str, images: list[Message]) -> str:
    """Returns the texts of a message, joined; its images are added to `images`, each with its place in the text."""
    if content is None:
        return ""
    if isinstance(content, list):
        text = ""
        for i, part in enumerate(content):
            if isinstance(part, dict) and part.get("type") == "image_url":
                images.append({"at": len(text), **_image(part, f"{where}.content[{i}]")})
            else:
                text += _part_text(part, f"{where}.content[{i}]")
        return text
    if not isinstance(content, str):
        accepted = 'a string, or a list of {"type": "text", "text": "..."}'
        raise invalid(f"{where}.content", f"{where}.content is {content!r:.60}; accepted: {accepted}.")
    return content


def _image(part: dict[str, Any], where: str) -> Message:
    """Reads an `image_url` part; some clients send its URL alone."""
    value = part.get("image_url")
    given = {"url": value} if isinstance(value, str) else value
    where = part[PLACE] if isinstance(part.get(PLACE), str) else f"{where}.image_url"
    if not isinstance(given, dict) or not isinstance(given.get("url"), str):
        raise invalid(where, f'{where} is {value!r:.60}; accepted: {{"url": "data:image/png;base64,…"}}.')
    detail = given.get("detail") or "auto"
    if detail not in DETAILS:
        raise invalid(f"{where}.detail", f"{where}.detail is {detail!r:.60}; accepted: {', '.join(DETAILS)}.")
    return {"url": given["url"], "detail": detail, "where": where}


def _part_text(part: Any, where: str) -> str:
    accepted = 'accepted: {"type": "text", "text": "..."}'
    if not isinstance(part, dict):
        raise invalid(where, f"{where} is {part!r:.60}; {accepted}.")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        accepted += ', or {"type": "image_url", "image_url": {"url": "data:…"}} for a model that sees'
        raise invalid(f"{where}.type", f"{where}.type is {kind!r:.60}; {accepted}.")
    text = part.get(kind)
    if not isinstance(text, str):
        raise invalid(f"{where}.{kind}", f"{where}.{kind} is {text!r:.60}; {accepted}.")
    return text


def _result(item: dict[str, Any], message: Message, where: str, waiting: dict[str, str]) -> Message:
    """The result of a call that waits for it: by its id, else by the tool's name, else of the only call there is."""
    id, name = item.get("tool_call_id"), item.get("name")
    for field, value in (("tool_call_id", id), ("name", name)):
        if value is not None and not isinstance(value, str):
            raise invalid(f"{where}.{field}", f"{where}.{field} is {value!r:.60}; accepted: a string.")
    if id is None:
        named = [known for known, tool in waiting.items() if tool == name]
        id = named[0] if named else next(iter(waiting), None) if len(waiting) == 1 and name is None else None
    if id is None or id not in waiting:
        return stray(message["content"], name)
    return {**message, "name": waiting.pop(id), "tool_call_id": id}


def _calls(item: dict[str, Any], role: str, where: str) -> list[dict[str, Any]]:
    calls, legacy = item.get("tool_calls"), item.get("function_call")
    if (calls or legacy) and role != "assistant":
        field = f"{where}.{'tool_calls' if calls else 'function_call'}"
        raise invalid(field, f"{field} belongs to an assistant's message.")
    if not calls and legacy:
        return [_call({"id": "call", "function": legacy}, f"{where}.function_call")]
    if calls is not None and not isinstance(calls, list):
        field = f"{where}.tool_calls"
        raise invalid(field, f"{field} is {calls!r:.60}; accepted: a list of calls.")
    return [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls or [])]


def _call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), "arguments": str(text)}} if name:
            arguments = arguments_of(text)
        case {"function": {"name": str(name), "arguments": dict(arguments)}} if name:  # as Ollama has them
            pass
        case {"type": "custom", "custom": {"name": str(name), "input": str(text)}} if name:
            arguments = {"input": text}
        case _:
            accepted = '{"id": "…", "type": "function", "function": {"name": "…", "arguments": "{…}"}}'
            raise invalid(where, f"{where} is {call!r:.60}; accepted: {accepted}.")
    id = call.get("id")
    if id is not None and not isinstance(id, str):
        raise invalid(f"{where}.id", f"{where}.id is {id!r:.60}; accepted: a string.")
    if len(name) > MAX_NAME_LENGTH:
        accepted = f"accepted: at most {MAX_NAME_LENGTH}"
        raise invalid(where, f"{where} names a tool with {len(name)} characters; {accepted}.")
    return {"id": id or "call", "type": "function", "function": {"name": name, "arguments": arguments}}
