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
from app.auth import may_ask
from app.config import DEFAULT_NAME
from app.config.sections import EmbeddingTokenIds
from app.errors import ApiError, invalid
from retrieval.embedding import Embedder, Vectors
from retrieval.index.hybrid import MAX_QUERY_LENGTH, max_sim

MAX_TEXTS = 2048
MAX_LENGTH = 8192  # word pieces of a text
MAX_CHARACTERS = 32 * MAX_LENGTH  # of it, white space included; longer ones are not even cut into pieces
BATCH = 32
EMBEDDING_NO_EFFECT = frozenset({"user"})

_ACCEPTED = f"a non-empty string, or a list of 1 to {MAX_TEXTS} of them"
_IDS_ACCEPTED = f"a list of 1 to {MAX_LENGTH} token ids, or a list of 1 to {MAX_TEXTS} such lists"

Ids = Sequence[Sequence[int]]


class EmbeddingRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    input: list[str] | list[list[int]] = Field(
        description=f"{_ACCEPTED}; where the setting embedding_token_ids is own, also {_IDS_ACCEPTED}"
    )
    model: str = Field(description='the embedder\'s name or "default"')
    dimensions: int | None = Field(None, ge=1, description="an integer from 1 to the length of the model's vectors")
    encoding_format: Literal["float", "base64"] = Field("float", description='"float" or "base64"')

    @field_validator("input", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], int | list):
            return _checked_ids([value] if isinstance(value[0], int) else value)
        texts = [value] if isinstance(value, str) else value
        return _checked_texts("input", texts, MAX_TEXTS, _ACCEPTED)


async def embeddings(
    request: EmbeddingRequest, embedder: Embedder, token_ids: EmbeddingTokenIds = "refuse"
) -> dict[str, Any]:
    """The reply in OpenAI's shape. With `token_ids` "own", the input may be ids of the embedder's tokenizer.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    _check_model(request.model, embedder)
    size = await asyncio.to_thread(lambda: embedder.size)
    if request.dimensions is not None and request.dimensions > size:
        raise invalid("dimensions", f"dimensions is {request.dimensions}; accepted: an integer from 1 to {size}.")
    texts = [text for text in request.input if isinstance(text, str)]
    if ids := [each for each in request.input if not isinstance(each, str)]:
        texts = await asyncio.to_thread(_texts_of, embedder, ids, token_ids)
    pieces = 0
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


def _checked_ids(lists: list[Any]) -> list[Any]:
    """Returns at most `MAX_TEXTS` lists of token ids, none of them empty or too long.

    Raises:
        ApiError: 400, naming the place.
    """
    if len(lists) > MAX_TEXTS:
        raise invalid("input", f"input is a list of {len(lists)}; accepted: {_IDS_ACCEPTED}.")
    for at, ids in enumerate(lists):
        if not isinstance(ids, list) or not ids or any(type(id) is not int for id in ids):
            raise invalid("input", f"input[{at}] is {ids!r:.60}; accepted: {_IDS_ACCEPTED}.")
        if len(ids) > MAX_LENGTH:
            message = f"input[{at}] has {len(ids)} tokens; accepted: at most {MAX_LENGTH}."
            raise invalid("input", message, "context_length_exceeded")
    return lists


def _texts_of(embedder: Embedder, lists: Ids, token_ids: EmbeddingTokenIds) -> list[str]:
    """Returns the texts of lists of token ids.

    Raises:
        ApiError: 400: ids are not accepted here, or the embedder's tokenizer has none or makes no text of them.
    """
    texts_instead = "or texts, which LangChain sends with check_embedding_ctx_length=False"
    if token_ids == "refuse":
        raise invalid(
            "input", "input has token ids, and those of another model's tokenizer, which OpenAI's clients send, would "
            f"give wrong vectors; accepted: {_ACCEPTED}. LangChain sends texts with check_embedding_ctx_length=False; "
            f"with the setting embedding_token_ids = \"own\" ids of the tokenizer of {embedder.name!r} are accepted.",
        )  # fmt: skip
    texts: list[str] = []
    for at, ids in enumerate(lists):
        if (bad := next((id for id in ids if not 0 <= id < embedder.vocabulary), None)) is not None:
            raise invalid(
                "input", f"input[{at}] has the token id {bad}, which is not of the tokenizer of {embedder.name!r}; "
                f"accepted: its ids, from 0 to {embedder.vocabulary - 1}, {texts_instead}.",
            )  # fmt: skip
        if (text := embedder.text_of(ids)) is None:
            raise invalid(
                "input", f"input[{at}] has token ids that the tokenizer of {embedder.name!r} makes of no text, so they "
                f"are another's; accepted: ids that it makes, {texts_instead}.",
            )  # fmt: skip
        texts.append(text)
    return texts


def _check_model(name: str, embedder: Embedder) -> None:
    allowed = may_ask(embedder.name)
    if name not in (embedder.name, DEFAULT_NAME) or not allowed:
        accepted = f"{embedder.name!r} or 'default'" if allowed else "none"
        message = f"The model {name!r:.200} embeds nothing here; accepted: {accepted}."
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
