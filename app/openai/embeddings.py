"""`POST /v1/embeddings`: texts in, vectors of length 1 out, made by the same model that documents are indexed with.

Texts go through it in batches, each in a thread, so a client that leaves is not worked for beyond the batch at hand.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.admission.ticket import charge
from app.errors import ApiError, invalid
from app.openai.fields import checked
from app.served import DEFAULT_NAME
from retrieval.embedding import Embedder, Vectors

MOST_TEXTS = 2048
LONGEST = 8192  # word pieces of a text
MOST_CHARACTERS = 32 * LONGEST  # of it, white space included; longer ones are not even cut into pieces
BATCH = 32
NO_EFFECT = frozenset({"user"})

_ACCEPTED = f"a non-empty string, or a list of 1 to {MOST_TEXTS} of them"


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
        if not isinstance(texts, list) or not 1 <= len(texts) <= MOST_TEXTS:
            had = f"a list of {len(texts)}" if isinstance(texts, list) else f"{value!r:.60}"
            raise invalid("input", f"input is {had}; accepted: {_ACCEPTED}.")
        for at, text in enumerate(texts):
            if isinstance(text, int | list):
                raise invalid("input", f"input has token ids, which are those of another model; accepted: {_ACCEPTED}.")
            if not isinstance(text, str) or not text:
                raise invalid("input", f"input[{at}] is {text!r:.60}; accepted: a non-empty string.")
            if len(text) > MOST_CHARACTERS:
                message = f"input[{at}] has {len(text)} characters; accepted: at most {MOST_CHARACTERS}."
                raise invalid("input", message, "context_length_exceeded")
        return texts


async def embeddings(body: Mapping[str, Any], embedder: Embedder) -> dict[str, Any]:
    """The reply in OpenAI's shape.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    request = await checked(body, EmbeddingRequest, no_effect=NO_EFFECT)
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
        if count > LONGEST:
            message = f"input[{at}] has {count} tokens; accepted: at most {LONGEST}."
            raise invalid("input", message, "context_length_exceeded")
    return sum(counts)


def _encoded(vectors: Vectors, request: EmbeddingRequest) -> list[Any]:
    if request.dimensions is not None:
        vectors = vectors[:, : request.dimensions]
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    if request.encoding_format == "base64":
        return [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    return list(vectors.tolist())
