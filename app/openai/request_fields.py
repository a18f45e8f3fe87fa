"""Checks every field of a request: it works, it is accepted without effect, or it is refused by name.

`parse` turns a JSON object into a checked request or raises the one 400 that says which field is wrong and what would
be accepted. `docs/api.md` lists these tables; a test holds the two together. Knows nothing of the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from annotated_types import MaxLen
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from app.errors import ApiError, invalid
from app.request_body import is_large

_MAX_FIELDS = 100  # of an object within a request
_SHOWN = 61  # characters, or parts, of a value in a message

Request = TypeVar("Request", bound=BaseModel)

# About OpenAI's own service, its billing or its data retention; they change no token of an answer.
NO_EFFECT = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prompt_cache_options", "inference_geo",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Refusal:
    """A known field that does nothing here yet: what would be accepted, and which values ask for nothing."""

    accepted: str
    neutral: Callable[[Any], bool] = lambda value: False


_NONE: Mapping[str, Refusal] = MappingProxyType({})


def _empty(value: Any) -> bool:
    return value == [] or value == {}


CHAT_REFUSED: Mapping[str, Refusal] = {
    "functions": Refusal("tools", _empty),
    "function_call": Refusal("tool_choice", lambda v: v in ("none", "auto")),
    "structured_outputs": Refusal("guided_json, guided_regex, guided_choice or guided_grammar", _empty),
    "modalities": Refusal('["text"]', lambda v: v == ["text"]),
    "audio": Refusal("no audio: this model reads and writes text"),
    "prediction": Refusal("no prediction"),
    "web_search_options": Refusal("no web search"),
    "verbosity": Refusal('"medium"; say in a message how long the answer should be', lambda v: v == "medium"),
    "moderation": Refusal("no moderation"),
    "prompt_logprobs": Refusal("logprobs; for the prompt's: /v1/completions with echo", lambda v: v is False),
    "echo": Refusal("false", lambda v: v is False),
    "best_of": Refusal("n", lambda v: v == 1),
}  # fmt: skip

COMPLETION_REFUSED: Mapping[str, Refusal] = {
    "suffix": Refusal("no suffix: this model continues a text, it does not fill gaps", lambda v: v == ""),
    "structured_outputs": Refusal("guided_json, guided_regex, guided_choice or guided_grammar", _empty),
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
    body: Mapping[str, Any], model: type[Request], refused: Mapping[str, Refusal] = _NONE, *,
    no_effect: frozenset[str] = NO_EFFECT,
) -> Request:  # fmt: skip
    """`body` as a checked request. A null is an absent field.

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
    given = {name: value for name, value in body.items() if name in known and value is not None}
    for name, value in given.items():
        _check_size(name, value, known[name])
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise explain(error, model) from None


async def checked(
    body: Mapping[str, Any], model: type[Request], refused: Mapping[str, Refusal] = _NONE, *,
    no_effect: frozenset[str] = NO_EFFECT,
) -> Request:  # fmt: skip
    """`parse`, off the event loop where the body is large."""
    if is_large(body):
        return await asyncio.to_thread(parse, body, model, refused, no_effect=no_effect)
    return parse(body, model, refused, no_effect=no_effect)


def _check_size(name: str, value: Any, field: FieldInfo) -> None:
    """Refuse what has far too many parts before each of them is found wrong, which takes seconds. Raises ApiError."""
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
    description = model.model_fields[field].description if field in model.model_fields else None
    accepted = f"; accepted: {description}" if description else ""
    if first["type"] == "missing" and len(location) == 1:
        return invalid(field, f"{field} is missing{accepted}.", "missing_required_parameter")
    return invalid(_path(location), f"{_path(location)} is {_short(first['input'])}{accepted}.")


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
