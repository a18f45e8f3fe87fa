"""The body of `POST /v1/responses`, checked: every field works, has no effect on any token, or is refused by name.

In the end it is a chat request in other words, and so it is made into one: forms, tools and sampling have one meaning
on this server. Its refusals are worded for this API. Knows nothing of the engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from app.answering.checkers import CHECKER
from app.config.efforts import EFFORTS, THINKING
from app.errors import ApiError, invalid
from app.openai.request_models import (
    MAX_TOP_LOGPROBS,
    REPETITION,
    ChatRequest,
    DeadlineS,
    OutputTokens,
    Priority,
    Private,
    Seed,
    Temperature,
    TopP,
)
from app.openai.responses_items import SERVER_LABEL, Json, qualified
from app.openai.speculation import SPECULATION
from app.request_body import NO_EFFECT, Refusal, parse

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

# User, metadata and store are kept, and given back.
RESPONSES_NO_EFFECT = NO_EFFECT - {"user", "metadata", "store"} | {"client_metadata"}
RESPONSES_REFUSED: Mapping[str, Refusal] = {
    "background": Refusal("false", lambda v: v is False),
    "conversation": Refusal("previous_response_id"),
    "prompt": Refusal("instructions and input"),
    "context_management": Refusal("no management: an input too long is refused"),
    "moderation": Refusal("no moderation"),
    "image": Refusal("no images: this model reads and writes text"),
    "access_programs": Refusal("no access programs"),
    "messages": Refusal("input; messages go to /v1/chat/completions"),
    "response_format": Refusal("text.format"),
    "max_tokens": Refusal("max_output_tokens"),
    "max_completion_tokens": Refusal("max_output_tokens"),
    "n": Refusal("1: a response is one answer", lambda v: v == 1),
    "stop": Refusal("no stops; /v1/chat/completions has them", lambda v: v == []),
}

_FORMATS = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "name": "…", "schema": {…}}'
SERVED_KINDS = ("mcp", "web_search", "web_search_preview")  # of tools that the server runs
WEB_SEARCH = "web_search"  # the server's tool of that name, where it has a search engine
_SUMMARIES = ("auto", "concise", "detailed", "none")  # the thinking comes whole, so none of them shortens it
_CHOICES = '"auto", "none", "required" or {"type": "function", "name": "…"}'
_SERVED = f'{{"type": "mcp", "server_label": "{SERVER_LABEL}", "allowed_tools": ["…"], "require_approval": "never"}}'


class ResponseStreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_obfuscation: bool = False  # hides lengths of chunks on OpenAI's network; without effect here


class ResponseRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(description='the served model\'s name or "default"; GET /v1/models lists them')
    input: str | list[Any] = Field(description="a string, or a list of items such as messages")  # checked as items
    instructions: str | None = Field(None, description="a string: it stands before the input, as a system message")
    previous_response_id: str | None = Field(None, description="the id of a response that was stored")
    tools: list[Any] | None = Field(  # checked by `Offer`
        None, max_length=512,
        description='a list of at most 512 of {"type": "function", "name", "description"?, "parameters"?, "strict"?}, '
        f'{{"type": "namespace", "name", "tools"}}, {{"type": "web_search"}} and {_SERVED}',
    )  # fmt: skip
    tool_choice: Any = Field(None, description=_CHOICES)
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    max_tool_calls: int | None = Field(None, ge=1, description="1 or more calls of the server's tools")
    max_output_tokens: OutputTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    seed: Seed = None
    repetition_detection: dict[str, Any] | None = Field(None, description=REPETITION)  # checked as a chat request's
    speculation: str | dict[str, Any] | None = Field(None, description=SPECULATION)  # checked as a chat request's
    priority: Priority = None
    deadline_s: DeadlineS = None
    text: dict[str, Any] | None = Field(None, description=f'{{"format": …}}, where a format is {_FORMATS}')
    reasoning: dict[str, Any] | None = Field(None, description=f'{{"effort": {EFFORTS}}}')
    thinking: dict[str, Any] | None = Field(None, description=THINKING)  # checked as a chat request's
    strategy: str | None = Field(None, description="the name of a strategy, such as best_of_n; GET /api/strategies")
    strategy_options: dict[str, Any] | None = Field(None, description="an object of the strategy's options")
    checker: dict[str, Any] | None = Field(None, description=CHECKER)
    private: Private = False
    include: list[str] = Field(default_factory=list, description=f'a list that may have "{LOGPROBS}" and "{ENCRYPTED}"')
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description=f"an integer from 0 to {MAX_TOP_LOGPROBS}, with include"
    )
    stream: bool = Field(False, description="true or false")
    stream_options: ResponseStreamOptions | None = Field(
        None, description='an object such as {"include_obfuscation": false}, and only with stream'
    )
    store: bool = Field(True, description="true or false")
    metadata: dict[str, str] = Field(
        default_factory=dict, max_length=16,
        description="an object of at most 16 strings, with keys of at most 64 characters and values of at most 512",
    )  # fmt: skip
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description='"disabled": an input too long is refused; "auto": its oldest turns are left out'
    )
    user: str | None = Field(None, description="a string")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description='an object of template variables, such as {"enable_thinking": false}'
    )

    @field_validator("metadata")
    @classmethod
    def _pairs(cls, value: dict[str, str]) -> dict[str, str]:
        if any(len(key) > 64 or len(text) > 512 for key, text in value.items()):
            raise ValueError("metadata")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ResponseRequest:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options is only accepted together with stream: true.")
        if unknown := [name for name in self.include if name not in (LOGPROBS, ENCRYPTED)]:
            raise invalid("include", f"include has {unknown[0]!r:.60}; accepted: {LOGPROBS!r}, {ENCRYPTED!r}.")
        if self.top_logprobs and not self.shows_logprobs:
            raise invalid("top_logprobs", f"top_logprobs is only accepted together with include: [{LOGPROBS!r}].")
        return self

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in self.include

    def chat(self, messages: list[Json], offer: Offer, shown: Sequence[Json]) -> ChatRequest:
        """The same as a chat request; `shown` are all tools, as chat completions have them.

        Raises:
            ApiError: 400, in that request's words; `offer.reworded` puts them into this one's.
        """
        one_by_one = self.max_tool_calls is not None and offer.served is not None  # so that turns count calls
        body = {
            "model": self.model, "messages": messages, "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature, "top_p": self.top_p, "seed": self.seed,
            "repetition_detection": self.repetition_detection, "speculation": self.speculation,
            "response_format": _response_format(self.text), "tools": list(shown),
            "tool_choice": offer.choice, "parallel_tool_calls": False if one_by_one else self.parallel_tool_calls,
            "logprobs": self.shows_logprobs, "top_logprobs": self.top_logprobs,
            "verbosity": (self.text or {}).get("verbosity"),
            "reasoning_effort": _effort(self.reasoning), "thinking": self.thinking, "strategy": self.strategy,
            "strategy_options": self.strategy_options, "checker": self.checker,
            "chat_template_kwargs": self.chat_template_kwargs, "private": self.private,
        }  # fmt: skip
        return parse(body, ChatRequest)


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a request: `functions` are the client's own, `served` names the server's that it wants."""

    functions: list[Json]  # as chat completions have them
    places: list[int]  # of the functions, in the request's list
    served: Literal["all"] | list[str] | None
    served_place: int
    choice: Any  # as chat completions have it
    namespaces: Mapping[str, tuple[str, str]]  # by a function's name: its namespace, and its name there

    @classmethod
    def of(cls, request: ResponseRequest) -> Offer:
        """
        Raises:
            ApiError: 400, naming the place.
        """
        functions: list[Json] = []
        places: list[int] = []
        namespaces: dict[str, tuple[str, str]] = {}
        served: Literal["all"] | list[str] | None = None
        served_place = 0
        searches: int | None = None  # the place of the server's web search
        for at, tool in enumerate(request.tools or []):
            where = f"tools[{at}]"
            kind = tool.get("type") if isinstance(tool, Mapping) else None
            match kind:
                case "function":
                    functions.append({"type": "function", "function": _function(tool, where)})
                    places.append(at)
                case "namespace":
                    inside = _namespace(tool, where)
                    functions += inside.values()
                    places += [at] * len(inside)
                    namespaces |= {
                        function["function"]["name"]: (tool["name"], name) for name, function in inside.items()
                    }
                case "web_search" | "web_search_preview":
                    _only_search_options(tool, where)
                    searches = at
                case "mcp":
                    if served is not None:
                        raise invalid(where, f"{where} names the server's tools again; accepted: one entry for them.")
                    served, served_place = _served(tool, where), at
                case None:
                    raise invalid(where, f"{where} is {tool!r:.60}; accepted: an object with a type.")
                case _:
                    accepted = f"'function', 'namespace', 'web_search' or {_SERVED}"
                    raise invalid(f"{where}.type", f"{where}.type is {kind!r:.60}; accepted: {accepted}.")
        if searches is not None and served != "all":
            served, served_place = [*(served or ()), WEB_SEARCH], searches
        choice = _choice(request.tool_choice)
        if served is not None and choice not in (None, "auto", "none"):
            raise invalid(
                "tool_choice", "tool_choice asks for a call in every turn, and the server's tools take several; "
                "accepted: 'auto' or 'none' together with tools of the server.",
            )  # fmt: skip
        return cls(functions, places, served, served_place, choice, namespaces)

    def reworded(self, error: ApiError) -> ApiError:
        """A chat request's refusal in the words of this API."""

        def reword(text: str) -> str:
            text = re.sub(r"\btools\[(\d+)\](\.function)?", self._place, text)
            for theirs, ours in _WORDS:
                text = re.sub(theirs, ours, text)
            return text

        return error.reworded(reword)

    def _place(self, found: re.Match[str]) -> str:
        at = int(found[1])
        return f"tools[{self.places[at] if at < len(self.places) else self.served_place}]"


_WORDS = (
    (r"\bresponse_format(\.json_schema)?\b", "text.format"),
    (r"\btool_choice\.function\b", "tool_choice"),
    (r'(?<!thinking\.)(?<!speculation\.)(?<!")\bmax_(completion_)?tokens\b', "max_output_tokens"),
    (r"\breasoning_effort\b", "reasoning.effort"),
    (r"\bverbosity\b", "text.verbosity"),
    (r"^messages\b", "input"),
)


def _only_search_options(tool: Mapping[str, Any], where: str) -> None:
    """Refuses what would change a search; the rest concerns OpenAI's own engine."""
    known = ("type", "search_context_size", "user_location", "external_web_access")
    for key, value in tool.items():
        if key not in known and value is not None:
            raise invalid(f"{where}.{key}", f"{where}.{key:.60} is not supported; accepted: {', '.join(known)}.")


def _namespace(tool: Mapping[str, Any], where: str) -> dict[str, Json]:
    """Returns the functions of a namespace by their names there, as chat completions have them."""
    for key, value in tool.items():
        if key not in ("type", "name", "description", "tools") and value is not None:
            raise invalid(f"{where}.{key}", f"{where}.{key:.60} is not supported; accepted: name, description, tools.")
    name, tools = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not isinstance(tools, list):
        accepted = '{"type": "namespace", "name": "…", "tools": [{"type": "function", …}]}'
        raise invalid(where, f"{where} is {tool!r:.60}; accepted: {accepted}.")
    made: dict[str, Json] = {}
    for at, inner in enumerate(tools):
        place = f"{where}.tools[{at}]"
        if not isinstance(inner, Mapping) or inner.get("type") != "function" or not isinstance(inner.get("name"), str):
            raise invalid(place, f"{place} is {inner!r:.60}; accepted: a function.")
        function = _function(inner, place)
        made[inner["name"]] = {"type": "function", "function": {**function, "name": qualified(name, inner["name"])}}
    return made


def _function(fields: Mapping[str, Any], where: str) -> Json:
    known = ("name", "description", "parameters", "strict")
    for key, value in fields.items():
        if key not in ("type", *known) and value is not None:
            raise invalid(f"{where}.{key}", f"{where}.{key:.60} is not supported; accepted: {', '.join(known)}.")
    return {key: fields[key] for key in known if fields.get(key) is not None}


def _served(fields: Mapping[str, Any], where: str) -> Literal["all"] | list[str]:
    """Returns which of the server's tools are wanted."""
    known = ("type", "server_label", "allowed_tools", "require_approval")
    for key, value in fields.items():
        if key not in known and value is not None:
            raise invalid(f"{where}.{key}", f"{where}.{key:.60} is not supported; accepted: {_SERVED}.")
    if fields.get("server_label") != SERVER_LABEL:
        path = f"{where}.server_label"
        message = f"{path} is {fields.get('server_label')!r:.60}; accepted: {SERVER_LABEL!r}, the server's own tools."
        raise invalid(path, message)
    if fields.get("require_approval") != "never":
        path = f"{where}.require_approval"
        raise invalid(
            path, f"{path} is {fields.get('require_approval')!r:.60}; accepted: 'never', as nobody can be asked here: "
            "calls for which the server wants a person's approval fail.",
        )  # fmt: skip
    wanted, path = fields.get("allowed_tools"), f"{where}.allowed_tools"
    match wanted:
        case {"tool_names": names, **more} if not any(value is not None for value in more.values()):
            wanted, path = names, f"{path}.tool_names"
    if wanted is None:
        return "all"
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise invalid(path, f"{path} is {wanted!r:.60}; accepted: a list of tools' names; without it: all.")
    return wanted


def _choice(value: Any) -> Any:
    match value:
        case None | "auto" | "none" | "required":
            return value
        case {"type": "function", "name": str(name), **more} if not more:
            return {"type": "function", "function": {"name": name}}
        case {"type": "function", "name": str(name), "namespace": str(namespace), **more} if not more:
            return {"type": "function", "function": {"name": qualified(namespace, name)}}
    raise invalid("tool_choice", f"tool_choice is {value!r:.60}; accepted: {_CHOICES}.")


def _response_format(text: Mapping[str, Any] | None) -> Any:
    if text is None:
        return None
    for key, value in text.items():
        if value is not None and key not in ("format", "verbosity"):
            raise invalid(f"text.{key}", f"text.{key:.60} is {value!r:.60}; accepted: text.format, text.verbosity.")
    match text.get("format"):
        case {"type": "json_schema", **inner}:
            return {"type": "json_schema", "json_schema": inner}
        case None | {"type": "text" | "json_object"}:
            return text.get("format")
        case other:
            raise invalid("text.format", f"text.format is {other!r:.60}; accepted: {_FORMATS}.")


def _effort(reasoning: Mapping[str, Any] | None) -> Any:  # checked as a chat request's
    asked = {key: value for key, value in (reasoning or {}).items() if value is not None}
    for key, value in asked.items():
        if key != "effort" and not (key in ("summary", "generate_summary") and value in _SUMMARIES):
            accepted = f"effort, and summary as {', '.join(_SUMMARIES)}"
            raise invalid(
                f"reasoning.{key}", f"reasoning.{key:.60} is {value!r:.60}; accepted: {accepted}.",
                "unsupported_parameter",
            )  # fmt: skip
    return asked.get("effort")
