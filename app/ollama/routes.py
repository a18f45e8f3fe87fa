"""Routes of Ollama's API: streams are lines of JSON, durations nanoseconds, errors `{"error": "…"}`.

Models are loaded when the server starts: `keep_alive` changes nothing, and a request without a prompt only says that
the model is there.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic_core import from_json

from app.admission.request_budget import output_limit
from app.answering.answer_pipeline import AnswerPipeline
from app.answering.remote_model import RemoteModel, RemotePlan
from app.answering.served_model import ServedModel
from app.answering.thinking_summary import ThinkingSummary
from app.auth import may_ask
from app.connections import while_connected
from app.current_user import AppServing, AppState, User
from app.errors import ApiError, from_exception
from app.ollama.request_models import (
    CHAT_REFUSED,
    EMBED_NO_EFFECT,
    EMBED_REFUSED,
    GENERATE_REFUSED,
    NO_EFFECT,
    SHOW_NO_EFFECT,
    TAG,
    EmbedPromptRequest,
    EmbedRequest,
    Json,
    ModelRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    reworded,
)
from app.openai.chat_completions import plan_chat
from app.openai.embeddings import EmbeddingRequest, embeddings
from app.openai.event_stream import EventStream, reply
from app.openai.remote_requests import plan_remote_chat
from app.query_params import ONLY_KNOWN
from app.request_body import MAX_BODY_BYTES, JsonBody, parse
from app.state import Serving
from engine.errors import EngineError
from reasoning.agent import Wrote
from reasoning.turn import CallMore, CallStart, Content, Delta, Reasoning

VERSION = "0.12.0"  # of Ollama's API: clients ask for it to know what there is
router = APIRouter(prefix="/api", tags=["Ollama"], dependencies=[ONLY_KNOWN])


class LineStream(EventStream):
    """Lines of JSON, with errors as Ollama has them. There is no line that a client would skip, so no pings."""

    ping, done, media = b"", b"", "application/x-ndjson"

    def failed(self, refusal: ApiError) -> bytes:
        return _line(refusal.ollama_body())


def _line(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(slots=True)
class OllamaJob:
    """A checked request, ready to run: as `/api/chat` answers, or with `generates` as `/api/generate` does."""

    pipeline: AnswerPipeline
    thoughts: ThinkingSummary
    generates: bool
    began: int = field(default_factory=time.perf_counter_ns)
    _call: CallStart | None = None
    _arguments: list[str] = field(default_factory=list)

    async def whole(self) -> Json:
        """The answer, when all of it is there."""
        texts: dict[str, list[str]] = {"content": [], "thinking": []}
        calls, last = list[Json](), Json()
        async with aclosing(self._parts()) as parts:
            async for part, ending in parts:
                last = ending
                calls += part.pop("tool_calls", [])
                for name, text in part.items():
                    texts[name].append(text)
        message: Json = {name: "".join(parts) for name, parts in texts.items() if parts or name == "content"}
        return self._reply(message | ({"tool_calls": calls} if calls else {}), last)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The answer as lines; the last one has the numbers."""
        async with aclosing(self._parts()) as parts:
            async for part, ending in parts:
                yield _line(self._reply({"content": "", **part}, ending))

    async def _parts(self) -> AsyncGenerator[tuple[Json, Json], None]:
        """Parts of the message, each with what is said beside it: the last with the ending and the numbers."""
        first: int | None = None
        reason: str | None = None
        async with aclosing(self.pipeline.stream()) as stream:
            async for _, wrote in stream:
                assert isinstance(wrote, Wrote)
                reason = wrote.finish_reason
                first = first or time.perf_counter_ns()
                for delta in await self.thoughts.seen(wrote.deltas, ended=wrote.finish_reason is not None):
                    if part := self._part(delta):
                        yield part, {"done": False}
        if called := self._called():
            yield called, {"done": False}
        tally, now = self.pipeline.tally, time.perf_counter_ns()
        first = first or now
        warnings = self.pipeline.plan.warnings
        yield {}, {
            "done": True, "done_reason": "length" if reason == "length" else "stop",
            "total_duration": now - self.began, "load_duration": 0,
            "prompt_eval_count": tally.prompt_tokens, "prompt_eval_duration": first - self.began,
            "eval_count": tally.completion_tokens, "eval_duration": now - first,
            **({"warnings": list(warnings)} if warnings else {}),
        }  # fmt: skip

    def _part(self, delta: Delta) -> Json:
        match delta:
            case Content(text, _):
                return {"content": text} if text else {}
            case Reasoning(text):
                return {"thinking": text}
            case CallStart():
                called, self._call = self._called(), delta
                return called
            case CallMore(_, arguments):
                self._arguments.append(arguments)
        return {}

    def _called(self) -> Json:
        """The call that has been written last, whole; arguments that were cut off end where they do."""
        if self._call is None:
            return {}
        written, name, id = "".join(self._arguments), self._call.name, self._call.id
        self._call = None
        self._arguments.clear()
        arguments = from_json(written, allow_partial=True) if written else {}
        return {"tool_calls": [{"id": id, "function": {"name": name, "arguments": arguments}}]}

    def _reply(self, message: Json, ending: Json) -> Json:
        head = {"model": self.pipeline.plan.served.name + TAG, "created_at": _now()}
        if self.generates:
            return {**head, "response": message.pop("content"), **message, **ending}
        return {**head, "message": {"role": "assistant", **message}, **ending}


async def _answer(
    request: Request, wanted: OllamaChatRequest | OllamaGenerateRequest, state: Serving, user: str, *, empty: bool
) -> Response:
    """The answer, or where the request has nothing to answer, that the model is loaded."""
    generates = isinstance(wanted, OllamaGenerateRequest)
    if empty:
        served = state.models.get(wanted.served_name)
        message: Json = {"response": ""} if generates else {"message": {"role": "assistant", "content": ""}}
        head = {"model": served.name + TAG, "created_at": _now(), **message}
        return Response(_line({**head, "done": True, "done_reason": "load"}), media_type="application/json")

    async def plan(served: ServedModel) -> Any:
        chat = wanted.chat(served.markers is not None)
        output_limit(chat.max_tokens)
        return await plan_chat(chat, served, state.reasoning_resolver, state.tool_selector, user)

    async def plan_remote(remote: RemoteModel) -> RemotePlan:
        return await plan_remote_chat(wanted.chat(thinks=False), remote)

    try:
        plans, auto = await state.models.plans(wanted.served_name, plan, plan_remote)
    except (ApiError, EngineError) as error:
        raise reworded(from_exception(error, param="messages"), generates=generates) from error
    pipeline = AnswerPipeline(partial(state.counting.watch, "chat"), plans, 1, user, auto)
    job = OllamaJob(pipeline, state.thoughts(user), generates)
    return await reply(request, job, LineStream if wanted.stream else None, "messages")


ChatBody = Annotated[
    OllamaChatRequest,
    Depends(JsonBody(OllamaChatRequest, CHAT_REFUSED, no_effect=NO_EFFECT, most=MAX_BODY_BYTES)),
]
GenerateBody = Annotated[
    OllamaGenerateRequest,
    Depends(JsonBody(OllamaGenerateRequest, GENERATE_REFUSED, no_effect=NO_EFFECT, most=MAX_BODY_BYTES)),
]
EmbedBody = Annotated[
    EmbedRequest, Depends(JsonBody(EmbedRequest, EMBED_REFUSED, no_effect=EMBED_NO_EFFECT, most=MAX_BODY_BYTES))
]
EmbedPromptBody = Annotated[EmbedPromptRequest, Depends(JsonBody(EmbedPromptRequest, no_effect=EMBED_NO_EFFECT))]
ShowBody = Annotated[ModelRequest, Depends(JsonBody(ModelRequest, no_effect=SHOW_NO_EFFECT))]


@router.post("/chat")
async def chat(request: Request, user: User, state: AppServing, wanted: ChatBody) -> Response:
    return await _answer(request, wanted, state, user, empty=not wanted.messages)


@router.post("/generate")
async def generate(request: Request, user: User, state: AppServing, wanted: GenerateBody) -> Response:
    return await _answer(request, wanted, state, user, empty=not wanted.prompt)


@router.post("/embed")
async def embed(request: Request, state: AppState, wanted: EmbedBody) -> Json:
    began = time.perf_counter_ns()
    body = {"input": wanted.input, "model": wanted.served_name, "dimensions": wanted.dimensions}
    made = await while_connected(request, embeddings(parse(body, EmbeddingRequest), state.library.embedder))
    return {
        "model": made["model"] + TAG, "embeddings": [each["embedding"] for each in made["data"]],
        "total_duration": time.perf_counter_ns() - began, "load_duration": 0,
        "prompt_eval_count": made["usage"]["prompt_tokens"],
    }  # fmt: skip


@router.post("/embeddings")
async def embed_one(request: Request, state: AppState, wanted: EmbedPromptBody) -> Json:
    body = {"input": wanted.prompt, "model": wanted.served_name}
    try:
        made = await while_connected(request, embeddings(parse(body, EmbeddingRequest), state.library.embedder))
    except ApiError as error:
        raise error.reworded(partial(re.sub, r"\binput(\[0\])?", "prompt")) from error
    return {"embedding": made["data"][0]["embedding"]}


@router.get("/version")
async def version() -> Json:
    return {"version": VERSION}


def _served(state: Serving) -> list[ServedModel]:
    """The models of engines that the request may ask for."""
    return [*(each for each in state.models if may_ask(each.name)), *state.models.adapters.values()]


@router.get("/tags")
async def tags(state: AppServing) -> Json:
    served = _served(state)
    return {"models": await asyncio.to_thread(_entries, served)}


@router.get("/ps")
async def loaded(state: AppServing) -> Json:
    """Every model is loaded, and stays so."""
    every = _served(state)
    entries = await asyncio.to_thread(_entries, every)
    never = "9999-12-31T23:59:59Z"
    lengths = [served.engine.max_model_len for served in every]
    return {
        "models": [
            {**entry, "expires_at": never, "size_vram": 0, "context_length": length}
            for entry, length in zip(entries, lengths, strict=True)
        ]
    }


@router.post("/show")
async def show(state: AppServing, wanted: ShowBody) -> Json:
    served = state.models.get(wanted.served_name)
    (entry,) = await asyncio.to_thread(_entries, (served,))
    capabilities = ["completion"]
    capabilities += ["tools"] if served.tool_parser is not None else []
    capabilities += ["vision"] if served.sees else []
    capabilities += ["thinking"] if served.markers is not None else []
    return {
        "details": entry["details"], "modified_at": entry["modified_at"], "capabilities": capabilities,
        "model_info": {
            "general.architecture": "ponder", "general.parameter_count": served.parameters,
            "ponder.context_length": served.engine.max_model_len,
        },
        "template": "", "parameters": "", "modelfile": "",
    }  # fmt: skip


def _entries(models: Sequence[ServedModel]) -> list[Json]:
    return [
        {
            "name": served.name + TAG, "model": served.name + TAG,
            "modified_at": datetime.fromtimestamp(served.created, UTC).isoformat().replace("+00:00", "Z"),
            "size": 2 * served.parameters, "digest": "",
            "details": {
                "format": "safetensors", "family": "ponder", "families": None,
                "parent_model": "" if served.adapter is None else served.base,
                "parameter_size": f"{served.parameters / 1e6:,.1f}M", "quantization_level": "",
            },
        }
        for served in models
    ]  # fmt: skip
