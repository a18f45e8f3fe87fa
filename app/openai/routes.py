"""Routes of chat, completions, embeddings, reranking, tokens and models: each reads a body, checks it, and answers.

`GET /v1/models` lists each served model under its own name, the first also as `default`, its adapters with their
`parent` and `root`, and `auto`. Operators load and unload adapters, as vLLM's API has it.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from app.answering.model_registry import ModelRegistry
from app.auth import limited_to, may_ask
from app.config import AUTO_NAME, DEFAULT_NAME, BadSetting
from app.connections import while_connected
from app.current_user import AppServing, AppState, Asker, Operator, User, check_reasoning_scopes
from app.errors import ApiError, invalid
from app.openai.chat_completions import chat_job, plan_chat
from app.openai.chat_messages import turns
from app.openai.completions import CompletionJob
from app.openai.embeddings import (
    EMBEDDING_NO_EFFECT,
    MAX_LENGTH,
    EmbeddingRequest,
    RerankRequest,
    embeddings,
    rerank,
)
from app.openai.event_stream import EventStream, reply
from app.openai.request_models import ChatMessage, ChatRequest, CompletionRequest
from app.request_body import CHAT_REFUSED, COMPLETION_REFUSED, MAX_BODY_BYTES, NO_EFFECT, JsonBody
from app.state import Serving
from engine.errors import InvalidParameter


def model_list(models: ModelRegistry, embedder: str) -> dict[str, Any]:
    names = (*models.names, embedder) if may_ask(embedder) else models.names
    return {
        "object": "list", "data": [model_entry(models, embedder, name) for name in names],
        "first_id": names[0] if names else None, "last_id": names[-1] if names else None, "has_more": False,
    }  # fmt: skip


def model_entry(models: ModelRegistry, embedder: str, name: str) -> dict[str, Any]:
    """
    `thinks`, `tools`, `sees` and `embeds` say whether it thinks, takes tools, reads images, and whether it is the
    embedder. `auto` has the longest context among its models, thinks and sees where all of them do, and takes no tools.
    A remote model's context and thinking are not known here, and it sees where its settings say so; `remote` says that
    it is one, or of `auto`, that it may ask one.

    Raises:
        ApiError: 404 `model_not_found`.
    """
    if name == embedder and may_ask(embedder):
        return {
            **_named(name, models.default.created, MAX_LENGTH), "thinks": False, "tools": False, "sees": False,
            "embeds": True,
        }  # fmt: skip
    if (remote := models.remotes.get(name)) is not None:
        entry = _named(name, remote.created, None)
        sees = remote.settings.sees
        return {**entry, "thinks": False, "tools": True, "sees": sees, "embeds": False, "remote": True}
    if (served := models.adapters.get(name)) is not None:
        with limited_to(None):  # an adapter is listed as its model is
            entry = model_entry(models, embedder, served.base)
        named = _named(name, served.created, served.engine.max_model_len)
        return {**entry, **named, "parent": served.base, "root": served.root}
    asked = models.auto.steps if name == AUTO_NAME and models.auto is not None else (models.get(name),)
    return {
        **_named(name, max(served.created for served in asked), max(served.engine.max_model_len for served in asked)),
        "thinks": all(served.markers is not None for served in asked),
        "tools": name != AUTO_NAME and all(served.tool_parser is not None for served in asked),
        "sees": all(served.sees for served in asked),
        "embeds": False,
        **({"remote": True} if name == AUTO_NAME and models.auto is not None and models.auto.remote else {}),
    }


def _named(name: str, created: int, length: int | None) -> dict[str, Any]:
    """A model's name, age and context length, in the fields of OpenAI's, vLLM's and Anthropic's APIs. None: unknown."""
    created_at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "id": name, "object": "model", "created": created, "owned_by": "ponder", "max_model_len": length,
        "type": "model", "display_name": name, "created_at": created_at, "lifecycle": "active",
        "max_input_tokens": length, "max_tokens": length,
    }  # fmt: skip


class TokenizeRequest(BaseModel):
    """A text or a conversation, as vLLM's `/tokenize` takes it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = Field(DEFAULT_NAME, description="a served model's name")
    prompt: str | None = Field(None, description="a text; or else messages")
    messages: list[ChatMessage] | None = Field(None, min_length=1, description="as in a chat; or else prompt")
    tools: list[Any] | None = Field(None, description="as in a chat, with messages")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="as in a chat, with messages")
    add_special_tokens: bool = Field(True, description="true or false: whether a text begins as the model's prompts do")
    return_token_strs: bool = Field(False, description="true or false")

    @field_validator("messages", mode="before")
    @classmethod
    def _messages(cls, value: Any) -> Any:
        return turns(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "prompt and messages are both given or both missing; accepted: one of them.")
        if self.prompt is not None and (self.tools is not None or self.chat_template_kwargs):
            field = "chat_template_kwargs" if self.tools is None else "tools"
            raise invalid(field, f"{field} goes with messages, and prompt is a text; accepted: without it.")
        return self


class DetokenizeRequest(BaseModel):
    """Tokens to be written out."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = Field(DEFAULT_NAME, description="a served model's name")
    tokens: list[int] = Field(description="a list of the model's token ids")


class LoadAdapterRequest(BaseModel):
    """An adapter of the first model, as vLLM's `/v1/load_lora_adapter` takes it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: str = Field(min_length=1, max_length=200, description="the name that clients ask for")
    lora_path: str = Field(min_length=1, description="a directory that PEFT saved, or a hub name")


class UnloadAdapterRequest(BaseModel):
    """A loaded adapter."""

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: str = Field(description="a loaded adapter's name; GET /v1/models lists them")


async def tokenize(request: TokenizeRequest, state: Serving, user: str) -> dict[str, Any]:
    """The tokens that a completion or a chat begins with, in the fields of vLLM's API.

    Raises:
        ApiError: 400 or 404, naming the field; 400 `context_length_exceeded`.
    """
    served = state.models.get(request.model)
    if request.prompt is None:
        chat = ChatRequest.model_construct(
            model=request.model, messages=request.messages or [], tools=request.tools,
            chat_template_kwargs=request.chat_template_kwargs,
        )  # fmt: skip
        plan = await plan_chat(chat, served, state.reasoning_resolver, state.tool_selector, user)
        tokens = served.shown_tokens(plan.prompt)
    else:
        tokens = await served.text_tokens(request.prompt, bos=request.add_special_tokens)
    tokenizer = served.engine.tokenizer
    strings = [tokenizer.decode([token], skip_special=False) for token in tokens]
    return {
        "count": len(tokens), "max_model_len": served.engine.max_model_len, "tokens": tokens,
        "token_strs": strings if request.return_token_strs else None,
    }  # fmt: skip


async def detokenize(request: DetokenizeRequest, models: ModelRegistry) -> dict[str, Any]:
    """The text of tokens.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    served = models.get(request.model)
    size = served.engine.vocab_size
    for at, token in enumerate(request.tokens):
        if not 0 <= token < size:
            raise invalid("tokens", f"tokens[{at}] is {token}; accepted: an integer from 0 to {size - 1}.")
    text = await asyncio.to_thread(served.engine.tokenizer.decode, request.tokens, skip_special=False)
    return {"prompt": text}


router = APIRouter(prefix="/v1", tags=["OpenAI"])


ChatBody = Annotated[
    ChatRequest, Depends(JsonBody(ChatRequest, CHAT_REFUSED, no_effect=NO_EFFECT, most=MAX_BODY_BYTES))
]
CompletionBody = Annotated[
    CompletionRequest,
    Depends(JsonBody(CompletionRequest, COMPLETION_REFUSED, no_effect=NO_EFFECT, most=MAX_BODY_BYTES)),
]
EmbeddingBody = Annotated[
    EmbeddingRequest, Depends(JsonBody(EmbeddingRequest, no_effect=EMBEDDING_NO_EFFECT, most=MAX_BODY_BYTES))
]
RerankBody = Annotated[RerankRequest, Depends(JsonBody(RerankRequest, most=MAX_BODY_BYTES))]
TokenizeBody = Annotated[TokenizeRequest, Depends(JsonBody(TokenizeRequest, most=MAX_BODY_BYTES))]
DetokenizeBody = Annotated[DetokenizeRequest, Depends(JsonBody(DetokenizeRequest, most=MAX_BODY_BYTES))]


@router.post("/chat/completions")
async def chat_completions(request: Request, user: User, who: Asker, state: AppServing, wanted: ChatBody) -> Response:
    check_reasoning_scopes(wanted.checker, wanted.strategy_options, who)
    job = await chat_job(wanted, state, user)
    return await reply(request, job, EventStream if wanted.stream else None, "messages")


@router.post("/completions")
async def completions(request: Request, user: User, state: AppServing, wanted: CompletionBody) -> Response:
    job = await CompletionJob.of(wanted, state.models, state.counting, user)
    return await reply(request, job, EventStream if wanted.stream else None, "prompt")


@router.post("/embeddings")
async def embed(request: Request, state: AppState, wanted: EmbeddingBody) -> Response:
    made = embeddings(wanted, state.library.embedder, state.settings.embedding_token_ids)
    vectors = await while_connected(request, made)
    return await asyncio.to_thread(JSONResponse, vectors)  # a few megabytes, for many texts


@router.post("/rerank")
async def rerank_documents(request: Request, state: AppState, wanted: RerankBody) -> Response:
    return JSONResponse(await while_connected(request, rerank(wanted, state.library.embedder)))


@router.post("/tokenize")
async def tokenize_text(user: User, state: AppServing, wanted: TokenizeBody) -> dict[str, Any]:
    return await tokenize(wanted, state, user)


@router.post("/detokenize")
async def detokenize_tokens(state: AppServing, wanted: DetokenizeBody) -> dict[str, Any]:
    return await detokenize(wanted, state.models)


LoadBody = Annotated[LoadAdapterRequest, Depends(JsonBody(LoadAdapterRequest))]
UnloadBody = Annotated[UnloadAdapterRequest, Depends(JsonBody(UnloadAdapterRequest))]


@router.post("/load_lora_adapter")
async def load_lora_adapter(who: Operator, state: AppServing, wanted: LoadBody) -> PlainTextResponse:
    _check_runtime(state)
    try:
        await state.models.load_adapter(wanted.lora_name, wanted.lora_path)
    except BadSetting as taken:
        raise invalid("lora_name", str(taken)) from None
    except InvalidParameter as refused:
        raise invalid("lora_path", str(refused)) from None
    return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' added successfully.")


@router.post("/unload_lora_adapter")
async def unload_lora_adapter(who: Operator, state: AppServing, wanted: UnloadBody) -> PlainTextResponse:
    _check_runtime(state)
    await state.models.unload_adapter(wanted.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' removed successfully.")


def _check_runtime(state: Serving) -> None:
    if not state.settings.allow_runtime_lora:
        message = "Adapters are those that the server was started with; accepted: on a server with allow_runtime_lora."
        raise ApiError(404, message, code="runtime_lora_off")


@router.get("/models")
async def models(state: AppServing) -> dict[str, Any]:
    return model_list(state.models, state.settings.embedder)


@router.get("/models/{name:path}")
async def model(state: AppServing, name: str) -> dict[str, Any]:
    return model_entry(state.models, state.settings.embedder, name)
