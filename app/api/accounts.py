"""The operator's routes of users and their keys. A key is told once, when it is made; later only how it begins."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from app.api.query import parameters, texts
from app.body import json_object
from app.data.accounts import MAX_EXPIRES_S, USER_ID, Account, Accounts, Role
from app.data.errors import NameTaken, NotThere
from app.errors import ApiError, invalid
from app.openai.fields import parse
from app.state import State
from app.users import Operator

router = APIRouter(prefix="/api/operator", tags=["Operator"])

_NAME = "a line of 1 to 100 characters"
_ROLE = '"operator" or "user"'


class UserRequest(BaseModel):
    """The body of `POST /api/operator/users`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: str = Field(pattern=f"^{USER_ID}$", description="1 to 64 small letters, digits, '.', '_' and '-'")
    name: str | None = Field(None, min_length=1, max_length=100, description=_NAME)
    role: Role = Field("user", description=_ROLE)


class UserChange(BaseModel):
    """The body of `PATCH /api/operator/users/{id}`: what is absent stays as it is."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str | None = Field(None, min_length=1, max_length=100, description=_NAME)
    role: Role | None = Field(None, description=_ROLE)


class KeyRequest(BaseModel):
    """The body of `POST /api/operator/keys`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    user: str = Field(min_length=1, description="the id of a user")
    name: str = Field("", max_length=100, description="a line of at most 100 characters: what it is for")
    expires_s: float | None = Field(
        None, gt=0, le=MAX_EXPIRES_S, description=f"seconds that it is valid, above 0 and up to {MAX_EXPIRES_S}"
    )


@router.get("/users")
async def users(request: Request, who: Operator) -> dict[str, Any]:
    parameters(request)
    return {"users": [_shown(each) for each in await State.of(request).auth.do(Accounts.users)]}


@router.post("/users")
async def create_user(request: Request, who: Operator) -> Response:
    parameters(request)
    wanted = parse(await json_object(request), UserRequest, no_effect=frozenset())
    name = _line("name", wanted.name or wanted.id)
    try:
        made = await State.of(request).auth.do(lambda accounts: accounts.create_user(wanted.id, name, wanted.role))
    except NameTaken as taken:
        raise ApiError(409, str(taken), param="id", code="id_taken") from None
    return JSONResponse(_shown(made), 201)


@router.patch("/users/{user_id}")
async def change_user(request: Request, who: Operator, user_id: str) -> dict[str, Any]:
    parameters(request)
    wanted = parse(await json_object(request), UserChange, no_effect=frozenset())
    if wanted.name is None and wanted.role is None:
        accepted = ", ".join(UserChange.model_fields)
        raise invalid(None, f"The body changes nothing; accepted: some of {accepted}.", "missing_required_parameter")
    if wanted.role == "user" and user_id == who.id:
        message = "You cannot take the operator's role from yourself; another operator can."
        raise ApiError(409, message, param="role", code="own_role")
    name = None if wanted.name is None else _line("name", wanted.name)
    auth = State.of(request).auth
    return _shown(await auth.do(lambda accounts: accounts.change_user(user_id, name=name, role=wanted.role)))


@router.get("/keys")
async def keys(request: Request, who: Operator) -> dict[str, Any]:
    user = texts(request, "user").get("user")
    found = await State.of(request).auth.do(lambda accounts: accounts.keys_of(user))
    return {"keys": [{**each.told(), "current": each.id == who.key_id} for each in found]}


@router.post("/keys")
async def create_key(request: Request, who: Operator) -> Response:
    parameters(request)
    wanted = parse(await json_object(request), KeyRequest, no_effect=frozenset())
    name = _line("name", wanted.name, empty=True)
    auth = State.of(request).auth
    try:
        key, text = await auth.do(lambda accounts: accounts.create_key(wanted.user, name, wanted.expires_s))
    except NotThere as error:
        raise invalid("user", f"{error} accepted: the id of a user.", "user_not_found") from None
    return JSONResponse({"key": text, **key.told(), "current": False}, 201, headers={"Cache-Control": "no-store"})


@router.delete("/keys/{key_id}")
async def revoke_key(request: Request, who: Operator, key_id: str) -> dict[str, Any]:
    """It stays in the list, as revoked."""
    parameters(request)
    revoked = await State.of(request).auth.do(lambda accounts: accounts.revoke(key_id))
    return {**revoked.told(), "current": revoked.id == who.key_id}


def _shown(account: Account) -> dict[str, Any]:
    return {"id": account.id, "name": account.name, "role": account.role, "created_at": account.created_at}


def _line(field: str, text: str, *, empty: bool = False) -> str:
    if not text.isprintable() or not (empty or text.strip()):
        raise invalid(field, f"{field} is {text!r:.60}; accepted: {_NAME}, without line breaks or control characters.")
    return text.strip()
