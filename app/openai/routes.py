"""Routes of chat, completions, embeddings and models: each reads a body, checks it, and answers whole or as a stream.

`GET /v1/models` lists each served model under its own name, the first also as `default`, and `auto`. The vectors of
`POST /v1/embeddings` have length 1 and come from the model that documents are indexed with. Texts go through it in
batches, each in a thread, so after a client has left no further batch is computed.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.admission.request_budget import charge
from app.answering.model_registry import ModelRegistry
from app.config import AUTO_NAME, DEFAULT_NAME
from app.connections import while_connected
from app.current_user import AppServing, AppState, Asker, User, check_checker_scope
from app.errors import ApiError, invalid
from app.openai.chat_completions import chat_job
from app.openai.completions import CompletionJob
from app.openai.event_stream import EventStream, reply
from app.openai.request_models import ChatRequest, CompletionRequest
from app.request_body import CHAT_REFUSED, COMPLETION_REFUSED, MAX_BODY_BYTES, NO_EFFECT, JsonBody
from retrieval.embedding import Embedder, Vectors


def model_list(models: ModelRegistry, embedder: str) -> dict[str, Any]:
    names = (*models.names, embedder)
    return {
        "object": "list", "data": [model_entry(models, embedder, name) for name in names],
        "first_id": names[0], "last_id": names[-1], "has_more": False,
    }  # fmt: skip


def model_entry(models: ModelRegistry, embedder: str, name: str) -> dict[str, Any]:
    """
    `thinks`, `tools` and `embeds` say whether it thinks, takes tools, and whether it is the embedder. `auto` has the
    longest context among its models, thinks where all of them do, and takes no tools.

    Raises:
        ApiError: 404 `model_not_found`.
    """
    if name == embedder:
        return {
            **_named(name, models.default.created, MAX_LENGTH), "thinks": False, "tools": False, "embeds": True,
        }  # fmt: skip
    asked = models.auto.steps if name == AUTO_NAME and models.auto is not None else (models.get(name),)
    return {
        **_named(name, max(served.created for served in asked), max(served.engine.max_model_len for served in asked)),
        "thinks": all(served.markers is not None for served in asked),
        "tools": name != AUTO_NAME and all(served.tool_parser is not None for served in asked),
        "embeds": False,
    }


def _named(name: str, created: int, length: int) -> dict[str, Any]:
    """A model's name, age and context length, in the fields of OpenAI's, vLLM's and Anthropic's APIs."""
    created_at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "id": name, "object": "model", "created": created, "owned_by": "ponder", "max_model_len": length,
        "type": "model", "display_name": name, "created_at": created_at, "lifecycle": "active",
        "max_input_tokens": length, "max_tokens": length,
    }  # fmt: skip


MAX_TEXTS = 2048
MAX_LENGTH = 8192  # word pieces of a text
MAX_CHARACTERS = 32 * MAX_LENGTH  # of it, white space included; longer ones are not even cut into pieces
BATCH = 32
EMBEDDING_NO_EFFECT = frozenset({"user"})

_ACCEPTED = f"a non-empty string, or a list of 1 to {MAX_TEXTS} of them"


class EmbeddingRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    input: list[str] = Field(description=_ACCEPTED)
    model: str = Field(description='the embedder\'s name or "default"')
    dimensions: int | None = Field(None, ge=1, description="an integer from 1 to the length of the model's vectors")
    encoding_format: Literal["float", "base64"] = Field("float", description='"float" or "base64"')

    @field_validator("input", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not 1 <= len(texts) <= MAX_TEXTS:
            had = f"a list of {len(texts)}" if isinstance(texts, list) else f"{value!r:.60}"
            raise invalid("input", f"input is {had}; accepted: {_ACCEPTED}.")
        for at, text in enumerate(texts):
            if isinstance(text, int | list):
                raise invalid(
                    "input", f"input has token ids, which are those of another model; accepted: {_ACCEPTED}. LangChain "
                    "sends texts with check_embedding_ctx_length=False.",
                )  # fmt: skip
            if not isinstance(text, str) or not text:
                raise invalid("input", f"input[{at}] is {text!r:.60}; accepted: a non-empty string.")
            if len(text) > MAX_CHARACTERS:
                message = f"input[{at}] has {len(text)} characters; accepted: at most {MAX_CHARACTERS}."
                raise invalid("input", message, "context_length_exceeded")
        return texts


async def embeddings(request: EmbeddingRequest, embedder: Embedder) -> dict[str, Any]:
    """The reply in OpenAI's shape.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    if request.model not in (embedder.name, DEFAULT_NAME):
        message = f"The model {request.model!r:.200} embeds nothing here; accepted: {embedder.name!r} or 'default'."
        raise ApiError(404, message, param="model", code="model_not_found")
    size = await asyncio.to_thread(lambda: embedder.size)
    if request.dimensions is not None and request.dimensions > size:
        raise invalid("dimensions", f"dimensions is {request.dimensions}; accepted: an integer from 1 to {size}.")
    texts, pieces = request.input, 0
    batches = range(0, len(texts), BATCH)
    for at in batches:  # all of them before the first is embedded, which takes longer by far
        pieces += await asyncio.to_thread(_count, embedder, texts[at : at + BATCH], at)
    charge(pieces)
    encoded = list[Any]()
    for at in batches:
        vectors = await asyncio.to_thread(embedder.embed, texts[at : at + BATCH])
        encoded += await asyncio.to_thread(_encoded, vectors, request)
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": at, "embedding": one} for at, one in enumerate(encoded)],
        "model": embedder.name,
        "usage": {"prompt_tokens": pieces, "total_tokens": pieces},
    }


def _count(embedder: Embedder, texts: Sequence[str], first: int) -> int:
    """Word pieces in the texts, the first of which is `input[first]`."""
    counts = [len(spans) for spans in embedder.pieces(texts)]
    for at, count in enumerate(counts, first):
        if count > MAX_LENGTH:
            message = f"input[{at}] has {count} tokens; accepted: at most {MAX_LENGTH}."
            raise invalid("input", message, "context_length_exceeded")
    return sum(counts)


def _encoded(vectors: Vectors, request: EmbeddingRequest) -> list[Any]:
    if request.dimensions is not None:
        vectors = vectors[:, : request.dimensions]
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    if request.encoding_format == "base64":
        return [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    return list(vectors.tolist())


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


@router.post("/chat/completions")
async def chat_completions(request: Request, user: User, who: Asker, state: AppServing, wanted: ChatBody) -> Response:
    check_checker_scope(wanted.checker, who)
    job = await chat_job(wanted, state, user)
    return await reply(request, job, EventStream if wanted.stream else None, "messages")


@router.post("/completions")
async def completions(request: Request, user: User, state: AppServing, wanted: CompletionBody) -> Response:
    job = await CompletionJob.of(wanted, state.models, state.counting, user)
    return await reply(request, job, EventStream if wanted.stream else None, "prompt")


@router.post("/embeddings")
async def embed(request: Request, state: AppState, wanted: EmbeddingBody) -> Response:
    vectors = await while_connected(request, embeddings(wanted, state.library.embedder))
    return await asyncio.to_thread(JSONResponse, vectors)  # a few megabytes, for many texts


@router.get("/models")
async def models(state: AppServing) -> dict[str, Any]:
    return model_list(state.models, state.settings.embedder)


@router.get("/models/{name:path}")
async def model(state: AppServing, name: str) -> dict[str, Any]:
    return model_entry(state.models, state.settings.embedder, name)
