"""`POST /v1/chat/completions`: messages in, an assistant's turn out, streamed or whole.

Thinking goes to `reasoning_content`, never into `content`. Chunks are encoded by hand around a prefix that does not
change, because they are the one thing this server makes thousands of a second.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from app.admission.request_budget import narrow
from app.answering.answer_pipeline import AnswerPipeline
from app.answering.answer_plan import AnswerPlan, remaining_context
from app.answering.context_shift import check_endless, plan_endless
from app.answering.next_turn import Messages
from app.answering.reasoning_config import ReasoningResolver, reduced_by_load
from app.answering.served_model import ServedModel
from app.answering.thinking_summary import ThinkingSummary
from app.answering.tool_selection import ToolSelector
from app.config import AUTO_NAME
from app.errors import invalid
from app.openai.event_stream import event, text_json
from app.openai.kv_transfer import FIELD, remote_prefill, reply_fields
from app.openai.remote_requests import plan_remote_chat
from app.openai.request_models import ChatRequest
from app.openai.speculation import predicted
from app.openai.text_constraints import Calling, constrain_text
from app.state import Serving
from engine.outputs import TokenLogprob
from reasoning.agent import Wrote
from reasoning.thinking import Tally
from reasoning.turn import CallMore, CallStart, Content, Delta, Reasoning, WholeTurn

if TYPE_CHECKING:
    from engine import Tokenizer


async def chat_job(request: ChatRequest, state: Serving, user: str) -> ChatJob:
    """Plans a request.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    narrow(request.priority, request.deadline_s)
    if request.model == AUTO_NAME and state.models.auto is not None and request.n > 1:
        raise invalid("n", f"n is {request.n}; accepted: 1 together with the model 'auto'.")
    if request.model == AUTO_NAME and request.context_shift:
        message = "context_shift is true, and the model is 'auto'; accepted: one model's name, or false."
        raise invalid("context_shift", message)
    if request.model == AUTO_NAME and request.kv_transfer_params is not None:
        raise invalid(FIELD, f"{FIELD} is of one model's K/V, and the model is 'auto'; accepted: one model's name.")
    plans, auto = await state.models.plans(
        request.model,
        lambda served: plan_chat(request, served, state.reasoning_resolver, state.tool_selector, user),
        lambda remote: plan_remote_chat(request, remote),
    )
    pipeline = AnswerPipeline(partial(state.counting.watch, "chat"), plans, request.n, user, auto)
    return ChatJob(request, pipeline, partial(state.thoughts, user))


async def plan_chat(
    request: ChatRequest,
    served: ServedModel,
    resolver: ReasoningResolver,
    selector: ToolSelector,
    user: str,
    field: str = "messages",
) -> AnswerPlan:
    """Plans a chat request for one model: reasoning, tools, constraint, prompt, sampling. `field` has the messages.

    Raises:
        ApiError: 400, naming the field.
    """
    reasoning_config = reduced_by_load(resolver.of(request.asked, served, user), served)
    reasoning_config.check(answers=request.n)
    variables = {**reasoning_config.variables, **request.chat_template_kwargs}
    calling = await Calling.of(request, served, user)
    await calling.select(request, served, selector, user)
    held = await constrain_text(request, served, user)
    constraint = None if held is None else held.constrained
    if calling.plan is not None:
        plan = calling.plan = calling.or_answer(calling.plan, held)
        constraint = (plan if calling.selected is None else calling.selected.plan).constrained
    messages = await served.images.in_parts(request.template_messages(), served.engine, served.name)
    tools, streaming = request.listed(calling.shown), None

    async def render(after: Messages) -> list[int]:
        return await served.chat_tokens([*messages, *after], variables, tools)

    async def rendered(messages: Messages) -> list[int]:
        return await served.chat_tokens(list(messages), variables, tools, endless=True)

    whole = await (rendered(messages) if request.context_shift else render(()))
    prompt = reasoning_config.prompt(whole, served, calls=calling.plan is not None)
    if request.context_shift:
        check_endless(served, reasoning_config)
        planned = await plan_endless(served, prompt, messages, rendered, request.token_limit, field)
        remaining, streaming = planned.limit, planned.streaming
    else:
        remaining = remaining_context(served, prompt, request.token_limit, field)
    span = request.span(served.sampling, remaining=remaining, vocab_size=served.engine.vocab_size, default_limit=None)
    span = await predicted(span, request.prediction, served)
    served.engine.check_speculation(span.speculation)
    span = replace(
        span, sampling=calling.without_calls(span.sampling), logprobs=request.engine_logprobs, constraint=constraint
    )
    return AnswerPlan(
        served, prompt, span, remaining, reasoning_config, variables, calling.plan,
        check=None if held is None else held.check,
        warnings=(*calling.warnings, *(() if held is None else held.warnings)),
        selected=calling.selected, render=None if streaming else render, seen=messages, streaming=streaming,
        search=await resolver.searches.of(reasoning_config, served, user, request.template_messages()),
        remote_prefill=remote_prefill(request.kv_transfer_params, served, stream=request.stream),
    )  # fmt: skip


@dataclass(slots=True)
class ChatJob:
    """A checked chat request, ready to run."""

    request: ChatRequest
    pipeline: AnswerPipeline
    thoughts: Callable[[], ThinkingSummary]
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> dict[str, Any]:
        """The reply, when all of it is there."""
        answers, pipeline = range(self.request.n), self.pipeline
        thoughts = [self.thoughts() for _ in answers]
        wholes = [WholeTurn(may_call=pipeline.plan.may_call) for _ in answers]
        reasons: list[str | None] = [None for _ in answers]
        async with aclosing(pipeline.stream()) as stream:
            async for index, wrote in stream:
                assert isinstance(wrote, Wrote)
                reasons[index] = wrote.finish_reason
                for delta in await thoughts[index].seen(wrote.deltas, ended=wrote.finish_reason is not None):
                    wholes[index].add(delta)
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": pipeline.plan.served.name,
            "choices": [
                {
                    "index": index,
                    "message": whole.message(),
                    "logprobs": self._logprobs(whole.logprobs) if self.request.logprobs else None,
                    **ended_json(reason),
                }
                for index, (whole, reason) in enumerate(zip(wholes, reasons, strict=True))
            ],
            "usage": self._usage(),
            **({"warnings": list(pipeline.plan.warnings)} if pipeline.plan.warnings else {}),
            **({"routing": pipeline.routing} if pipeline.is_routed else {}),
            **reply_fields(self.request.kv_transfer_params, pipeline.plan.served),
        }

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The reply as events, `[DONE]` excepted; where several models or a remote one may answer, the last has the
        report."""
        pipeline, begun = self.pipeline, set[int]()
        start, end = b"", b',"usage":null}\n\n' if self.request.include_usage else b"}\n\n"
        thoughts = [self.thoughts() for _ in range(self.request.n)]
        empty = b"null" if pipeline.plan.may_call else b'""'  # there may be no content at all

        def chunk(
            index: int, delta: bytes, logprobs: bytes = b"null", finish: bytes = b'"finish_reason":null'
        ) -> bytes:
            return b'%b,"choices":[{"index":%d,"delta":{%b},"logprobs":%b,%b}]%b' % (
                start, index, delta, logprobs, finish, end,
            )  # fmt: skip

        async with aclosing(pipeline.stream()) as stream:
            async for index, wrote in stream:
                assert isinstance(wrote, Wrote)
                data = b""
                if index not in begun:
                    begun.add(index)
                    start = start or self._start()
                    data = chunk(index, b'"role":"assistant","content":%b,"refusal":null' % empty)
                for delta in await thoughts[index].seen(wrote.deltas, ended=wrote.finish_reason is not None):
                    logprobs = b"null"
                    if self.request.logprobs and isinstance(delta, Content) and delta.logprobs:
                        logprobs = _json(self._logprobs(delta.logprobs))
                    elif isinstance(delta, Content) and not delta.text:
                        continue
                    data += chunk(index, _delta_json(delta), logprobs)
                if wrote.finish_reason is not None:
                    data += chunk(index, b"", finish=_json(ended_json(wrote.finish_reason))[1:-1])
                if data:
                    yield data
        if pipeline.plan.warnings:
            yield b'%b,"choices":[],"warnings":%b%b' % (start, _json(list(pipeline.plan.warnings)), end)
        if self.request.include_usage:
            yield b'%b,"choices":[],"usage":%b}\n\n' % (start, _json(self._usage()))
        if pipeline.is_routed:
            yield b'%b,"choices":[],"routing":%b%b' % (start, _json(pipeline.routing), end)

    def _start(self) -> bytes:
        """The first bytes of every chunk; the model that answers is in them."""
        head = f'data: {{"id":"{self.id}","object":"chat.completion.chunk","created":{self.created},"model":'
        return head.encode() + text_json(self.pipeline.plan.served.name)

    def _usage(self) -> dict[str, Any]:
        plan = self.pipeline.plan
        context = plan.served.engine.max_model_len if self.request.context_shift and isinstance(plan, AnswerPlan) else 0
        return usage_json(self.pipeline.tally, predicted=self.request.prediction is not None, context=context)

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        plan = self.pipeline.plan
        assert isinstance(plan, AnswerPlan), "log-probabilities are not asked for of a remote model"
        return chat_logprobs(plan.served.engine.tokenizer, entries, self.request.top_logprobs or 0)


def _json(value: Any) -> bytes:  # Any: JSON
    return event(value)[len(b"data: ") : -2]


def _delta_json(delta: Delta) -> bytes:
    """The fields of a chunk's delta, without its braces."""
    match delta:
        case Content(text, _):
            return b'"content":%b' % text_json(text)
        case Reasoning(text):
            return b'"reasoning_content":%b' % text_json(text)
        case CallStart(index, id, name):
            return b'"tool_calls":[{"index":%d,"id":"%b","type":"function","function":{"name":%b,"arguments":""}}]' % (
                index, id.encode(), text_json(name),
            )  # fmt: skip
        case CallMore(index, arguments):
            return b'"tool_calls":[{"index":%d,"function":{"arguments":%b}}]' % (index, text_json(arguments))


def ended_json(reason: str | None) -> dict[str, str | None]:
    """The end of a choice: a finish reason of OpenAI's, and where it repeated itself vLLM's `stop_reason`."""
    if reason == "repetition":
        return {"finish_reason": "stop", "stop_reason": REPEATED}
    return {"finish_reason": reason}


def usage_json(tally: Tally, *, predicted: bool = False, context: int = 0) -> dict[str, Any]:
    """`usage` in OpenAI's shape. `predicted`: with the tokens that were proposed before they were sampled. `context`:
    the tokens that the model of an endless chat sees at most; with it and those that it has forgotten."""
    window = {"context": {"window_tokens": context, "forgotten_tokens": tally.forgotten_tokens}} if context else {}
    accepted = {"accepted_prediction_tokens": tally.drafted_tokens} if predicted else {}
    return {
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "total_tokens": tally.prompt_tokens + tally.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": tally.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": tally.reasoning_tokens, **accepted},
        **window,
    }


REPEATED = "repetition_detected"
_FLOOR = -9999.0  # JSON has no infinity


def finite_logprob(value: float) -> float:
    return value if value > _FLOOR else _FLOOR  # also turns a NaN into the floor


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": tokenizer.token_text(token), "logprob": finite_logprob(logprob), "bytes": list(raw)}

    content = [
        {**one(e.token_id, e.logprob), "top_logprobs": [one(token, lp) for token, lp in e.top[:top]]} for e in entries
    ]
    return {"content": content, "refusal": None}
