"""`POST /v1/chat/completions`: messages in, an assistant's turn out, streamed or whole.

Thinking goes to `reasoning_content`, never into `content`. Chunks are encoded by hand around a prefix that does not
change, because they are the one thing this server makes thousands of a second.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from app.admission.request_budget import enter, narrow
from app.answering.answer_generation import (
    AnswerJob,
    CheckedGeneration,
    Generation,
    chat_logprobs,
    not_routed,
    remaining_context,
)
from app.answering.model_cascade import ModelPrompt, allowed_models
from app.answering.reasoning_config import ReasoningConfig, prompted, reduced_by_load
from app.answering.served_model import ServedModel
from app.answering.thinking_summary import ThinkingSummary
from app.config import AUTO_NAME
from app.errors import invalid
from app.openai.event_stream import event, text_json
from app.openai.request_models import ChatRequest
from app.openai.routing import Routing
from app.openai.text_constraints import Calling, constrain_text
from app.request_body import CHAT_REFUSED, checked
from app.state import Serving
from engine.outputs import TokenLogprob
from engine.params import Span
from reasoning.thinking import Tally
from reasoning.turn import CallMore, CallStart, Content, Delta, Reasoning, Turn, WholeTurn


async def chat_job(body: Mapping[str, Any], state: Serving, user: str) -> ChatJob | RoutedChat:
    """A request, checked.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    request = await checked(body, ChatRequest, CHAT_REFUSED)
    auto = state.models.auto
    narrow(request.priority, request.deadline_s)
    if request.model != AUTO_NAME or auto is None:
        served = state.models.get(request.model)
        enter(served)
        return await ChatJob.of(request, served, state, user)
    enter(*auto.rungs)
    if request.n > 1:
        raise invalid("n", f"n is {request.n}; accepted: 1 together with the model 'auto'.")
    jobs: list[ChatJob] = []

    async def prompt_of(served: ServedModel) -> ModelPrompt:
        job = await ChatJob.of(request, served, state, user)
        job.reasoning_config.check_routed()
        if isinstance(job.generation, CheckedGeneration):
            raise not_routed()
        jobs.append(job)
        return prompted(
            served, job.prompt, job.span, job.reasoning_config, job.variables, calls=job.calling.plan is not None
        )

    asked = allowed_models(await auto.prompted(prompt_of))
    return RoutedChat(request, jobs, Routing(auto, asked, state.counting.watch("chat"), user))


@dataclass(slots=True)
class ChatJob:
    """A checked chat request, ready to run on one model."""

    request: ChatRequest
    served: ServedModel
    reasoning_config: ReasoningConfig
    variables: dict[str, Any]
    prompt: list[int]
    span: Span
    calling: Calling
    thoughts: Callable[[], ThinkingSummary]
    generation: AnswerJob
    warnings: tuple[str, ...] = ()  # what of the request is not held
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    async def of(cls, request: ChatRequest, served: ServedModel, state: Serving, user: str) -> ChatJob:
        """
        Raises:
            ApiError: 400, naming the field.
        """
        reasoning_config = reduced_by_load(state.reasoning_resolver.of(request.asked, served, user), served)
        reasoning_config.check(answers=request.n)
        variables = {**reasoning_config.variables, **request.chat_template_kwargs}
        calling = await Calling.of(request, served, user)
        held = await constrain_text(request, served, user) if calling.plan is None else None
        constraint = None if held is None else held.constrained
        if calling.plan is not None:
            constraint = calling.plan.constrained
        prompt = await served.chat_tokens(request.template_messages(), variables, calling.shown)
        prompt = reasoning_config.prompt(prompt, served)
        room = remaining_context(served, prompt, request.token_limit, "messages")
        vocab_size = served.engine.vocab_size
        span = request.span(served.sampling, room=room, vocab_size=vocab_size, default_limit=None)
        span = replace(
            span, sampling=calling.without_calls(span.sampling), logprobs=request.engine_logprobs, constraint=constraint
        )
        made = Generation(
            served, state.counting, "chat", [prompt], request.n, [span], chat=True, calls=calling.plan is not None,
            reasoning_config=reasoning_config, variables=variables, tenant=user,
        )  # fmt: skip
        check = None if held is None else held.check
        generation = made if check is None else CheckedGeneration(made, check)
        warnings = calling.warnings if held is None else held.warnings
        return cls(
            request,
            served,
            reasoning_config,
            variables,
            prompt,
            span,
            calling,
            partial(state.thoughts, user),
            generation,
            warnings,
        )

    def _turns(self) -> list[Turn]:
        parser = None if self.calling.plan is None else self.calling.plan.parser
        return [Turn(parser) for _ in range(self.request.n)]

    async def whole(self) -> dict[str, Any]:
        """The reply, when all of it is there."""
        turns, thoughts = self._turns(), [self.thoughts() for _ in range(self.request.n)]
        wholes = [WholeTurn(may_call=self.calling.plan is not None) for _ in turns]
        async with aclosing(self.generation.pieces()) as pieces:
            async for index, piece in pieces:
                ended = piece.finish_reason is not None
                for delta in await thoughts[index].seen(turns[index].take(piece), ended=ended):
                    wholes[index].add(delta)
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.served.name,
            "choices": [
                {
                    "index": index,
                    "message": whole.message(),
                    "logprobs": self._logprobs(whole.logprobs) if self.request.logprobs else None,
                    "finish_reason": turn.finish_reason,
                }
                for index, (turn, whole) in enumerate(zip(turns, wholes, strict=True))
            ],
            "usage": usage_json(self.generation.tally),
            **({"warnings": list(self.warnings)} if self.warnings else {}),
        }

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The reply as events, `[DONE]` excepted."""
        head = f'{{"id":"{self.id}","object":"chat.completion.chunk","created":{self.created},"model":'.encode()
        start = b"data: " + head + text_json(self.served.name)
        end = b',"usage":null}\n\n' if self.request.include_usage else b"}\n\n"
        turns, begun = self._turns(), set[int]()
        thoughts = [self.thoughts() for _ in turns]
        empty = b'""' if self.calling.plan is None else b"null"  # there may be no content at all

        def chunk(index: int, delta: bytes, logprobs: bytes = b"null", finish: str | None = None) -> bytes:
            reason = b"null" if finish is None else b'"%b"' % finish.encode()
            return b'%b,"choices":[{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":%b}]%b' % (
                start, index, delta, logprobs, reason, end,
            )  # fmt: skip

        async with aclosing(self.generation.pieces()) as pieces:
            async for index, piece in pieces:
                data = b""
                if index not in begun:
                    begun.add(index)
                    data = chunk(index, b'"role":"assistant","content":%b,"refusal":null' % empty)
                turn = turns[index]
                for delta in await thoughts[index].seen(turn.take(piece), ended=piece.finish_reason is not None):
                    logprobs = b"null"
                    if self.request.logprobs and isinstance(delta, Content) and delta.logprobs:
                        logprobs = event(self._logprobs(delta.logprobs))[len(b"data: ") : -2]
                    elif isinstance(delta, Content) and not delta.text:
                        continue
                    data += chunk(index, _delta_json(delta), logprobs)
                if turn.finish_reason is not None:
                    data += chunk(index, b"", finish=turn.finish_reason)
                if data:
                    yield data
        if self.warnings:
            warnings = event(list(self.warnings))[len(b"data: ") : -2]
            yield b'%b,"choices":[],"warnings":%b%b' % (start, warnings, end)
        if self.request.include_usage:
            usage = event(usage_json(self.generation.tally))[len(b"data: ") : -2]
            yield b'%b,"choices":[],"usage":%b}\n\n' % (start, usage)

    def _logprobs(self, entries: tuple[TokenLogprob, ...] | list[TokenLogprob]) -> dict[str, Any]:
        return chat_logprobs(self.served.engine.tokenizer, entries, self.request.top_logprobs or 0)


@dataclass(slots=True)
class RoutedChat:
    """A checked request that several models may answer: the job of the one that does replies."""

    request: ChatRequest
    jobs: list[ChatJob]
    routing: Routing

    async def whole(self) -> dict[str, Any]:
        """The reply, when all of it is there."""
        async with aclosing(self.routing):
            return {**await (await self._chosen()).whole(), "routing": self.routing.report}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The reply as events, `[DONE]` excepted; the last of them has the report."""
        async with aclosing(self.routing):
            job = await self._chosen()
            async with aclosing(job.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
            end = {"usage": None} if self.request.include_usage else {}
            yield event(
                {
                    "id": job.id, "object": "chat.completion.chunk", "created": job.created, "model": job.served.name,
                    "choices": [], **end, "routing": self.routing.report,
                }
            )  # fmt: skip

    async def _chosen(self) -> ChatJob:
        job = self.jobs[await self.routing.begin()]
        job.generation = self.routing
        return job


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


def usage_json(tally: Tally) -> dict[str, Any]:
    """`usage` in OpenAI's shape."""
    return {
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "total_tokens": tally.prompt_tokens + tally.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": tally.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": tally.reasoning_tokens},
    }
