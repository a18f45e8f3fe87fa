"""The input items of a response as a conversation: messages, calls, results and thinking become turns of a chat.

Items lie flat in a list, a chat's turns contain theirs: so calls that stand together become one assistant's turn, and
each turn's results follow it wherever their items stood. Gaps are filled as in a chat's history (`chat_messages`).
Knows nothing of models, requests or the store.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.errors import invalid
from app.openai.chat_messages import NO_RESULT, PLACE, stray
from tools.result import frame

Json = dict[str, Any]  # Any: a client's JSON
Placed = tuple[str, Any]  # an item, and how an error names its place; Any: a client's JSON

SERVER_LABEL = "ponder"  # of the server's own tools, among the MCP servers that a client may name
CALL_PREFIX = "mcp_"  # before the id of a call that the server ran: an item of its kind has no other place for it
MAX_NAME = 64  # characters of a function's name
_ROLES = ("user", "assistant", "system", "developer")
_KINDS = "message, function_call, function_call_output, reasoning, mcp_call and item_reference"


@dataclass(frozen=True, slots=True)
class ResponseConversation:
    """`messages` as chat completions take them; `read_from` names the tools with results among them, and `ran` those of
    them that are the server's."""

    messages: list[Json]
    read_from: frozenset[str]
    ran: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Said:
    role: str
    text: str
    images: tuple[tuple[int, Json], ...] = ()  # `image_url` parts, each so many characters into the text


@dataclass(frozen=True, slots=True)
class _Thought:
    text: str


@dataclass(frozen=True, slots=True)
class _Call:
    where: str
    id: str
    name: str
    arguments: str
    result: str | None = None  # where the server ran it


@dataclass(frozen=True, slots=True)
class _Result:
    where: str
    call_id: str
    text: str


_Item = _Said | _Thought | _Call | _Result


def conversation(placed: Iterable[Placed]) -> ResponseConversation:
    """
    Raises:
        ApiError: 400, naming the item's place.
    """
    items = [item for where, value in placed if (item := _read(value, where)) is not None]
    calls: dict[str, _Call] = {}
    results: dict[str, str] = {}
    for at, item in enumerate(items):
        if isinstance(item, _Call):
            if item.id in calls:
                raise invalid(item.where, f"{item.where} has the call_id {item.id!r:.60} of a call before it.")
            calls[item.id] = item
            if item.result is not None:
                results[item.id] = item.result
        elif isinstance(item, _Result):
            if item.call_id in calls and item.call_id not in results:
                results[item.call_id] = item.text
            else:
                items[at] = _Said("user", stray(item.text, None)["content"])
    turns = _Turns(results)
    for item in items:
        turns.add(item)
    turns.end()
    ran = frozenset(call.name for call in calls.values() if call.result is not None)
    return ResponseConversation(turns.messages, frozenset(call.name for call in calls.values()), ran)


@dataclass(slots=True)
class _Turns:
    """The messages so far, and the assistant's turn that the next item may belong to."""

    results: Mapping[str, str]
    messages: list[Json] = field(default_factory=list)
    _thought: str | None = None
    _text: str | None = None
    _calls: list[_Call] = field(default_factory=list)

    def add(self, item: _Item) -> None:
        match item:
            case _Said("assistant", text):
                if self._text is not None or self._calls:
                    self.end()
                self._text = text
            case _Said(role, text, images):
                self.end()
                self.messages.append({"role": role, "content": with_images(text, images)})
            case _Thought(text):
                if self._thought is not None or self._text is not None or self._calls:
                    self.end()
                self._thought = text
            case _Call():
                self._calls.append(item)
            case _Result():
                self.end()

    def end(self) -> None:
        """The assistant's turn is over, if there is one: it, and the results of its calls."""
        if self._thought is None and self._text is None and not self._calls:
            return
        turn: Json = {"role": "assistant", "content": self._text or ""}
        if self._thought is not None:
            turn["reasoning_content"] = self._thought
        answers: list[Json] = []
        for call in self._calls:
            result = self.results.get(call.id, NO_RESULT)
            answers.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if self._calls:
            turn["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self._calls
            ]
        self.messages += [turn, *answers]
        self._thought = self._text = None
        self._calls = []


def _read(item: Any, where: str) -> _Item | None:
    """An item; None for a call that was cut off, which nobody ran."""
    if not isinstance(item, Mapping):
        raise invalid(where, f"{where} is {item!r:.60}; accepted: an object, such as a message with role and content.")
    kind = item.get("type") or ("message" if "role" in item else None)
    match kind:
        case "message":
            return _message(item, where)
        case "reasoning":
            return _reasoning(item, where)
        case "function_call":
            _only(item, where, "id", "status", "call_id", "name", "namespace", "arguments")
            return None if item.get("status") == "incomplete" else _call(item, where, _text(item, where, "call_id"))
        case "function_call_output":
            _only(item, where, "id", "status", "call_id", "output")
            output = _content(item.get("output"), f"{where}.output", ("input_text",))
            return _Result(where, _text(item, where, "call_id"), output)
        case "mcp_call":
            return _served_call(item, where)
    raise invalid(f"{where}.type", f"{where}.type is {kind!r:.60}; accepted: {_KINDS}.")


def _message(item: Mapping[str, Any], where: str) -> _Said:
    _only(item, where, "id", "status", "role", "content")
    role = item.get("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"{where}.role is {role!r:.60}; accepted: {', '.join(_ROLES)}.")
    # Some clients give an assistant's words back as `input_text`, which says the same.
    parts = ("output_text", "input_text") if role == "assistant" else ("input_text",)
    images: list[tuple[int, Json]] = []
    text = _content(item.get("content"), f"{where}.content", parts, images if role == "user" else None)
    return _Said(role, text, tuple(images))


def _reasoning(item: Mapping[str, Any], where: str) -> _Thought:
    """The thinking itself: its content, or what `encrypted_content` has of it, or a summary."""
    _only(item, where, "id", "status", "content", "summary", "encrypted_content")
    text = _content(item.get("content") or [], f"{where}.content", ("reasoning_text",))
    if not text and (sealed := item.get("encrypted_content")) is not None:
        text = opened(sealed, f"{where}.encrypted_content")
    return _Thought(text or _content(item.get("summary") or [], f"{where}.summary", ("summary_text",)))


def sealed(text: str) -> str:
    """Returns the `encrypted_content` of a thought, for clients that keep no other part of it. It is encoded and no
    secret: the client has read the text beside it."""
    return base64.urlsafe_b64encode(text.encode()).decode()


def opened(content: Any, where: str) -> str:
    """Returns the text of a `sealed` thought. Any: a client's JSON.

    Raises:
        ApiError: 400: it is another server's.
    """
    try:
        return base64.b64decode(content, altchars=b"-_", validate=True).decode()
    except (TypeError, ValueError):
        raise invalid(where, f"{where} is {content!r:.60}; accepted: that of a response of this server.") from None


def qualified(namespace: str | None, name: str) -> str:
    """Returns the name that a model calls a function by; one of a namespace has both names."""
    whole = f"{namespace}__{name}"
    return whole if namespace is not None and len(whole) <= MAX_NAME else name


def _served_call(item: Mapping[str, Any], where: str) -> _Call | None:
    _only(item, where, "id", "status", "server_label", "name", "arguments", "output", "error")
    id = _text(item, where, "id")
    if item.get("server_label") != SERVER_LABEL or not id.startswith(CALL_PREFIX):
        raise invalid(
            where, f"{where} is a call that another server ran; accepted: those of server_label {SERVER_LABEL!r}."
        )
    output, error = item.get("output"), item.get("error")
    if output is None and error is None:  # cut off, or the server stopped before it returned
        return None
    name = _text(item, where, "name")
    if output is None:
        output = _complaint(error, f"{where}.error")
    if not isinstance(output, str):
        raise invalid(f"{where}.output", f"{where}.output is {output!r:.60}; accepted: a string.")
    # Whether the tool was one to trust is not known any more, so nobody's text is.
    return _call(item, where, id.removeprefix(CALL_PREFIX), frame(output, name))


def _complaint(error: Any, where: str) -> str:
    match error:
        case {"type": "mcp_tool_execution_error", "content": list(parts)}:
            return _content(parts, f"{where}.content", ("text",))
    accepted = '{"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "…"}]}'
    raise invalid(where, f"{where} is {error!r:.60}; accepted: {accepted}.")


def _call(item: Mapping[str, Any], where: str, id: str, result: str | None = None) -> _Call:
    name, arguments = _text(item, where, "name"), item.get("arguments")
    if not isinstance(arguments, str):
        raise invalid(f"{where}.arguments", f"{where}.arguments is {arguments!r:.60}; accepted: JSON text.")
    namespace = None if item.get("namespace") is None else _text(item, where, "namespace")
    return _Call(where, id, qualified(namespace, name), arguments, result)


def _content(value: Any, where: str, kinds: tuple[str, ...], images: list[tuple[int, Json]] | None = None) -> str:
    """Text, or parts of text of these kinds, joined. Other fields of a part of our own output are not text. Images are
    added to `images`, where they may stand."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        shown = f'{{"type": "{kinds[0]}", "text": "…"}}'
        raise invalid(where, f"{where} is {value!r:.60}; accepted: a string, or a list of {shown}.")
    text = ""
    for at, part in enumerate(value):
        if images is not None and isinstance(part, Mapping) and part.get("type") == "input_image":
            images.append((len(text), _image(part, f"{where}[{at}]")))
        else:
            text += _part(part, f"{where}[{at}]", kinds)
    return text


def _image(part: Mapping[str, Any], where: str) -> Json:
    """Returns an `input_image` as a part of a chat's message."""
    _only(part, where, "image_url", "detail")
    url = _text(part, where, "image_url")
    given = {"url": url, "detail": part.get("detail") or "auto"}
    return {"type": "image_url", "image_url": given, PLACE: f"{where}.image_url"}


def with_images(text: str, images: Iterable[tuple[int, Json]]) -> str | list[Json]:
    """Returns a message's content: its text, or parts of it with the images where they stood."""
    parts, done = list[Json](), 0
    for at, image in images:
        parts += [{"type": "text", "text": text[done:at]}, image]
        done = at
    return [*parts, {"type": "text", "text": text[done:]}] if parts else text


def _part(part: Any, where: str, kinds: tuple[str, ...]) -> str:
    if not isinstance(part, Mapping):
        raise invalid(where, f'{where} is {part!r:.60}; accepted: {{"type": "{kinds[0]}", "text": "…"}}.')
    kind = part.get("type")
    if kind not in kinds:
        raise invalid(f"{where}.type", f"{where}.type is {kind!r:.60}; accepted here: {kinds[0]}.")
    _only(part, where, "text", *(("annotations", "logprobs") if kind == "output_text" else ()))
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{where}.text", f"{where}.text is {text!r:.60}; accepted: a string.")
    return text


def _text(item: Mapping[str, Any], where: str, key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise invalid(f"{where}.{key}", f"{where}.{key} is {value!r:.60}; accepted: a string that is not empty.")
    return value


def _only(item: Mapping[str, Any], where: str, *keys: str) -> None:
    """That nothing else is given. A null is an absent key."""
    for key, value in item.items():
        if value is not None and key != "type" and key not in keys:
            raise invalid(f"{where}.{key}", f"{where}.{key:.60} is not supported; accepted: {', '.join(keys)}.")
