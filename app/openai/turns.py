"""The messages of a chat request, checked by hand: their errors are the ones that people meet most.

A conversation with tools must hang together: each result answers a call before it, and each call is answered before the
next turn, as the templates of most models take for granted. Knows nothing of templates.
"""

from __future__ import annotations

from typing import Any

from app.body import json_value
from app.errors import invalid
from engine.tool_parsers.tools import NAME

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def turns(items: list[Any]) -> list[dict[str, Any]]:
    """The messages with joined text, and with calls as chat templates take them. Any: they are a client's JSON.

    Raises:
        ApiError: 400, naming the place.
    """
    made: list[dict[str, Any]] = []
    open_calls: dict[str, str] = {}  # calls that wait for their result: id -> name
    for index, item in enumerate(items):
        where = f"messages[{index}]"
        message = _message(item, where)
        if message["role"] == "tool":
            message["name"] = _answers(item, where, open_calls)
            message["tool_call_id"] = item["tool_call_id"]
        elif open_calls:
            missing = ", ".join(open_calls)
            raise invalid(where, f"{where} comes before the result of {missing}; accepted: a message of role 'tool'.")
        for call in message.get("tool_calls", ()):
            if call["id"] in open_calls:
                raise invalid(f"{where}.tool_calls", f"{where}.tool_calls has the id {call['id']!r} twice.")
            open_calls[call["id"]] = call["function"]["name"]
        made.append(message)
    if open_calls:
        missing = ", ".join(open_calls)
        raise invalid("messages", f"messages ends before the result of {missing}; accepted: a message of role 'tool'.")
    return made


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise invalid(where, f"{where} is {item!r:.60}; accepted: an object with role and content.")
    role = item.get("role")
    if role == "function":
        raise invalid(f"{where}.role", f"{where}.role is 'function'; accepted: 'tool', with a tool_call_id.")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{where}.role", f"{where}.role is {role!r:.60}; accepted: {', '.join(_ROLES)}.")
    for name in ("function_call", "audio"):
        if item.get(name):
            raise invalid(f"{where}.{name}", f"{where}.{name} is not supported; accepted: content, tool_calls.")
    calls = item.get("tool_calls")
    if calls and role != "assistant":
        raise invalid(f"{where}.tool_calls", f"{where}.tool_calls belongs to an assistant's message.")
    message: dict[str, Any] = {"role": _ROLES[role], "content": _content(item.get("content"), where, needed=not calls)}
    if calls:
        message["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    reasoning = item.get("reasoning_content")
    if role == "assistant" and reasoning is not None:
        if not isinstance(reasoning, str):
            field = f"{where}.reasoning_content"
            raise invalid(field, f"{field} is {reasoning!r:.60}; accepted: a string.")
        message["reasoning_content"] = reasoning
    return message


def _content(content: Any, where: str, *, needed: bool) -> str:
    if isinstance(content, list):
        content = "".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if content is None and not needed:
        return ""
    if not isinstance(content, str):
        accepted = 'a string, or a list of {"type": "text", "text": "..."}'
        raise invalid(f"{where}.content", f"{where}.content is {content!r:.60}; accepted: {accepted}.")
    return content


def _answers(item: dict[str, Any], where: str, open_calls: dict[str, str]) -> str:
    """The name of the tool whose call this message answers."""
    id = item.get("tool_call_id")
    waiting = ", ".join(repr(known) for known in open_calls) or "none, as no call waits for its result"
    if not isinstance(id, str) or id not in open_calls:
        raise invalid(
            f"{where}.tool_call_id", f"{where}.tool_call_id is {id!r:.60}; accepted: the id of a call: {waiting}."
        )
    return open_calls.pop(id)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise invalid(where, f"{where} is {calls!r:.60}; accepted: a list of calls.")
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"id": str(id), "function": {"name": str(name), "arguments": str(arguments)}} if id:
            pass
        case _:
            accepted = '{"id": "…", "type": "function", "function": {"name": "…", "arguments": "{…}"}}'
            raise invalid(where, f"{where} is {call!r:.60}; accepted: {accepted}.")
    if call.get("type", "function") != "function":
        raise invalid(f"{where}.type", f"{where}.type is {call['type']!r:.60}; accepted: 'function'.")
    if not NAME.fullmatch(name):
        field = f"{where}.function.name"
        raise invalid(field, f"{field} is {name!r:.60}; accepted: 1 to 64 letters, digits, dots, _ and -.")
    try:
        given = json_value(arguments or "{}")
        wrong = "" if isinstance(given, dict) else ", which is no object"
    except ValueError as error:
        given, wrong = None, f": {error}"
    if wrong:
        field = f"{where}.function.arguments"
        raise invalid(field, f"{field} is {arguments!r:.60}{wrong}; accepted: the JSON text of an object.")
    return {"id": id, "type": "function", "function": {"name": name, "arguments": given}}


def _part_text(part: Any, where: str) -> str:
    accepted = 'accepted: {"type": "text", "text": "..."}'
    if not isinstance(part, dict):
        raise invalid(where, f"{where} is {part!r:.60}; {accepted}.")
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise invalid(f"{where}.type", f"{where}.type is {kind!r:.60}: this model reads text alone; {accepted}.")
    if not isinstance(text, str):
        raise invalid(f"{where}.text", f"{where}.text is {text!r:.60}; {accepted}.")
    return text
