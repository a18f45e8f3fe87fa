"""Constraints that a request puts on its answer: JSON, a schema, an expression, a choice, a grammar, or calls of tools.

Everything is compiled before the answer begins, so a refusal is a 400 that names the field and the keyword, never the
end of a stream. Knows nothing of prompts or replies.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.answering.answer_plan import SelectedCall, constraint_error, plan_calls, select_call, without_calls
from app.answering.served_model import ServedModel
from app.answering.tool_selection import ToolSelector
from app.errors import invalid
from app.openai.request_models import MAX_CHOICES, MAX_GRAMMAR_LENGTH, MAX_PATTERN_LENGTH, ChatRequest, SamplingRequest
from app.request_body import is_large, json_value
from engine.errors import InvalidParameter
from engine.params import Sampling
from engine.structured_output.layout import Constrained, Layout
from engine.structured_output.matcher import CompileTimeout, ConstraintRefused
from engine.structured_output.schema_rewrite import schemas, supersets, unknown_formats
from engine.structured_output.spec import JSON_OBJECT, Constraint, Grammar, JsonSchema, Regex, choice
from engine.tool_parsers import ToolPlan, ToolSpec, read_choice, read_tools
from engine.tool_parsers.schemas import check_schema

_FORMATS = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name", "schema"}}'
_SCHEMA = "accepted: a JSON Schema, which is an object"
MAX_TOOLS = 512
MAX_PLANS = 64
MAX_PARTS = 25_000  # values of all tools together, or of a form


def text_constraint(request: SamplingRequest) -> tuple[str, Constraint] | None:
    """Returns the field that constrains the whole answer, and its constraint; None without one.

    Raises:
        ApiError: a field is not as accepted, or two of them ask for different things.
    """
    asked = [
        (field, made)
        for field, made in (
            ("response_format", _response_format(request.response_format)),
            ("guided_json", _guided_json(request.guided_json)),
            ("guided_regex", None if request.guided_regex is None else Regex(request.guided_regex)),
            ("guided_choice", None if request.guided_choice is None else choice(request.guided_choice)),
            ("guided_grammar", None if request.guided_grammar is None else Grammar(request.guided_grammar)),
            ("structured_outputs", _structured_outputs(request.structured_outputs)),
        )
        if made is not None
    ]
    if len(asked) > 1:
        names = " and ".join(field for field, _ in asked[:2])
        raise invalid(asked[1][0], f"{names} are both given; accepted: one of them, as an answer has one form.")
    return asked[0] if asked else None


def _response_format(value: Any) -> Constraint | None:  # any JSON: this is where it gets its type
    match value:
        case None:
            return None
        case {"type": "text", **more} if not more:
            return None
        case {"type": "json_object", **more} if not more:
            return JSON_OBJECT
        case {"type": "json_schema", "json_schema": Mapping() as inner, **more} if not more:
            return _named_schema(inner, "response_format.json_schema")
        case {"type": "json_schema", **more} if not more:
            field = "response_format.json_schema"
            raise invalid(field, f'{field} is missing; accepted: {{"name": "…", "schema": {{…}}, "strict": true}}.')
    raise invalid("response_format", f"response_format is {value!r:.60}; accepted: {_FORMATS}.")


def _named_schema(value: Mapping[str, Any], field: str) -> JsonSchema:
    """The name and the description are for the client; `strict` decides where it is not supported exactly."""
    for key, kind, accepted in (
        ("name", str, "a string"), ("description", str, "a string"), ("strict", bool, "true or false")
    ):  # fmt: skip
        if value.get(key) is not None and not isinstance(value[key], kind):
            raise invalid(f"{field}.{key}", f"{field}.{key} is {value[key]!r:.60}; accepted: {accepted}.")
    if unknown := sorted(value.keys() - {"name", "description", "strict", "schema"}):
        raise invalid(
            f"{field}.{unknown[0]}",
            f"{field}.{unknown[0]} is not known; accepted: name, description, schema, strict.",
        )
    if value.get("schema") is None:
        raise invalid(f"{field}.schema", f"{field}.schema is missing; {_SCHEMA}.")
    return _schema(value["schema"], f"{field}.schema")


def _guided_json(value: Any, field: str = "guided_json") -> Constraint | None:  # any JSON
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json_value(value)
        except ValueError as error:
            raise invalid(field, f"{field} is not JSON text: {error}; {_SCHEMA}.") from None
    return _schema(value, field)


def _structured_outputs(value: Any) -> Constraint | None:  # any JSON
    """The constraint of vLLM's newer field, which has the guided ones inside. An empty object asks for none."""
    if isinstance(value, Mapping):
        value = {name: each for name, each in value.items() if each not in (None, False)}
    match value:
        case None | {} if not value:
            return None
        case {"json": schema, **more} if not more:
            return _guided_json(schema, "structured_outputs.json")
        case {"regex": str(pattern), **more} if not more and 0 < len(pattern) <= MAX_PATTERN_LENGTH:
            return Regex(pattern)
        case {"choice": list(texts), **more} if not more and _are_choices(texts):
            return choice(texts)
        case {"grammar": str(source), **more} if not more and 0 < len(source) <= MAX_GRAMMAR_LENGTH:
            return Grammar(source)
        case {"json_object": True, **more} if not more:
            return JSON_OBJECT
    accepted = (
        '{"json": a JSON Schema}, {"regex": "…"}, {"choice": ["…"]}, {"grammar": "…"} or {"json_object": true}, '
        "within the limits of the guided_ fields"
    )
    raise invalid("structured_outputs", f"structured_outputs is {value!r:.60}; accepted: {accepted}.")


def _are_choices(texts: list[Any]) -> bool:
    return 0 < len(texts) <= MAX_CHOICES and all(
        isinstance(text, str) and 0 < len(text) <= MAX_PATTERN_LENGTH for text in texts
    )


def _schema(value: Any, field: str) -> JsonSchema:  # any JSON
    if not isinstance(value, Mapping):
        raise invalid(field, f"{field} is {value!r:.60}; {_SCHEMA}.")
    check_schema(value, field)
    return JsonSchema.of(value)


@dataclass(frozen=True, slots=True)
class TextConstraint:
    """The constraint of a whole answer, and the `field` of the request that has it. `warnings` name the parts that it
    does not enforce; where it is a superset, `check` is the schema (JSON text) that the answer has to be valid
    against."""

    field: str
    constrained: Constrained
    warnings: tuple[str, ...] = ()
    check: str | None = None


async def constrain_text(request: SamplingRequest, served: ServedModel, user: str) -> TextConstraint | None:
    """The compiled constraint of a whole answer. An unsupported one with `"strict": false` becomes the nearest
    supported superset.

    Raises:
        ApiError: it is not supported exactly, or not compiled in time; the message names the keyword.
    """
    form = (request.response_format, request.guided_json, request.guided_choice, request.structured_outputs)
    check_parts("guided_json" if request.response_format is None else "response_format", form)
    asked = await asyncio.to_thread(text_constraint, request) if is_large([*form]) else text_constraint(request)
    if asked is None:
        return None
    field, body = asked
    if request.ignore_eos:
        raise invalid("ignore_eos", f"ignore_eos is true; accepted: false together with {field}, which has an end.")
    if request.repetition_detection is not None:
        raise invalid(
            "repetition_detection", f"repetition_detection is given together with {field}, whose text may repeat "
            "itself; accepted: one of them.",
        )  # fmt: skip
    warnings = format_warnings(field, json.loads(body.source)) if isinstance(body, JsonSchema) else ()
    layout = Layout(breaks=served.line_breaks)
    try:
        await served.engine.compile(body, tenant=user)
        return TextConstraint(field, Constrained(body, layout), warnings)
    except ConstraintRefused as refusal:
        if isinstance(refusal, CompileTimeout) or not isinstance(body, JsonSchema) or not _lenient(request):
            loosely = field == "response_format" and isinstance(body, JsonSchema)
            raise constraint_error(field, refusal, loosely=loosely) from None
        why = refusal
    schema = json.loads(body.source)
    if any(isinstance(part.get("$ref"), str) and not part["$ref"].startswith("#") for part in schemas(schema)):
        raise constraint_error(field, why)
    for wider in supersets(schema):
        held = JsonSchema.of(wider)
        try:
            await served.engine.compile(held, tenant=user)
        except CompileTimeout as late:
            raise constraint_error(field, late) from None
        except ConstraintRefused:
            continue
        warning = f"{field} is not held exactly: {why}. The whole answer is checked against it instead."
        return TextConstraint(field, Constrained(held, layout), (*warnings, warning), body.source)
    raise constraint_error(field, why)


def _lenient(request: SamplingRequest) -> bool:
    match request.response_format:
        case {"type": "json_schema", "json_schema": {"strict": False}}:
            return True
    return False


def format_warnings(field: str, schema: Any) -> tuple[str, ...]:  # any JSON
    """One warning for each format that is only an annotation."""
    return tuple(f"{field}: the format {name!r:.60} is not held" for name in unknown_formats(schema))


def check_tools(tools: Sequence[Any]) -> None:  # any JSON
    """
    Raises:
        ApiError: there are too many, or as `check_parts` raises it.
    """
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools has {len(tools)} entries; accepted: at most {MAX_TOOLS}.")
    check_parts("tools", tools)


def check_parts(field: str, value: Any) -> None:  # any JSON
    """
    Raises:
        ApiError: it has so many parts that to write it down would be felt by others.
    """
    if is_large([value], MAX_PARTS, long=None):
        raise invalid(field, f"{field} has more than {MAX_PARTS:,} values; accepted: at most that many.")


class Calling:
    """The tools of a chat request, and how its answer may call them; `plan` is None where it may not."""

    def __init__(
        self, tools: Sequence[Mapping[str, Any]] = (), plan: ToolPlan | None = None, avoided: int | None = None
    ) -> None:
        self.shown = tools  # to the model, by its template
        self.plan = plan
        self.selected: SelectedCall | None = None  # the call that the answer begins with
        self.fits = True  # a tool may be called
        self.warnings = tuple(
            warning
            for at, tool in enumerate(tools if plan is not None else ())
            for warning in format_warnings(
                f"tools[{at}].function.parameters", (tool.get("function") or {}).get("parameters")
            )
        )
        self._avoided = avoided  # the token that begins a call, where none is wanted

    def without_calls(self, sampling: Sampling) -> Sampling:
        """The sampling, with calls as unlikely as a bias makes them where tools are given and none may be called, or
        none fits."""
        if not self.fits and self.plan is not None:
            return without_calls(sampling, self.plan)
        if self._avoided is None:
            return sampling
        return replace(sampling, logit_bias={**sampling.logit_bias, self._avoided: -100.0})

    @staticmethod
    def or_answer(plan: ToolPlan, held: TextConstraint | None) -> ToolPlan:
        """Returns the plan of an answer that is calls, or text that `held` allows.

        Raises:
            ApiError: no token tells the model's calls from such text.
        """
        if held is None or not plan.layout.free:
            return plan
        if plan.layout.begin is None:
            raise invalid(
                held.field, f"{held.field} and tools are both given, and this model begins a call with no "
                "token that tells it from an answer; accepted: one of them, or tool_choice 'none' or 'required'.",
            )  # fmt: skip
        return replace(plan, answer=held.constrained.body)

    async def select(self, request: ChatRequest, served: ServedModel, selector: ToolSelector, user: str) -> None:
        """Selects the tool that the answer calls, where neither the request nor the model does. Raises ApiError."""
        if self.plan is None or request.tool_choice not in (None, "auto") or not selector.selects(served):
            return
        tools = await asyncio.to_thread(read_tools, self.shown)
        found = await selector.select(served, request.template_messages(), tools)
        self.fits = found != ()
        self.selected = await select_call(served, found, tools, request.parallel_tool_calls is not False, user)

    @classmethod
    async def of(cls, request: ChatRequest, served: ServedModel, user: str) -> Calling:
        """
        Raises:
            ApiError, InvalidParameter: the tools are not as accepted, or cannot be offered to this model.
        """
        shown, parallel = request.tools or [], request.parallel_tool_calls is not False
        if not shown and request.tool_choice is None:
            return cls()
        check_tools(shown)
        large = is_large([shown, request.tool_choice])

        def digest() -> bytes:
            return hashlib.blake2b(json.dumps([user, shown, request.tool_choice, parallel]).encode()).digest()

        key = await asyncio.to_thread(digest) if large else digest()
        if (known := served.plans.get(key)) is not None:
            _check_beside_tools(request, served)
            return cls(shown, known)
        tools = await asyncio.to_thread(read_tools, shown) if large else read_tools(shown)
        chosen = read_choice(request.tool_choice, tools)
        if not tools or chosen == "none":
            return cls(avoided=_beginning(served) if tools else None)
        _check_beside_tools(request, served)
        plan = await plan_calls(served, tools, chosen, parallel, user)
        served.plans[key] = plan  # an agent sends the same tools with every turn
        if len(served.plans) > MAX_PLANS:
            del served.plans[next(iter(served.plans))]
        return cls(shown, plan)


def _check_beside_tools(request: ChatRequest, served: ServedModel) -> None:
    """Refuse fields that cannot go with tools. Raises ApiError."""
    if request.ignore_eos:
        raise invalid("ignore_eos", "ignore_eos is true; accepted: false together with tools.")
    if text := set(request.stop_token_ids) - served.engine.tokenizer.control_ids:
        raise invalid(
            "stop_token_ids", f"stop_token_ids has {min(text)}, a token of text, which would cut calls off; "
            "accepted: control tokens together with tools, or stop, which leaves calls whole.",
        )  # fmt: skip


def _beginning(served: ServedModel) -> int | None:
    """The token that begins a call, where there is one. The tools themselves, which nobody may call, don't matter."""
    try:
        return None if served.tool_parser is None else served.tool_parser.plan([ToolSpec("any")], "auto").marker
    except InvalidParameter:  # the model's form of calls has no constraint
        return None
