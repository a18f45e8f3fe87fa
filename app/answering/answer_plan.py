"""A request as one model reads it: prompt, sampling, constraint, tools and reasoning, checked before anything runs.

Every API turns its requests into plans; `app.answering.answer_pipeline` makes the answers. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from app.admission.request_budget import output_limit
from app.answering.next_turn import Render
from app.answering.reasoning_config import AnswerGenerator, ReasoningConfig
from app.answering.served_model import ServedModel
from app.errors import ApiError, invalid
from app.request_body import is_large
from engine.params import ChunkSpans, RemotePrefill, Sampling, Span, StreamingWindow
from engine.structured_output.matcher import CompileTimeout, ConstraintRefused
from engine.tool_parsers import Named, ToolChoice, ToolParser, ToolPlan, ToolSpec
from reasoning.agent import NEVER, Agent, Limits, Style, Tools
from reasoning.dialogue import after_calls
from reasoning.strategy import ContextDocument, Event, SearchSource
from reasoning.thinking import Piece, plain
from reasoning.turn import Turn

if TYPE_CHECKING:
    from engine import Sequence as EngineSequence

FirstSeen = Callable[[int], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class SelectedCall:
    """A call that an answer has to begin with, of one of `tools`; their schemas may be narrower than those given."""

    tools: tuple[ToolSpec, ...]
    plan: ToolPlan


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """A checked request, ready to run on one model. `span.max_tokens` is set.

    `remaining`: context after the prompt, in tokens. `tool_plan`: how the answer's calls are written, None where there
    are none. `check`: a JSON schema (as text) that the whole answer is validated against, where the mask allows a
    superset. `warnings`: parts of the request that are not enforced. `answer_tokens` bounds the answer without its
    thinking; a strategy's answers have the span's limit alone. `selected`: the tools of which the first turn has to
    call one, and how; later turns are free. `render` makes the prompt of the chat with messages after it; None where
    the next turn begins with another prompt.
    """

    served: ServedModel
    prompt: list[int]
    span: Span
    remaining: int = 0
    reasoning_config: ReasoningConfig = field(default_factory=ReasoningConfig)
    variables: Mapping[str, Any] = field(default_factory=dict)  # Any: a model's authors name their template's
    tool_plan: ToolPlan | None = None
    chat: bool = True  # thinking is separated
    check: str | None = None
    warnings: tuple[str, ...] = ()
    answer_tokens: int | None = None
    selected: SelectedCall | None = None
    documents: tuple[ContextDocument, ...] = ()  # for a strategy that takes them
    search: SearchSource | None = None  # for a strategy that searches
    render: Render | None = None
    seen: Sequence[object] = ()  # messages with images: the engine knows those while they are kept
    remote_prefill: RemotePrefill | None = None  # the engine that prefills the prompt
    chunks: ChunkSpans = ()  # of the prompt, whose K/V may be reused
    streaming: StreamingWindow | None = None  # that an endless chat is seen through
    first_seen: FirstSeen | None = None  # of a chat, the message that is seen first once so many tokens are forgotten

    @property
    def limit(self) -> int:
        """Tokens that an answer may have, thinking included."""
        assert self.span.max_tokens is not None
        return self.span.max_tokens

    @property
    def may_call(self) -> bool:
        return self.tool_plan is not None

    @property
    def sampling(self) -> Sampling:
        return self.span.sampling

    def limited(self, max_tokens: int) -> AnswerPlan:
        """Returns the plan of an answer that has at most so many tokens."""
        return replace(self, span=replace(self.span, max_tokens=min(max_tokens, self.limit)))

    def check_routed(self) -> None:
        """
        Raises:
            ApiError: 400: it asks for something that one model alone can give, and several may answer.
        """
        self.reasoning_config.check_routed()
        if self.check is not None:
            raise invalid(
                "response_format", "response_format cannot be held exactly, and the model is 'auto'; "
                'accepted: one model\'s name together with "strict": false, or a schema that can be held.',
            )  # fmt: skip

    def generator(self, on_event: Callable[[Event], None] = lambda event: None) -> AnswerGenerator:
        """Returns the generator of the answer's turns; `on_event` hears the events of its strategy."""
        return AnswerGenerator(
            self.reasoning_config,
            self.served,
            self.variables,
            on_event,
            self.answer_tokens,
            self.documents,
            self.search,
        )

    def generate(
        self, seq: EngineSequence, on_event: Callable[[Event], None] = lambda event: None
    ) -> AsyncGenerator[Piece, None]:
        """Writes one answer on `seq`, which has the prompt."""
        if not self.chat:
            return plain(seq, self.span)
        opened, closed = self.served.opens_thinking(self.prompt), self.served.closes_thinking(self.prompt)
        write, calls = self.generator(on_event), self.tool_plan is not None
        return write(seq, self.span, self.served.markers, opened=opened, closed=closed, calls=calls)

    def agent(
        self,
        tools: Tools,
        limits: Limits,
        on_event: Callable[[Event], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Agent:
        """Returns the loop that writes one answer with calls of `tools`."""
        assert self.tool_plan is not None
        served = self.served

        def appended(calls: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[int]:
            return after_calls(served.engine.tokenizer, calls, texts, self.variables)

        first = None if self.selected is None else self.selected.plan
        style = Style(self.tool_plan, served.markers, appended, served.opens_thinking, served.closes_thinking, first)
        return Agent(style, tools, self.span, limits, answers=self.generator(on_event), clock=clock)

    def turn(self) -> Turn:
        """Returns the reader of one answer's pieces."""
        return Turn(None if self.tool_plan is None else self.tool_plan.parser)


def remaining_context(served: ServedModel, prompt: Sequence[int], limit: int | None, param: str) -> int:
    """Tokens that an answer after `prompt` may have: the remaining context, and no more than the request's key may.

    Raises:
        ApiError: 400 `context_length_exceeded`, with the numbers.
    """
    context = served.engine.max_model_len
    remaining = context - len(prompt)
    most = output_limit(limit)
    if remaining < 1:
        message = (
            f"This model's maximum context length is {context} tokens, and the prompt has {len(prompt)}; "
            f"accepted: at most {context - 1}, as an answer needs some."
        )
        raise invalid(param, message, "context_length_exceeded")
    if limit is not None and limit > remaining:
        message = (
            f"This model's maximum context length is {context} tokens; the prompt has {len(prompt)}, and the request "
            f"asks for {limit} more; accepted: at most {remaining} after this prompt."
        )
        raise invalid("max_tokens", message, "context_length_exceeded")
    return remaining if most is None else min(remaining, most)


async def plan_calls(
    served: ServedModel, tools: Sequence[ToolSpec], chosen: ToolChoice, parallel: bool, user: str = ""
) -> ToolPlan:
    """A plan that compiles. A tool that is not strict and has a schema that no backend supports takes any JSON object;
    one that takes too long to compile is refused, as an answer's constraint must not depend on the server's load.

    Raises:
        ApiError: 400: a strict tool's schema is not supported, or the model's template has no form of call.
    """
    if served.tool_parser is None:
        raise invalid(
            "tools", "tools are given, but this model has no form of tool call in its chat template that Ponder knows; "
            "accepted: a model that calls tools, or the server's option --tool-call-parser.",
            "unsupported_parameter",
        )  # fmt: skip
    try:
        plan = await _plan(served.tool_parser, tools, chosen, parallel)
        await served.engine.compile(plan.body, tenant=user)
        return plan
    except CompileTimeout as late:
        raise constraint_error("tools", late) from None
    except ConstraintRefused as refusal:
        whole = refusal
    loose = set()
    for at, tool in enumerate(tools):
        if isinstance(chosen, Named) and tool.name != chosen.name:
            continue
        try:
            one = await _plan(served.tool_parser, [tool], Named(tool.name))
            await served.engine.compile(one.body, tenant=user)
        except ConstraintRefused as refusal:
            if tool.strict or isinstance(refusal, CompileTimeout):
                raise constraint_error(f"tools[{at}].function.parameters", refusal) from None
            loose.add(tool.name)
    if not loose:
        raise constraint_error("tools", whole) from None
    plan = await _plan(served.tool_parser, tools, chosen, parallel, frozenset(loose))
    try:
        await served.engine.compile(plan.body, tenant=user)
    except ConstraintRefused as refusal:
        raise constraint_error("tools", refusal) from None
    return plan


async def _plan(
    parser: ToolParser, tools: Sequence[ToolSpec], chosen: ToolChoice, parallel: bool = True,
    loose: frozenset[str] = frozenset(),
) -> ToolPlan:  # fmt: skip
    """Returns the parser's plan; made in a thread where the schemas are large, so that nobody waits for it."""
    if is_large([tool.parameters for tool in tools]):
        return await asyncio.to_thread(parser.plan, tools, chosen, parallel, loose)
    return parser.plan(tools, chosen, parallel, loose)


async def select_call(
    served: ServedModel,
    selected: Sequence[ToolSpec] | None,
    given: Sequence[ToolSpec],
    parallel: bool,
    user: str = "",
) -> SelectedCall | None:
    """Returns the plan of a call of one of the `selected` tools, None where there are none. Raises as `plan_calls`."""
    if not selected:
        return None
    return SelectedCall(*await plan_held(served, selected, given, "required", parallel, user))


async def plan_held(
    served: ServedModel,
    held: Sequence[ToolSpec],
    given: Sequence[ToolSpec],
    chosen: ToolChoice,
    parallel: bool,
    user: str = "",
) -> tuple[tuple[ToolSpec, ...], ToolPlan]:
    """Returns the plan of calls of `held`, some of the tools that are `given`, with parameters that may be narrower.
    Where those cannot be held, it is of the given ones of the same names; the tools that it is of come first. Raises as
    `plan_calls`."""
    if served.tool_parser is not None and any(tool not in given for tool in held):
        try:
            narrower = await _plan(served.tool_parser, held, chosen, parallel)
            await served.engine.compile(narrower.body, tenant=user)
        except ConstraintRefused:
            names = {tool.name for tool in held}
            held = [tool for tool in given if tool.name in names]
    return tuple(held), await plan_calls(served, held, chosen, parallel, user)


def without_calls(sampling: Sampling, plan: ToolPlan) -> Sampling:
    """Returns the sampling, with calls as unlikely as a bias makes them; tools stay in the prompt, and its K/V with
    them. A form of calls that no token begins stays free."""
    if plan.marker is None:
        return sampling
    return replace(sampling, logit_bias={**sampling.logit_bias, plan.marker: NEVER})


def constraint_error(field: str, refusal: ConstraintRefused, *, loosely: bool = False) -> ApiError:
    """An unsupported constraint, as a 400 that names the field. `loosely`: a superset could be."""
    accepted = "something simpler" if isinstance(refusal, CompileTimeout) else "what docs/constraints.md lists"
    accepted += ', or "strict": false' if loosely and not isinstance(refusal, CompileTimeout) else ""
    return invalid(field, f"{field} cannot be held exactly: {refusal}; accepted: {accepted}.", refusal.code)
