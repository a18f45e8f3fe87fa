"""Reads a request's body as JSON, bounded, and validates its fields.

The size limit is enforced twice, on the length that the client announces and on the bytes it sends. JSON that passes is
safe to walk, to show and to encode: no half surrogate pairs, no NaN or infinity, no depth that overflows the stack, and
no more parts than the interpreter can read in one go without delaying other requests.

Each field of a request works, is accepted without effect, or is refused by name, with one 400 that names the field and
the accepted values. `docs/api.md` lists these fields; a test compares the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import json.scanner
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeVar, get_args

from annotated_types import MaxLen
from fastapi import Request
from pydantic import BaseModel, ByteSize, ValidationError
from pydantic.fields import FieldInfo
from starlette.requests import ClientDisconnect

from app.errors import ApiError, invalid

MAX_BODY_BYTES = 10 * 1024 * 1024
SMALL_BODY_BYTES = 1024 * 1024  # of a body without long texts
MAX_DEPTH = 200  # objects and lists inside each other
MAX_VALUES = 500_000  # in a body; of token ids most of all
MAX_NAMES = 50_000  # of values in objects
MAX_CONTAINERS = 50_000  # objects and lists
_DRAIN_BYTES = 1 << 30  # read and dropped before a 413, so that a client still sending gets to read it
_DRAIN_S = 5.0
_LONG = 1 << 16  # characters; reading more than this would be felt by running streams
_PARTS = re.compile(r'[\[\]{}:,"]')
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_LARGE = 2_000  # parts of a value


async def json_object(request: Request, most: int = SMALL_BODY_BYTES, *, names: int = MAX_NAMES) -> dict[str, Any]:
    """The body, of at most `most` bytes and `names` names, as a JSON object; an empty body is an empty object.

    Raises:
        ApiError: 413 or 400, saying why.
    """
    raw = bytearray()
    async for piece in pieces(request, most):
        raw += piece
    if not raw or raw.isspace():
        return {}
    try:
        value = await asyncio.to_thread(_decoded, raw, names) if len(raw) > _LONG else _decoded(raw, names)
    except UnicodeDecodeError as error:
        raise invalid(None, f"The body is not valid UTF-8 (byte {error.start}).", "invalid_json") from None
    except ValueError as error:
        raise invalid(None, f"The body is not valid JSON: {error}.", "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(None, f"The body is a JSON {type(value).__name__}; accepted: a JSON object.", "invalid_json")
    return value


def _decoded(raw: bytearray, names: int) -> Any:
    return json_value(raw.decode("utf-8"), names)


def json_value(text: str, names: int = MAX_NAMES) -> Any:
    """A client's JSON text as a value.

    Raises:
        ValueError: it is not JSON, or not as this module's docstring promises; the message names the fault.
    """
    _check_parts(text, names)
    try:
        value = (_IN_STEPS if len(text) > MAX_BODY_BYTES else _AT_ONCE).decode(text)
        if _HALF.search(text):
            _check_characters(value)
    except UnicodeEncodeError:  # an escaped half is valid JSON but no character: it has no UTF-8 form
        raise ValueError("it has half of a surrogate pair (\\ud800 to \\udfff)") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _too_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


def _check_parts(text: str, names: int) -> None:
    """
    Raises:
        ValueError: the text has too many values, names, or lists and objects, one text that is too long, or is nested
            too deeply.
    """
    limits = {",": MAX_VALUES, ":": names, "[": MAX_CONTAINERS, "{": MAX_CONTAINERS}
    if len(text) <= MAX_BODY_BYTES and all(text.count(mark) <= most for mark, most in limits.items()):
        return
    left, at, depth = dict(limits), 0, 0  # some marks may be within strings
    while found := _PARTS.search(text, at):
        mark, at = found[0], found.end()
        if mark == '"':
            begun, at = at, _end_of_string(text, at)
            if at - begun > MAX_BODY_BYTES:
                raise ValueError(
                    f"a text in it has more than {MAX_BODY_BYTES:,} characters; accepted: at most that many"
                )
            continue
        depth += (mark in "[{") - (mark in "]}")
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if mark in "]}":
            continue
        left[mark] -= 1
        if left[mark] < 0:
            what = {",": "values", ":": "names of values"}.get(mark, "lists or objects")
            raise ValueError(f"it has more than {limits[mark]:,} {what}; accepted: at most that many")


def _end_of_string(text: str, at: int) -> int:
    """Finds the end of the JSON string that `at` is in, step by step: a long one is no reason for others to wait."""
    while (end := text.find('"', at)) >= 0:
        escapes = end
        while escapes > at and text[escapes - 1] == "\\":
            escapes -= 1
        at = end + 1
        if (end - escapes) % 2 == 0:
            return at
    return len(text)


def is_large(value: Any, most: int = _LARGE, long: int | None = _LONG) -> bool:
    """Returns whether the JSON `value` has more than `most` parts, or a text of more than `long` characters, so that
    work on it belongs in a thread."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            if long is not None and len(part) > long:
                return True
        elif isinstance(part, Mapping | list | tuple):
            most -= len(part)
            if most < 0:
                return True
            left += part.values() if isinstance(part, Mapping) else part
    return False


def _check_characters(value: Any) -> None:
    """
    Raises:
        UnicodeEncodeError: a string has half of a surrogate pair.
    """
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            part.encode("utf-8")
        elif isinstance(part, dict):
            left += (*part, *part.values())
        elif isinstance(part, list):
            left += part


_TOO_DEEP = f"it is nested too deeply; accepted: at most {MAX_DEPTH} levels"


def _too_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            part
            for whole in level
            for part in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(part, dict | list)
        ]
        if not level:
            return False
    return True


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text:.40} is too large a number")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _in_steps() -> Any:
    """A decoder in Python: other threads run between its values, while the one in C keeps the interpreter to the end.
    Any: its parts are untyped.
    """
    decoder: Any = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
    library: Any = json
    decoder.parse_object, decoder.parse_array = library.decoder.JSONObject, library.decoder.JSONArray
    decoder.scan_once = library.scanner.py_make_scanner(decoder)
    return decoder


_AT_ONCE = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
_IN_STEPS = _in_steps()


async def pieces(request: Request, most: int) -> AsyncGenerator[bytes, None]:
    """The body as it comes, `most` bytes of it.

    Raises:
        ApiError: 413 when it is larger, by its announced length or by its bytes.
    """
    announced = request.headers.get("content-length", "")
    size = 0
    too_large = announced.isdigit() and int(announced) > most
    if too_large and "expect" in request.headers:
        raise _too_large(announced, most)  # the client asks before sending: say no now
    stream = request.stream()
    try:
        while not too_large and (piece := await anext(stream, None)) is not None:
            size += len(piece)
            too_large = size > most
            if not too_large:
                yield piece
        if too_large:
            await _drain(stream)
    except ClientDisconnect:
        raise ApiError(499, "The client closed the connection.", code="client_closed") from None
    if too_large:
        raise _too_large(announced or f"more than {most}", most)


async def _drain(stream: AsyncIterator[bytes]) -> None:
    """Read on and drop it: a client that is refused while still sending may never read the answer."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            async for piece in stream:
                if (size := size + len(piece)) > _DRAIN_BYTES:
                    return


def _too_large(size: str, most: int) -> ApiError:
    limit = ByteSize(most).human_readable(separator=" ").replace(".0 ", " ")
    message = f"The body has {size} bytes; accepted: at most {most} ({limit})."
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


IGNORED = "ponder.ignored_fields"  # of a request's scope: names that nothing knows, where such are let pass
_MAX_FIELDS = 100  # of an object within a request
_SHOWN = 61  # characters, or parts, of a value in a message

BodyModel = TypeVar("BodyModel", bound=BaseModel)

# About OpenAI's own service, its billing or its data retention; they change no token of an answer.
NO_EFFECT = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prompt_cache_options", "inference_geo",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Refusal:
    """A known field that does nothing here yet: the accepted values, and the neutral ones."""

    accepted: str
    neutral: Callable[[Any], bool] = lambda value: False


_NONE: Mapping[str, Refusal] = MappingProxyType({})


def _empty(value: Any) -> bool:
    return value == [] or value == {}


# Fields of vLLM's and others' that their clients send as they come.
_GENERATION: Mapping[str, Refusal] = {
    "skip_special_tokens": Refusal("true: special tokens are no text of an answer", lambda v: v is True),
    "spaces_between_special_tokens": Refusal("true: there are none in an answer", lambda v: isinstance(v, bool)),
    "include_stop_str_in_output": Refusal("false", lambda v: v is False),
    "include_reasoning": Refusal('true; reasoning_effort "none" has none', lambda v: v is True),
    "use_beam_search": Refusal("the strategy 'beam'", lambda v: v is False),
    "length_penalty": Refusal("1; the strategy 'beam' has one", lambda v: v == 1),
}

CHAT_REFUSED: Mapping[str, Refusal] = {
    "functions": Refusal("tools", _empty),
    "function_call": Refusal("tool_choice", lambda v: v in ("none", "auto")),
    "modalities": Refusal('["text"]', lambda v: v == ["text"]),
    "audio": Refusal("no audio: this model reads and writes text"),
    "web_search_options": Refusal("no web search"),
    "moderation": Refusal("no moderation"),
    "prompt_logprobs": Refusal("logprobs; for the prompt's: /v1/completions with echo", lambda v: v is False),
    "echo": Refusal("false", lambda v: v is False),
    "best_of": Refusal("n", lambda v: v == 1),
    "add_generation_prompt": Refusal("true", lambda v: v is True),
    "continue_final_message": Refusal("false; /v1/completions continues a text", lambda v: v is False),
    **_GENERATION,
}  # fmt: skip

COMPLETION_REFUSED: Mapping[str, Refusal] = {
    "suffix": Refusal("no suffix: this model continues a text, it does not fill gaps", lambda v: v == ""),
    **_GENERATION,
    "max_completion_tokens": Refusal("max_tokens"),
    "top_logprobs": Refusal("logprobs, an integer here"),
    "prompt_logprobs": Refusal("echo together with logprobs", lambda v: v is False),
    "messages": Refusal("prompt; messages go to /v1/chat/completions"),
    "chat_template_kwargs": Refusal("no chat template here; it belongs to /v1/chat/completions", _empty),
    **{
        name: Refusal("no thinking here; it belongs to /v1/chat/completions", _empty)
        for name in ("reasoning_effort", "thinking", "strategy", "strategy_options", "checker")
    },
    "tools": Refusal("no tools here; they belong to /v1/chat/completions", _empty),
}


def parse(
    body: Mapping[str, Any], model: type[BodyModel], refused: Mapping[str, Refusal] = _NONE, *,
    no_effect: frozenset[str] = NO_EFFECT, nulls: bool = False,
) -> BodyModel:  # fmt: skip
    """`body` as a checked request. A null is an absent field, unless `nulls` are values.

    Raises:
        ApiError: 400, naming the field.
    """
    known = model.model_fields
    for name, value in body.items():
        if name in known or name in no_effect:
            continue
        refusal = refused.get(name)
        if refusal is None:
            raise invalid(
                name, f"{_short(name)} is not a field of this request; accepted: {', '.join(sorted(known))}.",
                "unknown_parameter",
            )  # fmt: skip
        if value is not None and not refusal.neutral(value):
            raise invalid(
                name, f"{name} is not supported yet (it was {_short(value)}); accepted: {refusal.accepted}.",
                "unsupported_parameter",
            )  # fmt: skip
    given = {name: value for name, value in body.items() if name in known and (nulls or value is not None)}
    for name, value in given.items():
        _check_size(name, value, known[name])
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise explain(error, model) from None


async def checked(
    body: Mapping[str, Any], model: type[BodyModel], refused: Mapping[str, Refusal] = _NONE, *,
    no_effect: frozenset[str] = NO_EFFECT, nulls: bool = False,
) -> BodyModel:  # fmt: skip
    """`parse`, off the event loop where the body is large."""
    if is_large(body):
        return await asyncio.to_thread(parse, body, model, refused, no_effect=no_effect, nulls=nulls)
    return parse(body, model, refused, no_effect=no_effect, nulls=nulls)


class JsonBody(Generic[BodyModel]):
    """Dependency: the body of a request as `model` has it, read within limits: `most` bytes and `names` names.

    With `nulls` a null is a value; otherwise it is an absent field. `before` may refuse the body first. The model's
    schema is the document's (`app.openapi`).
    """

    def __init__(
        self, model: type[BodyModel], refused: Mapping[str, Refusal] = _NONE, *,
        no_effect: frozenset[str] = frozenset(), most: int = SMALL_BODY_BYTES, names: int = MAX_NAMES,
        nulls: bool = False,
        before: Callable[[Mapping[str, Any]], None] = lambda body: None,
    ) -> None:  # fmt: skip
        self.model = model
        self._refused = refused
        self._no_effect = no_effect
        self._most = most
        self._names = names
        self._nulls = nulls
        self._before = before

    async def __call__(self, request: Request) -> BodyModel:
        """
        Raises:
            ApiError: 413 or 400, naming the field.
        """
        body = await json_object(request, self._most, names=self._names)
        if request.app.state.ponder.settings.unknown_fields == "warn":
            known = self.model.model_fields.keys() | self._no_effect | self._refused.keys()
            request.scope[IGNORED] = ignored = sorted(body.keys() - known)
            body = {name: value for name, value in body.items() if name not in ignored}
        self._before(body)
        return await checked(body, self.model, self._refused, no_effect=self._no_effect, nulls=self._nulls)


def _check_size(name: str, value: Any, field: FieldInfo) -> None:
    """Refuse a value with far too many parts before validating each of them, which takes seconds. Raises ApiError."""
    if not isinstance(value, list | dict):
        return
    limits = [each.max_length for each in field.metadata if isinstance(each, MaxLen)]
    kinds = get_args(field.annotation) or (field.annotation,)
    if isinstance(value, dict) and any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds):
        limits.append(_MAX_FIELDS)
    if limits and len(value) > min(limits):
        accepted = f"; accepted: {field.description}" if field.description else ""
        raise invalid(name, f"{name} is {_short(value)}{accepted}.")


def explain(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """The first thing wrong with a request, as a 400."""
    first = error.errors(include_url=False)[0]
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, ApiError):  # a validator of ours said it better
        return raised
    location = first["loc"]
    field = str(location[0]) if location else None
    description = _accepted(location, model)
    accepted = f"; accepted: {description}" if description else ""
    if first["type"] == "missing" and len(location) == 1:
        return invalid(field, f"{field} is missing{accepted}.", "missing_required_parameter")
    return invalid(_path(location), f"{_path(location)} is {_short(first['input'])}{accepted}.")


def _accepted(location: tuple[int | str, ...], model: type[BaseModel]) -> str | None:
    """The description of the field at a place, or of the nearest one around it, with the names of an object's fields
    where it has none of this name."""
    description: str | None = None
    inside: type[BaseModel] | None = model
    for part in location:
        if inside is None or not isinstance(part, str):
            break
        if part not in inside.model_fields:
            fields = ", ".join(sorted(inside.model_fields))
            return description if inside is model else f"{description} (fields: {fields})" if description else fields
        field = inside.model_fields[part]
        description = field.description or description
        kinds = get_args(field.annotation) or (field.annotation,)
        inside = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return description


def _path(location: tuple[int | str, ...]) -> str:
    """A place in the body as `messages[0].content`. Union branches that pydantic names are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not path:
            path = part
        elif part.isidentifier() and part not in ("str", "int", "list", "float", "bool"):
            path += f".{part}"
    return path


def _short(value: Any) -> str:
    text = repr(_beginning(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _beginning(value: Any) -> Any:
    """As much of JSON `value` as can be seen of it in a message."""
    if isinstance(value, str):
        return value[:_SHOWN]
    if isinstance(value, list):
        return [_beginning(part) for part in value[:_SHOWN]]
    if isinstance(value, dict):
        return {name[:_SHOWN]: _beginning(part) for name, part in islice(value.items(), _SHOWN)}
    return value
