"""Bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`, checked: each field works, has no effect on any
token, or is refused by name.

A request is made into a chat request, so forms, tools and sampling have one meaning on this server. That one's refusals
are put into this API's words. Knows nothing of the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.anthropic.content_blocks import Conversation, Json
from app.errors import ApiError, invalid
from app.openai.request_models import MAX_STOPS, ChatRequest, Private, Temperature, TopK, TopP
from app.openai.speculation import SPECULATION
from app.request_body import Refusal, parse

_KEEPS_ALL = {"type": "clear_thinking_20251015", "keep": "all"}  # Claude Code sends it
# About Anthropic's own service, its billing or its cache.
MESSAGES_NO_EFFECT = frozenset({"metadata", "service_tier", "inference_geo", "user_profile_id", "cache_control"})
MESSAGES_REFUSED: Mapping[str, Refusal] = {
    "container": Refusal("no container: code runs as tools of the client"),
    "mcp_servers": Refusal("no servers; the operator's MCP servers are tools of /v1/responses", lambda v: v == []),
    "context_management": Refusal(
        f"no edits but {_KEEPS_ALL}, which clears nothing: an input too long is refused",
        lambda v: v in ({}, {"edits": []}, {"edits": [_KEEPS_ALL]}),
    ),
    "diagnostics": Refusal("no diagnostics; usage has the cached tokens"),
    "thread": Refusal("no thread, with every request carrying its whole conversation"),
    "speed": Refusal('"standard"', lambda v: v == "standard"),
    "stop": Refusal("stop_sequences"),
    "max_completion_tokens": Refusal("max_tokens"),
    "response_format": Refusal("output_config.format"),
}

_TOOL = '{"name", "description"?, "input_schema", "strict"?}'
_CHOICES = '{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "…"} or {"type": "none"}'
_FORMAT = '{"type": "json_schema", "schema": {…}}'
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING_FORMS = (
    '{"type": "enabled", "budget_tokens": 2 or more}, {"type": "adaptive"} or {"type": "disabled"}, the first two with '
    '"display": "summarized", "updates" or "omitted"'
)
_StopSequence = Annotated[str, Field(min_length=1, max_length=1000)]


class ThinkingFields(BaseModel):
    """`thinking` of a request. `budget_tokens` bounds the tokens of the thinking."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=2)
    display: Literal["summarized", "omitted", "updates"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ThinkingFields:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            what = "missing" if self.budget_tokens is None else f"given with the type {self.type!r}"
            raise invalid("thinking.budget_tokens", f"thinking.budget_tokens is {what}; accepted: {THINKING_FORMS}.")
        return self


class OutputConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None  # checked by `_response_format`


class ConversationRequest(BaseModel):
    """The fields that make the prompt: those of `count_tokens`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(description='the served model\'s name or "default"; GET /v1/models lists them')
    messages: list[Any] = Field(  # checked by `conversation`
        min_length=1, max_length=10_000, description="a non-empty list of {role: user, assistant or system, content}"
    )
    system: str | list[Any] | None = Field(None, description="a string, or a list of text blocks")
    tools: list[Any] | None = Field(None, max_length=512, description=f"a list of at most 512 of {_TOOL}")
    tool_choice: dict[str, Any] | None = Field(None, description=_CHOICES)
    thinking: ThinkingFields | None = Field(None, description=THINKING_FORMS)
    output_config: OutputConfig | None = Field(
        None, description=f'{{"effort"?: {", ".join(_EFFORTS)}, "format"?: {_FORMAT}}}'
    )
    output_format: dict[str, Any] | None = Field(None, description=f"{_FORMAT}; the older place of output_config's")
    private: Private = False

    @model_validator(mode="after")
    def _one_form(self) -> ConversationRequest:
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise invalid("output_format", "output_format and output_config.format are both given; accepted: one.")
        return self

    def described_tools(self) -> dict[str, str]:
        """Returns each tool's description by its name, for results that refer to it. Raises ApiError."""
        functions = [_tool(tool, f"tools[{at}]")["function"] for at, tool in enumerate(self.tools or ())]
        return {str(each.get("name")): json.dumps(each, ensure_ascii=False) for each in functions}

    def callable_tools(self, loaded: Container[str]) -> list[int]:
        """Returns the places of the tools that the model may call: those that are not deferred, or are `loaded`."""
        return [
            at for at, tool in enumerate(self.tools or ()) if not _is_deferred(tool) or str(tool.get("name")) in loaded
        ]

    def chat(self, made: Conversation, thinks: bool) -> ChatRequest:
        """The same as a chat request to a model that thinks, or does not.

        Raises:
            ApiError: 400, in words of either request; `reworded` makes them this one's.
        """
        form = self.output_format if self.output_config is None else self.output_config.format or self.output_format
        choice, parallel = _choice(self.tool_choice)
        every = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(self.tools or ())]
        tools = [every[at] for at in self.callable_tools(made.loaded)]
        body = {
            "model": self.model, "messages": made.messages, **self.sampling_fields(), **self._reasoning(thinks),
            "tools": tools or None, "tool_choice": choice, "parallel_tool_calls": parallel,
            "response_format": _response_format(form), "private": self.private,
        }  # fmt: skip
        deferred = [str(tool.get("name")) for tool in self.tools or () if _is_deferred(tool)]
        return parse(body, ChatRequest).described_in_messages(deferred)

    def sampling_fields(self) -> Json:
        return {}

    def _reasoning(self, thinks: bool) -> Json:
        """The reasoning as fields of a chat request. Without `thinking` there is none, as in Anthropic's API."""
        match self.thinking:
            case ThinkingFields(type="enabled", budget_tokens=budget):
                return {"thinking": {"max_tokens": budget}}
            case ThinkingFields(type="adaptive"):
                if not thinks:
                    return {}
                effort = None if self.output_config is None else self.output_config.effort
                return {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": effort}
        return {"reasoning_effort": "none"} if thinks else {}


class MessagesRequest(ConversationRequest):
    max_tokens: int = Field(ge=1, description="an integer of 1 or more")
    stop_sequences: list[_StopSequence] | None = Field(
        None, max_length=MAX_STOPS,
        description=f"a list of at most {MAX_STOPS} non-empty strings, each of at most 1000 characters",
    )  # fmt: skip
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    speculation: str | dict[str, Any] | None = Field(None, description=SPECULATION)  # checked as a chat request's
    stream: bool = Field(False, description="true or false")

    @model_validator(mode="after")
    def _budget_leaves_an_answer(self) -> MessagesRequest:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise invalid(
                "thinking.budget_tokens", f"thinking.budget_tokens is {budget}; accepted: less than max_tokens "
                f"({self.max_tokens}), which covers thinking and answer.",
            )  # fmt: skip
        return self

    def sampling_fields(self) -> Json:
        return {
            "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "stop": self.stop_sequences,
            "speculation": self.speculation, "stream": self.stream,
        }  # fmt: skip


def reworded(error: ApiError, places: Sequence[str], tools: Sequence[int]) -> ApiError:
    """A chat request's refusal in the words of this API; `places` are those of the chat's messages, `tools` of its
    tools."""

    def tool(found: re.Match[str]) -> str:
        return f"tools[{tools[int(found[1])] if int(found[1]) < len(tools) else found[1]}]"

    def place(found: re.Match[str]) -> str:
        return places[int(found[1])] if int(found[1]) < len(places) else "messages"

    def reword(text: str) -> str:
        text = re.sub(r"\btools\[(\d+)\]", tool, text)
        for theirs, ours in _WORDS:
            text = re.sub(theirs, ours, text)
        return re.sub(r"\bmessages\[(\d+)\]", place, text)

    made = error.reworded(reword)
    if error.code == "context_length_exceeded":  # by these words clients know that they have to shorten it
        made.message = f"prompt is too long: {made.message}"
    return made


_WORDS = (
    (r"\btools\[(\d+)\]\.function\.parameters\b", r"tools[\1].input_schema"),
    (r"\btools\[(\d+)\]\.function\b", r"tools[\1]"),
    (r"\btool_choice\.function\b", "tool_choice"),
    (r"\bresponse_format(\.json_schema)?\b", "output_config.format"),
    (r"\breasoning_effort\b", "thinking"),
    (r', or "strict": false', ""),
)


def _tool(tool: Any, where: str) -> Json:
    if not isinstance(tool, Mapping):
        raise invalid(where, f"{where} is {tool!r:.60}; accepted: {_TOOL}.")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise invalid(
            f"{where}.type", f"{where}.type is {kind!r:.60}, a tool of Anthropic's own service or models; accepted: "
            f"'custom' tools, {_TOOL}, which the client runs.", "unsupported_parameter",
        )  # fmt: skip
    neutral = {
        "type": (None, "custom"), "defer_loading": (None, True, False), "allowed_callers": (None, ["direct"]),
        "eager_input_streaming": (None, True, False),
    }  # fmt: skip
    known = ("name", "description", "input_schema", "strict", "input_examples", "cache_control")
    for name, value in tool.items():
        if name not in known and value not in neutral.get(name, (None,)):
            raise invalid(f"{where}.{name}", f"{where}.{name:.60} is {value!r:.60}; accepted: {_TOOL}.")
    description, examples = tool.get("description"), tool.get("input_examples")
    if examples is not None and not isinstance(examples, list):
        field = f"{where}.input_examples"
        raise invalid(field, f"{field} is {examples!r:.60}; accepted: a list of inputs.")
    if examples:
        lines = "\n".join(json.dumps(example, ensure_ascii=False) for example in examples)
        description = f"{description or ''}\nExamples of its input:\n{lines}".strip()
    function = {
        "name": tool.get("name"), "description": description, "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }  # fmt: skip
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _is_deferred(tool: Any) -> bool:
    return isinstance(tool, Mapping) and tool.get("defer_loading") is True


def _choice(value: Mapping[str, Any] | None) -> tuple[Any, bool | None]:
    """The choice as a chat request has it, and whether there may be several calls."""
    if value is None:
        return None, None
    rest = {name: each for name, each in value.items() if name != "disable_parallel_tool_use"}
    single = value.get("disable_parallel_tool_use") or False
    if not isinstance(single, bool):
        field = "tool_choice.disable_parallel_tool_use"
        raise invalid(field, f"{field} is {single!r:.60}; accepted: true or false.")
    match rest:
        case {"type": "auto" | "none" as kind, **more} if not more:
            return kind, not single
        case {"type": "any", **more} if not more:
            return "required", not single
        case {"type": "tool", "name": str(name), **more} if not more:
            return {"type": "function", "function": {"name": name}}, not single
    raise invalid("tool_choice", f"tool_choice is {value!r:.60}; accepted: {_CHOICES}.")


def _response_format(form: Mapping[str, Any] | None) -> Any:
    if form is None:
        return None
    if form.keys() == {"type", "schema"} and form["type"] == "json_schema" and isinstance(form["schema"], Mapping):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}
    raise invalid("output_config.format", f"output_config.format is {form!r:.60}; accepted: {_FORMAT}.")
