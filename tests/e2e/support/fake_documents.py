"""The fake server's documents: texts by number, which a test may change, and nothing of how they came there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

PASSAGE = (
    "Work on the valley began in 1928. 🌊 The dam was finished in 1931, two years late. "
    "Its wall is 96 metres high and 402 metres long."
)


@dataclass
class Shelved:
    title: str
    text: str


def usual() -> dict[int, Shelved]:
    """Returns what `told.dam` cites."""
    before = "It is a long story. " * 50
    return {1: Shelved("The dam in the valley.pdf", before + PASSAGE), 2: Shelved("Minutes", "Nothing.")}


def documents_of(documents: dict[int, Shelved]) -> APIRouter:
    router = APIRouter(prefix="/api/documents")

    def missing() -> JSONResponse:
        body = {"error": {"message": "There is no such document.", "type": "", "param": None, "code": "not_found"}}
        return JSONResponse(body, 404)

    @router.get("/{number}")
    async def document(number: int) -> Any:
        if number not in documents:
            return missing()
        found = documents[number]
        return {
            "id": number, "collection": 1, "source": found.title, "title": found.title, "media_type": "text/plain",
            "version": "1", "bytes": len(found.text.encode()), "characters": len(found.text), "chunks": 1, "pages": 0,
            "faults": [], "created_at": 1.0, "updated_at": 1.0, "metadata": {},
        }  # fmt: skip

    @router.get("/{number}/text")
    async def text(number: int, start: int, end: int) -> Any:
        if number not in documents:
            return missing()
        part = documents[number].text[start:end]
        return {"start": start, "end": start + len(part), "characters": len(documents[number].text), "text": part}

    return router
