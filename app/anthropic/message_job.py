"""`POST /v1/messages`: a conversation in, an assistant's message of content blocks out, streamed or whole.

A stream sends the events, a whole message is what they add up to, so the two can't differ. Thinking is a block of its
own and ends with its signature.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from pydantic_core import from_json

from app.admission.request_budget import output_limit
from app.answering.answer_pipeline import AnswerPipeline
from app.answering.answer_plan import AnswerPlan
from app.answering.model_cascade import ModelCascade, Plan
from app.answering.remote_model import RemoteModel, RemotePlan
from app.answering.served_model import ServedModel
from app.answering.thinking_signature import ThinkingSigner
from app.answering.thinking_summary import ThinkingSummary
from app.anthropic.content_blocks import REDACTED, Conversation, Json, conversation
from app.anthropic.request_models import ConversationRequest, MessagesRequest, reworded
from app.errors import ApiError, from_exception
from app.openai.chat_completions import plan_chat
from app.openai.remote_requests import plan_remote_chat
from app.request_body import is_large
from app.state import Serving
from engine.errors import EngineError
from reasoning.agent import Wrote
from reasoning.thinking import Tally
from reasoning.turn import CallMore, CallStart, Content, Delta, Reasoning


async def message_job(request: MessagesRequest, state: Serving, user: str) -> MessageJob:
    """Plans a request. Where `max_tokens` are more than the context has left, the answer ends there.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    output_limit(request.max_tokens)

    plans, auto = await _plans(request, state, user)
    plans = [plan.limited(request.max_tokens) for plan in plans]
    pipeline = AnswerPipeline(partial(state.counting.watch, "messages"), plans, 1, user, auto)
    return MessageJob(request, pipeline, state.thoughts(user), state.signer)


async def count_tokens(request: ConversationRequest, state: Serving, user: str) -> Json:
    """The tokens of the prompt that the request makes; of several models' the first one's.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    if request.model in state.models.remotes:
        state.models.get(request.model)  # refuses it: only its own server has its tokenizer
    plans, _ = await _plans(request, state, user)
    assert isinstance(plans[0], AnswerPlan)
    return {"input_tokens": len(plans[0].prompt)}


async def _plans(request: ConversationRequest, state: Serving, user: str) -> tuple[Sequence[Plan], ModelCascade | None]:
    def converted() -> Conversation:
        return conversation(request.system, request.messages, state.signer, request.described_tools())

    large = is_large([request.system, request.messages])
    made = await asyncio.to_thread(converted) if large else converted()

    async def plan(served: ServedModel) -> AnswerPlan:
        chat = request.chat(made, served.markers is not None)
        return await plan_chat(chat, served, state.reasoning_resolver, state.tool_selector, user)

    async def plan_remote(remote: RemoteModel) -> RemotePlan:
        return await plan_remote_chat(request.chat(made, thinks=False), remote)

    try:
        return await state.models.plans(request.model, plan, plan_remote)
    except (ApiError, EngineError) as error:
        tools = request.callable_tools(made.loaded)
        raise reworded(from_exception(error, param="messages"), made.places, tools) from error


@dataclass(slots=True)
class MessageJob:
    """A checked request, ready to run."""

    request: MessagesRequest
    pipeline: AnswerPipeline
    thoughts: ThinkingSummary
    signer: ThinkingSigner
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")

    async def whole(self) -> Json:
        """The message, when all of it is there."""
        message, parts = Json(), list[str]()
        async with aclosing(self.events()) as events:
            async for event in events:
                match event:
                    case {"type": "message_start", "message": begun}:
                        message = begun
                    case {"type": "content_block_start", "content_block": block}:
                        message["content"].append(block)
                    case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": text}}:
                        parts.append(text)
                    case {"type": "content_block_delta", "delta": delta}:
                        block = message["content"][-1]
                        block.update({name: block[name] + text for name, text in delta.items() if name != "type"})
                    case {"type": "content_block_stop"} if parts:  # an input may be cut off
                        message["content"][-1]["input"] = from_json("".join(parts), allow_partial=True)
                        parts.clear()
                    case {"type": "message_delta", "delta": delta, "usage": usage, **more}:
                        message |= {**delta, "usage": {**message["usage"], **usage}, **more}
        return message

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The message as server-sent events."""
        async with aclosing(self.events()) as events:
            async for event in events:
                yield event_bytes(event)

    async def events(self) -> AsyncGenerator[Json, None]:
        """The message as events of the API, with the model's name once it is known which one answers."""
        pipeline, blocks, wrote = self.pipeline, self._blocks(), None
        begun = False
        async with aclosing(pipeline.stream()) as stream:
            async for _, wrote in stream:
                assert isinstance(wrote, Wrote)
                if not begun:
                    begun = True
                    yield {"type": "message_start", "message": self._begun()}
                if self.thoughts.policy == "hidden" and any(isinstance(each, Reasoning) for each in wrote.deltas):
                    for event in blocks.redact():
                        yield event
                for delta in await self.thoughts.seen(wrote.deltas, ended=wrote.finish_reason is not None):
                    for event in blocks.add(delta):
                        yield event
        for event in blocks.close():
            yield event
        assert isinstance(wrote, Wrote)
        ending = {"stop_reason": self._stop_reason(wrote), "stop_sequence": _stop_sequence(wrote)}
        routing = {"routing": pipeline.routing} if pipeline.is_routed else {}
        yield {
            "type": "message_delta",
            "delta": ending,
            "usage": usage_json(pipeline.tally, self._block_size),
            **routing,
        }
        yield {"type": "message_stop"}

    def _blocks(self) -> BlockEvents:
        thinking = self.request.thinking
        return BlockEvents(self.signer, omitted=thinking is not None and thinking.display == "omitted")

    def _begun(self) -> Json:
        plan = self.pipeline.plan
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": plan.served.name, "content": [],
            "stop_reason": None, "stop_sequence": None,
            "usage": {**usage_json(self.pipeline.tally, self._block_size), "service_tier": "standard"},
            **({"warnings": list(plan.warnings)} if plan.warnings else {}),
        }  # fmt: skip

    def _stop_reason(self, wrote: Wrote) -> str:
        if wrote.finish_reason == "length" and self.pipeline.plan.limit < self.request.max_tokens:
            return "model_context_window_exceeded"
        if _stop_sequence(wrote) is not None:
            return "stop_sequence"
        return {"tool_calls": "tool_use", "length": "max_tokens"}.get(wrote.finish_reason or "", "end_turn")

    @property
    def _block_size(self) -> int | None:
        served = self.pipeline.plan.served
        return None if isinstance(served, RemoteModel) else served.engine.config.block_size


def _stop_sequence(wrote: Wrote) -> str | None:
    return wrote.piece.stop_reason if isinstance(wrote.piece.stop_reason, str) else None


@dataclass(slots=True)
class BlockEvents:
    """An answer's deltas as the events of its content blocks, one open at a time."""

    signer: ThinkingSigner
    omitted: bool  # thinking comes as its signature alone
    _index: int = -1
    _open: Literal["text", "thinking", "tool_use"] | None = None
    _thinking: list[str] = field(default_factory=list)
    _redacted: bool = False

    def add(self, delta: Delta) -> Iterator[Json]:
        match delta:
            case Content(text, _) if text:
                yield from self._within("text", {"text": ""})
                yield self._delta("text_delta", text=text)
            case Reasoning(text):
                yield from self._within("thinking", {"thinking": "", "signature": ""})
                if not self.omitted:
                    self._thinking.append(text)
                    yield self._delta("thinking_delta", thinking=text)
            case CallStart(_, id, name):
                yield from self.close()
                yield self._start("tool_use", {"id": id, "name": name, "input": {}})
            case CallMore(_, arguments):
                yield self._delta("input_json_delta", partial_json=arguments)

    def redact(self) -> Iterator[Json]:
        """Says once that there was thinking, which nobody sees."""
        if not self._redacted:
            self._redacted = True
            yield from self.close()
            nonce = secrets.token_hex(8)
            yield self._start("redacted_thinking", {"data": f"{nonce}.{self.signer.sign(REDACTED + nonce)}"})
            yield {"type": "content_block_stop", "index": self._index}

    def close(self) -> Iterator[Json]:
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=self.signer.sign("".join(self._thinking)))
            self._thinking.clear()
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _within(self, kind: Literal["text", "thinking"], block: Json) -> Iterator[Json]:
        if self._open != kind:
            yield from self.close()
            yield self._start(kind, block)
            self._open = kind

    def _start(self, kind: str, block: Json) -> Json:
        self._index += 1
        self._open = "tool_use" if kind == "tool_use" else None
        return {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **block}}

    def _delta(self, kind: str, **fields: str) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **fields}}


def event_bytes(event: Json) -> bytes:
    """An event as it is sent: its type stands beside its data, too."""
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n".encode()


def usage_json(tally: Tally, block_size: int | None) -> Json:
    """`usage` in Anthropic's shape: each token of the prompt is in one of three counts. The prefix cache keeps whole
    blocks: those that were computed now count as creation, and the rest as input. None: there is no cache of ours."""
    kept = 0 if block_size is None else tally.prompt_tokens - tally.prompt_tokens % block_size
    created = max(0, kept - tally.cached_tokens)
    return {
        "input_tokens": tally.prompt_tokens - tally.cached_tokens - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": tally.cached_tokens,
        "output_tokens": tally.completion_tokens,
        "output_tokens_details": {"thinking_tokens": tally.reasoning_tokens},
    }
