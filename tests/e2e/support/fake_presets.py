"""The fake server's presets and prompts: kept as they come, without any check."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

Kept = dict[str, dict[str, Any]]  # by id. Any: JSON


@dataclass
class Shelf:
    """All presets and prompts; `refusal` is of the next that is made or changed."""

    presets: Kept = field(default_factory=dict)
    prompts: Kept = field(default_factory=dict)
    refusal: dict[str, str | None] | None = None
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def add(self, kind: Literal["presets", "prompts"], **fields: Any) -> str:
        id = f"{kind}{next(self.numbers)}"
        usual: dict[str, Any] = {}
        if kind == "presets":
            usual = {"icon": None, "description": "", "settings": {}, "owner": "local", "role": "owner"}
            usual |= {"everybody": False, "members": []}
        getattr(self, kind)[id] = {**usual, **fields, "id": id}
        return id


def presets_of(shelf: Shelf) -> APIRouter:
    router = APIRouter(prefix="/api")

    def refused() -> Response | None:
        refusal, shelf.refusal = shelf.refusal, None
        return None if refusal is None else JSONResponse({"error": refusal}, status_code=400)

    @router.get("/presets/export")
    async def export() -> dict[str, Any]:
        kept = {"presets": list(shelf.presets.values()), "prompts": list(shelf.prompts.values())}
        return {"format": "ponder.presets", "version": 1, **kept}

    @router.post("/presets/import", status_code=201)
    async def take_in(request: Request) -> dict[str, Any]:
        given = await request.json()
        return {
            "preset_ids": [shelf.add("presets", **each) for each in given["presets"]],
            "prompt_ids": [shelf.add("prompts", **each) for each in given["prompts"]],
        }

    @router.put("/presets/{id}/members/{member}")
    async def share(id: str, member: str) -> dict[str, Any]:
        shelf.presets[id]["members"].append(member)
        return shelf.presets[id]

    @router.delete("/presets/{id}/members/{member}", status_code=204)
    async def unshare(id: str, member: str) -> None:
        shelf.presets[id]["members"].remove(member)

    @router.get("/{kind}")
    async def listed(kind: Literal["presets", "prompts"]) -> dict[str, Any]:
        return {kind: list(getattr(shelf, kind).values())}

    @router.post("/{kind}", status_code=201)
    async def create(kind: Literal["presets", "prompts"], request: Request) -> Any:
        return refused() or getattr(shelf, kind)[shelf.add(kind, **await request.json())]

    @router.patch("/{kind}/{id}")
    async def change(kind: Literal["presets", "prompts"], id: str, request: Request) -> Any:
        if (refusal := refused()) is not None:
            return refusal
        getattr(shelf, kind)[id] |= await request.json()
        return getattr(shelf, kind)[id]

    @router.delete("/{kind}/{id}", status_code=204)
    async def delete(kind: Literal["presets", "prompts"], id: str) -> None:
        del getattr(shelf, kind)[id]

    return router
