"""Routes of presets (what a new chat can begin with), of who else may use them, and of a person's prompts.

To someone with whom it is not shared a preset is not there. Knows nothing of how an answer is made.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, FailFast, Field, JsonValue

from app.api.chats import MAX_IMPORT_BYTES
from app.api.collections import MAX_USER_LENGTH
from app.api.runs import SETTINGS, ChatSettings, check_settings, settings_of_file
from app.current_user import AppState, Asker, User, operator_of
from app.db.preset_store import MAX_NAME, MAX_PRESETS, MAX_PROMPTS, TooManyKept
from app.errors import ApiError, invalid
from app.query_params import ONLY_KNOWN
from app.request_body import JsonBody

router = APIRouter(prefix="/api", tags=["Presets"], dependencies=[ONLY_KNOWN])

FORMAT, VERSION = "ponder.presets", 1
MAX_DESCRIPTION, MAX_ICON, MAX_PROMPT = 500, 16, 20_000  # characters

Name = Annotated[
    str, Field(max_length=MAX_NAME, pattern=r"^\S(.*\S)?$",
               description=f"a text of 1 to {MAX_NAME} characters on one line, without white space around it"),
]  # fmt: skip
Icon = Annotated[
    str | None, Field(min_length=1, max_length=MAX_ICON, pattern=r"^\S+$",
                      description=f"an emoji, or 1 to {MAX_ICON} characters without white space"),
]  # fmt: skip
Description = Annotated[
    str, Field(max_length=MAX_DESCRIPTION, description=f"a text of at most {MAX_DESCRIPTION} characters")
]
PromptName = Annotated[
    str, Field(max_length=MAX_NAME, pattern=r"^[^\s/]+$",
               description=f"a text of 1 to {MAX_NAME} characters without white space and slashes"),
]  # fmt: skip
PromptText = Annotated[
    str, Field(max_length=MAX_PROMPT, pattern=r"\S", description=f"a text of 1 to {MAX_PROMPT} characters")
]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class NewPreset(_Body):
    """The body of `POST /api/presets`."""

    name: Name
    icon: Icon = None
    description: Description = ""
    settings: ChatSettings = Field(default_factory=ChatSettings, description=SETTINGS)


class PresetChange(_Body):
    """The body of `PATCH /api/presets/{id}`: what is absent stays as it is."""

    name: Name | None = None
    icon: Icon = None
    description: Description | None = None
    settings: ChatSettings | None = Field(None, description=SETTINGS)
    everybody: bool | None = Field(None, description="true or false: whether all users of this server may use it")


class NewPrompt(_Body):
    """The body of `POST /api/prompts`."""

    name: PromptName
    text: PromptText


class PromptChange(_Body):
    """The body of `PATCH /api/prompts/{id}`: what is absent stays as it is."""

    name: PromptName | None = None
    text: PromptText | None = None


class _ExportedPreset(_Body):
    name: Name
    icon: Icon = None
    description: Description = ""
    settings: dict[str, JsonValue] = {}


class PresetExport(_Body):
    """The file of presets and prompts."""

    format: Literal["ponder.presets"] = Field(description='"ponder.presets"')
    version: Literal[1] = Field(description="1")
    presets: Annotated[list[_ExportedPreset], FailFast()] = Field(
        [],
        max_length=MAX_PRESETS,
        description=f"a list of at most {MAX_PRESETS} presets as GET /api/presets/export gives",
    )
    prompts: Annotated[list[NewPrompt], FailFast()] = Field(
        [],
        max_length=MAX_PROMPTS,
        description=f"a list of at most {MAX_PROMPTS} prompts as GET /api/presets/export gives",
    )


PresetBody = Annotated[NewPreset, Depends(JsonBody(NewPreset))]
PresetChangeBody = Annotated[PresetChange, Depends(JsonBody(PresetChange, nulls=True))]
PromptBody = Annotated[NewPrompt, Depends(JsonBody(NewPrompt))]
PromptChangeBody = Annotated[PromptChange, Depends(JsonBody(PromptChange))]
ImportBody = Annotated[PresetExport, Depends(JsonBody(PresetExport, most=MAX_IMPORT_BYTES))]


@router.get("/presets")
async def presets(user: User, state: AppState) -> dict[str, Any]:
    return {"presets": await state.store.presets.of(user)}


@router.post("/presets", status_code=201)
async def create_preset(user: User, state: AppState, wanted: PresetBody) -> dict[str, Any]:
    settings = await check_settings(state, user, wanted.settings)
    fields = {"name": wanted.name, "icon": wanted.icon, "description": wanted.description, "settings": settings}
    try:
        return await state.store.presets.create(user, fields)
    except TooManyKept as error:
        raise _too_many(error) from None


@router.get("/presets/export")
async def export(user: User, state: AppState) -> JSONResponse:
    headers = {"Content-Disposition": 'attachment; filename="ponder-presets.json"'}
    return JSONResponse(
        {"format": FORMAT, "version": VERSION, **await state.store.presets.export(user)}, headers=headers
    )


@router.post("/presets/import", status_code=201)
async def import_presets(user: User, state: AppState, wanted: ImportBody) -> dict[str, Any]:
    made = []
    for at, each in enumerate(wanted.presets):
        made.append(each.model_dump() | {"settings": await settings_of_file(each.settings, f"presets[{at}].settings")})
    try:
        ids = await state.store.presets.add(user, made, [each.model_dump() for each in wanted.prompts])
    except TooManyKept as error:
        raise _too_many(error) from None
    return {"preset_ids": ids[0], "prompt_ids": ids[1]}


@router.get("/presets/{preset_id}")
async def preset(user: User, state: AppState, preset_id: str) -> dict[str, Any]:
    return await state.store.presets.get(user, preset_id)


@router.patch("/presets/{preset_id}")
async def change_preset(
    user: User, who: Asker, state: AppState, preset_id: str, wanted: PresetChangeBody
) -> dict[str, Any]:
    changes = _changes(wanted, nullable="icon")
    await state.store.presets.get(user, preset_id)
    if wanted.everybody:
        await operator_of(who)
    if wanted.settings is not None:
        changes["settings"] = await check_settings(state, user, wanted.settings)
    return await state.store.presets.change(user, preset_id, changes)


@router.delete("/presets/{preset_id}", status_code=204)
async def delete_preset(user: User, state: AppState, preset_id: str) -> None:
    await state.store.presets.delete(user, preset_id)


@router.put("/presets/{preset_id}/members/{member}")
async def share_preset(user: User, state: AppState, preset_id: str, member: str) -> dict[str, Any]:
    if len(member) > MAX_USER_LENGTH or not member.strip() or not member.isprintable():
        raise invalid("user", f"The user is {member!r:.60}; accepted: a name of 1 to {MAX_USER_LENGTH} characters.")
    try:
        return await state.store.presets.share(user, preset_id, member)
    except TooManyKept as error:
        raise _too_many(error) from None


@router.delete("/presets/{preset_id}/members/{member}", status_code=204)
async def unshare_preset(user: User, state: AppState, preset_id: str, member: str) -> None:
    await state.store.presets.unshare(user, preset_id, member)


@router.get("/prompts")
async def prompts(user: User, state: AppState) -> dict[str, Any]:
    return {"prompts": await state.store.prompts.of(user)}


@router.post("/prompts", status_code=201)
async def create_prompt(user: User, state: AppState, wanted: PromptBody) -> dict[str, Any]:
    try:
        return await state.store.prompts.create(user, wanted.model_dump())
    except TooManyKept as error:
        raise _too_many(error) from None


@router.patch("/prompts/{prompt_id}")
async def change_prompt(user: User, state: AppState, prompt_id: str, wanted: PromptChangeBody) -> dict[str, Any]:
    return await state.store.prompts.change(user, prompt_id, _changes(wanted))


@router.delete("/prompts/{prompt_id}", status_code=204)
async def delete_prompt(user: User, state: AppState, prompt_id: str) -> None:
    await state.store.prompts.delete(user, prompt_id)


def _changes(wanted: BaseModel, nullable: str | None = None) -> dict[str, Any]:
    """The fields that are to change.

    Raises:
        ApiError: 400: there are none, or one is null that cannot be.
    """
    changes = wanted.model_dump(exclude_unset=True)
    if not changes:
        accepted = ", ".join(type(wanted).model_fields)
        raise invalid(None, f"The body changes nothing; accepted: some of {accepted}.", "missing_required_parameter")
    for name, value in changes.items():
        if value is None and name != nullable:
            raise invalid(name, f"{name} is null; accepted: a value, or no {name} to leave it as it is.")
    return changes


def _too_many(error: TooManyKept) -> ApiError:
    return ApiError(409, str(error), code=f"too_many_{error.what}")
