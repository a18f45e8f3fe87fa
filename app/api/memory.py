"""Routes of memory: the notes that are kept about a user, to be read, changed, taken back and erased by that user.

They work also while memory is off, except that none is added then.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from app.api.chats import attached_json
from app.current_user import AppState, User
from app.db.memory_store import MAX_NOTE, MAX_NOTES, MemoryFull, MemoryOff, NoteTaken, Origin
from app.db.sqlite import NotThere
from app.errors import ApiError, invalid
from app.query_params import ONLY_KNOWN, whole_number
from app.request_body import JsonBody
from app.runs.stated_facts import attribute_of
from app.state import State

router = APIRouter(prefix="/api", tags=["Memory"], dependencies=[ONLY_KNOWN])

_TEXT = f"a text of 1 to {MAX_NOTE} characters"


class NoteRequest(BaseModel):
    """The body of `POST /api/memory`, `PATCH /api/memory/{number}` and `POST /api/memory/{number}/undo`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    text: str = Field(min_length=1, max_length=MAX_NOTE, description=_TEXT)

    def line(self) -> str:
        """Returns the text as one line.

        Raises:
            ApiError: it is white space.
        """
        text = " ".join(self.text.replace("\0", "").split())
        if not text:
            raise invalid("text", f"text is white space alone; accepted: {_TEXT}.")
        return text


NoteBody = Annotated[NoteRequest, Depends(JsonBody(NoteRequest))]


class MemoryRequest(BaseModel):
    """The body of `PATCH /api/memory`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    enabled: bool = Field(description="true or false: whether notes about you are kept and given to the model")


MemoryBody = Annotated[MemoryRequest, Depends(JsonBody(MemoryRequest))]


async def _all(state: State, user: str) -> dict[str, Any]:
    memory = state.store.memory
    return {
        "available": memory.available, "enabled": await memory.enabled(user), "notes": await memory.of(user),
        "limits": {"notes": MAX_NOTES, "characters": MAX_NOTE},
    }  # fmt: skip


@router.get("/memory")
async def memory(user: User, state: AppState) -> dict[str, Any]:
    return await _all(state, user)


@router.get("/memory/export")
async def export_memory(user: User, state: AppState) -> Any:  # a file
    return await attached_json({"notes": await state.store.memory.of(user)}, "ponder-memory")


@router.patch("/memory")
async def enable_memory(user: User, state: AppState, wanted: MemoryBody) -> dict[str, Any]:
    await state.store.memory.enable(user, wanted.enabled)
    return await _all(state, user)


@router.post("/memory", status_code=201)
async def add_note(user: User, state: AppState, wanted: NoteBody) -> dict[str, Any]:
    text = wanted.line()
    try:
        kept = await state.store.memory.keep(user, text, attribute_of(text), Origin("user"))
    except MemoryOff as error:
        raise ApiError(409, str(error), code="memory_off") from None
    except MemoryFull as error:
        raise ApiError(409, str(error), code="memory_full") from None
    return await state.store.memory.get(user, kept.number)


@router.delete("/memory")
async def erase_memory(user: User, state: AppState) -> dict[str, int]:
    return {"erased": await state.store.memory.erase_all(user)}


@router.get("/memory/{number}")
async def note(user: User, state: AppState, number: str) -> dict[str, Any]:
    return await state.store.memory.get(user, _number(number))


@router.patch("/memory/{number}")
async def change_note(user: User, state: AppState, number: str, wanted: NoteBody) -> dict[str, Any]:
    text = wanted.line()
    try:
        return await state.store.memory.change(user, _number(number), text, attribute_of(text))
    except NoteTaken as error:
        raise ApiError(409, str(error), param="text", code="note_taken") from None


@router.post("/memory/{number}/undo")
async def undo_note(user: User, state: AppState, number: str, wanted: NoteBody) -> dict[str, Any]:
    try:
        return {"note": await state.store.memory.undo(user, _number(number), wanted.line())}
    except NoteTaken as error:
        raise ApiError(409, str(error), param="text", code="note_changed") from None


@router.delete("/memory/{number}", status_code=204)
async def erase_note(user: User, state: AppState, number: str) -> None:
    await state.store.memory.erase(user, _number(number))


def _number(text: str) -> int:
    """
    Raises:
        NotThere: it is no number.
    """
    number = whole_number(text)
    if number is None or number >= 2**31:
        raise NotThere("note", text)
    return number
