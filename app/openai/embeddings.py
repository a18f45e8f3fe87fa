"""`POST /v1/embeddings` and `/v1/rerank`, by the model that documents are indexed with.

Vectors have length 1. A document's relevance is the late interaction of `POST /api/search`: the mean over the query's
tokens of the highest cosine with a token of the document's. Texts go through the model in batches, each in a thread, so
after a client has left no further batch is computed.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.admission.request_budget import charge
from app.config import DEFAULT_NAME
from app.errors import ApiError, invalid
from retrieval.embedding import Embedder, Vectors
from retrieval.index.hybrid import MAX_QUERY_LENGTH, max_sim

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
        if isinstance(texts, list) and any(isinstance(text, int | list) for text in texts[:MAX_TEXTS]):
            raise invalid(
                "input", f"input has token ids, which are those of another model; accepted: {_ACCEPTED}. LangChain "
                "sends texts with check_embedding_ctx_length=False.",
            )  # fmt: skip
        return _checked_texts("input", texts, MAX_TEXTS, _ACCEPTED)


async def embeddings(request: EmbeddingRequest, embedder: Embedder) -> dict[str, Any]:
    """The reply in OpenAI's shape.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    _check_model(request.model, embedder)
    size = await asyncio.to_thread(lambda: embedder.size)
    if request.dimensions is not None and request.dimensions > size:
        raise invalid("dimensions", f"dimensions is {request.dimensions}; accepted: an integer from 1 to {size}.")
    texts, pieces = request.input, 0
    batches = range(0, len(texts), BATCH)
    for at in batches:  # all of them before the first is embedded, which takes longer by far
        pieces += await asyncio.to_thread(_count, embedder, texts[at : at + BATCH], at, "input")
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


def _checked_texts(field: str, texts: Any, most: int, accepted: str, *, blank: bool = True) -> Any:
    """Returns a list of at most `most` texts, none of them empty (nor, without `blank`, white space alone) or too long.

    Raises:
        ApiError: 400, naming the field.
    """
    if not isinstance(texts, list) or not 1 <= len(texts) <= most:
        had = f"a list of {len(texts)}" if isinstance(texts, list) else f"{texts!r:.60}"
        raise invalid(field, f"{field} is {had}; accepted: {accepted}.")
    for at, text in enumerate(texts):
        if not isinstance(text, str) or not (text if blank else text.strip()):
            raise invalid(field, f"{field}[{at}] is {text!r:.60}; accepted: {accepted}.")
        if len(text) > MAX_CHARACTERS:
            message = f"{field}[{at}] has {len(text)} characters; accepted: at most {MAX_CHARACTERS}."
            raise invalid(field, message, "context_length_exceeded")
    return texts


def _check_model(name: str, embedder: Embedder) -> None:
    if name not in (embedder.name, DEFAULT_NAME):
        message = f"The model {name!r:.200} embeds nothing here; accepted: {embedder.name!r} or 'default'."
        raise ApiError(404, message, param="model", code="model_not_found")


def _count(embedder: Embedder, texts: Sequence[str], first: int, field: str) -> int:
    """Word pieces in the texts, the first of which is `field[first]`."""
    counts = [len(spans) for spans in embedder.pieces(texts)]
    for at, count in enumerate(counts, first):
        if count > MAX_LENGTH:
            message = f"{field}[{at}] has {count} tokens; accepted: at most {MAX_LENGTH}."
            raise invalid(field, message, "context_length_exceeded")
    return sum(counts)


def _encoded(vectors: Vectors, request: EmbeddingRequest) -> list[Any]:
    if request.dimensions is not None:
        vectors = vectors[:, : request.dimensions]
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    if request.encoding_format == "base64":
        return [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    return list(vectors.tolist())


MAX_DOCUMENTS = 1000
_DOCUMENTS = f'a list of 1 to {MAX_DOCUMENTS} non-empty strings, or objects {{"text": "…"}}'


class RerankRequest(BaseModel):
    """The body of Cohere's and Jina's rerank, as vLLM takes it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = Field(DEFAULT_NAME, description='the embedder\'s name or "default"')
    query: str = Field(
        min_length=1, max_length=MAX_QUERY_LENGTH, description=f"a text of 1 to {MAX_QUERY_LENGTH} characters"
    )
    documents: list[str] = Field(description=_DOCUMENTS)
    top_n: int | None = Field(None, ge=1, description="an integer of 1 or more: how many are returned, the best first")
    return_documents: bool = Field(False, description="true or false")

    @field_validator("documents", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if isinstance(value, list):
            value = [one["text"] if isinstance(one, dict) and one.keys() == {"text"} else one for one in value]
        return _checked_texts("documents", value, MAX_DOCUMENTS, _DOCUMENTS, blank=False)


async def rerank(request: RerankRequest, embedder: Embedder) -> dict[str, Any]:
    """The documents' relevance to the query, -1 to 1, the best first, in the fields of Cohere's and Jina's APIs.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    _check_model(request.model, embedder)
    texts = request.documents
    pieces = await asyncio.to_thread(_count, embedder, [request.query], 0, "query")
    batches = range(0, len(texts), BATCH)
    for at in batches:
        pieces += await asyncio.to_thread(_count, embedder, texts[at : at + BATCH], at, "documents")
    charge(pieces)
    scores = list[float]()
    for at in batches:
        scores += await asyncio.to_thread(max_sim, embedder, request.query, texts[at : at + BATCH])
    order = sorted(range(len(texts)), key=lambda at: (-scores[at], at))[: request.top_n]
    return {
        "id": f"rerank-{secrets.token_hex(12)}",
        "model": embedder.name,
        "results": [
            {
                "index": at,
                "relevance_score": scores[at],
                **({"document": {"text": texts[at]}} if request.return_documents else {}),
            }
            for at in order
        ],
        "usage": {"prompt_tokens": pieces, "total_tokens": pieces},
    }
