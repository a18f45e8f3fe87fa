"""Routes of accounts, keys and sign-in.

The routes of users and keys are for operators. A key is shown in full only once, when it is made; later only its
beginning. Signing in takes a key and sets a cookie that no script can read. The route of the current user is open to
everybody, because the page calls it before it shows anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers

from app.auth import COOKIE, LOCAL, SCOPES, SESSION_PATH, KeyScope, Principal, address_of, session_token
from app.current_user import AppState, Operator
from app.db.account_store import Accounts
from app.db.accounts import MAX_EXPIRES_S, SESSION_S, USER_ID, Account, ApiKey, Role
from app.db.quotas import MAX_DEADLINE_S, MAX_PRIORITY, QUOTAS, USER_QUOTAS, Quota, Used
from app.db.sqlite import NameTaken, NotThere
from app.errors import ApiError, invalid
from app.query_params import ONLY_KNOWN, QueryParams
from app.request_body import JsonBody
from app.state import State

router = APIRouter(prefix="/api/operator", tags=["Operator"], dependencies=[ONLY_KNOWN])

_NAME = "a line of 1 to 100 characters"
_ROLE = '"operator" or "user"'
_MAX_COUNT = 10**15
_SCOPES = f"a list of scopes ({', '.join(SCOPES)}), or null for all"
_PRIORITIES = f"-{MAX_PRIORITY} to {MAX_PRIORITY}"
_RANGES = f"each 1 or more, but priority from {_PRIORITIES} and deadline_s up to {MAX_DEADLINE_S}, or null"
_QUOTA = f"an object of {', '.join(QUOTAS)}, {_RANGES}"
_MODELS = "a list of 1 to 1,000 names of models and adapters, or null for all"
_USER_QUOTA = f"an object of {', '.join(USER_QUOTAS)}, {_RANGES}"


ModelName = Annotated[str, Field(min_length=1, max_length=200)]


class UserRequest(BaseModel):
    """The body of `POST /api/operator/users`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: str = Field(pattern=f"^{USER_ID}$", description="1 to 64 small letters, digits, '.', '_' and '-'")
    name: str | None = Field(None, min_length=1, max_length=100, description=_NAME)
    role: Role = Field("user", description=_ROLE)


UserBody = Annotated[UserRequest, Depends(JsonBody(UserRequest))]


class UserQuotaFields(BaseModel):
    """Quota of all keys of a user that say nothing themselves; null: the server's."""

    model_config = ConfigDict(strict=True, extra="forbid")

    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    deadline_s: int | None = Field(None, ge=1, le=MAX_DEADLINE_S)
    max_output_tokens: int | None = Field(None, ge=1, le=_MAX_COUNT)

    def quota(self) -> Quota:
        return Quota(**self.model_dump())


class UserChange(BaseModel):
    """The body of `PATCH /api/operator/users/{id}`: what is absent stays as it is."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str | None = Field(None, min_length=1, max_length=100, description=_NAME)
    role: Role | None = Field(None, description=_ROLE)
    disabled: bool | None = Field(None, description="true: none of the user's keys is valid any more; false: they are")
    quota: UserQuotaFields | None = Field(None, description=_USER_QUOTA)
    models: list[ModelName] | None = Field(None, min_length=1, max_length=1000, description=_MODELS)


UserChangeBody = Annotated[UserChange, Depends(JsonBody(UserChange, nulls=True))]


class QuotaFields(UserQuotaFields):
    """Limits on what a key may cost; null: the server's limit for a minute and at once, none for a day and a month."""

    requests_per_minute: int | None = Field(None, ge=1, le=_MAX_COUNT)
    tokens_per_minute: int | None = Field(None, ge=1, le=_MAX_COUNT)
    concurrent_requests: int | None = Field(None, ge=1, le=_MAX_COUNT)
    requests_per_day: int | None = Field(None, ge=1, le=_MAX_COUNT)
    tokens_per_day: int | None = Field(None, ge=1, le=_MAX_COUNT)
    tokens_per_month: int | None = Field(None, ge=1, le=_MAX_COUNT)


class KeyRequest(BaseModel):
    """The body of `POST /api/operator/keys`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    user: str = Field(min_length=1, description="the id of a user")
    name: str = Field("", max_length=100, description="a line of at most 100 characters: what it is for")
    expires_s: float | None = Field(
        None, gt=0, le=MAX_EXPIRES_S, description=f"seconds that it is valid, above 0 and up to {MAX_EXPIRES_S}"
    )
    scopes: list[KeyScope] | None = Field(None, min_length=1, description=_SCOPES)
    quota: QuotaFields | None = Field(None, description=_QUOTA)
    models: list[ModelName] | None = Field(None, min_length=1, max_length=1000, description=_MODELS)


KeyBody = Annotated[KeyRequest, Depends(JsonBody(KeyRequest))]


class KeyChange(BaseModel):
    """The body of `PATCH /api/operator/keys/{id}`: what is absent stays as it is."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str | None = Field(None, max_length=100, description="a line of at most 100 characters: what it is for")
    scopes: list[KeyScope] | None = Field(None, min_length=1, description=_SCOPES)
    quota: QuotaFields | None = Field(None, description=_QUOTA)
    models: list[ModelName] | None = Field(None, min_length=1, max_length=1000, description=_MODELS)


KeyChangeBody = Annotated[KeyChange, Depends(JsonBody(KeyChange, nulls=True))]


class KeysQuery(BaseModel):
    """The parameters of `GET /api/operator/keys`."""

    user: str | None = Field(None, description="the id of a user")


KeysParams = Annotated[KeysQuery, Depends(QueryParams(KeysQuery))]


@router.get("/users")
async def users(who: Operator, state: AppState) -> dict[str, Any]:
    used = await state.auth.do(Accounts.used_by_users)
    found = await state.auth.do(Accounts.users)
    return {"users": [{**_shown(each), "used": asdict(used.get(each.id, Used()))} for each in found]}


@router.post("/users", status_code=201)
async def create_user(who: Operator, state: AppState, wanted: UserBody) -> dict[str, Any]:
    name = _line("name", wanted.name or wanted.id)
    try:
        made = await state.auth.do(lambda accounts: accounts.create_user(wanted.id, name, wanted.role))
    except NameTaken as taken:
        raise ApiError(409, str(taken), param="id", code="id_taken") from None
    return _shown(made)


@router.patch("/users/{user_id}")
async def change_user(who: Operator, state: AppState, user_id: str, wanted: UserChangeBody) -> dict[str, Any]:
    nothing = (wanted.name, wanted.role, wanted.disabled, wanted.quota) == (None, None, None, None)
    if nothing and "models" not in wanted.model_fields_set:
        accepted = ", ".join(UserChange.model_fields)
        raise invalid(None, f"The body changes nothing; accepted: some of {accepted}.", "missing_required_parameter")
    if wanted.role == "user" and user_id == who.id:
        message = "You cannot take the operator's role from yourself; another operator can."
        raise ApiError(409, message, param="role", code="own_role")
    if wanted.disabled and user_id == who.id:
        message = "You cannot disable yourself; another operator can."
        raise ApiError(409, message, param="disabled", code="own_role")
    name = None if wanted.name is None else _line("name", wanted.name)

    def change(accounts: Accounts) -> Account:
        quota = None if wanted.quota is None else wanted.quota.quota()
        changed = accounts.change_user(user_id, name=name, role=wanted.role, disabled=wanted.disabled, quota=quota)
        if "models" not in wanted.model_fields_set:
            return changed
        return accounts.limit_user(user_id, _each_once(wanted.models))

    return _shown(await state.auth.do(change))


@router.delete("/users/{user_id}")
async def delete_user(who: Operator, state: AppState, user_id: str) -> dict[str, Any]:
    """Deletes a user with all data, for ever: chats, responses, documents, notes, permissions, sequences, keys, usage.

    It may be repeated where it was cut short: the user is disabled first. Documents that the user added to others'
    collections belong to those, and stay.
    """
    if user_id == who.id:
        raise ApiError(409, "You cannot delete yourself; another operator can.", param="id", code="own_role")
    await state.auth.do(lambda accounts: accounts.change_user(user_id, disabled=True))
    await state.runs.cancel_of(user_id)
    for leased in state.sequences.of(user_id):
        state.sequences.close(leased)
    chats, runs = await state.store.delete_user(user_id)
    documents = await asyncio.to_thread(state.library.delete_user, user_id)
    await asyncio.to_thread(state.tool_service.forget_user, user_id, runs)
    await state.auth.do(lambda accounts: accounts.delete_user(user_id))
    return {"id": user_id, "deleted": True, "chats": chats, "documents": documents}


@router.get("/keys")
async def keys(who: Operator, state: AppState, given: KeysParams) -> dict[str, Any]:
    def read(accounts: Accounts) -> list[dict[str, Any]]:
        return [_with_usage(accounts, each) for each in accounts.keys_of(given.user)]

    found = await state.auth.do(read)
    return {"keys": [{**each, "current": each["id"] == who.key_id} for each in found]}


@router.post("/keys", status_code=201)
async def create_key(response: Response, who: Operator, state: AppState, wanted: KeyBody) -> dict[str, Any]:
    name = _line("name", wanted.name, empty=True)
    auth = state.auth
    try:
        quota = Quota() if wanted.quota is None else wanted.quota.quota()
        key, text = await auth.do(
            lambda accounts: accounts.create_key(
                wanted.user, name, wanted.expires_s, _ordered(wanted.scopes), quota, _each_once(wanted.models)
            )
        )
    except NotThere as error:
        raise invalid("user", f"{error} accepted: the id of a user.", "user_not_found") from None
    response.headers["Cache-Control"] = "no-store"
    return {"key": text, **key.told(), "used": asdict(Used()), "current": False}


@router.patch("/keys/{key_id}")
async def change_key(who: Operator, state: AppState, key_id: str, wanted: KeyChangeBody) -> dict[str, Any]:
    """It holds from the next request on."""
    given = wanted.model_fields_set
    if not given:
        accepted = ", ".join(KeyChange.model_fields)
        raise invalid(None, f"The body changes nothing; accepted: some of {accepted}.", "missing_required_parameter")
    if key_id == who.key_id and wanted.scopes is not None and "operator" not in wanted.scopes:
        message = "You cannot take the scope 'operator' from the key that you use; another one can."
        raise ApiError(409, message, param="scopes", code="own_role")
    name = None if wanted.name is None else _line("name", wanted.name, empty=True)

    def change(accounts: Accounts) -> dict[str, Any]:
        key = accounts.key(key_id)
        changed = accounts.change_key(
            key_id,
            name=key.name if name is None else name,
            scopes=_ordered(wanted.scopes) if "scopes" in given else key.scopes,
            quota=key.quota if "quota" not in given else Quota() if wanted.quota is None else wanted.quota.quota(),
        )
        if "models" in given:
            changed = accounts.limit_key(key_id, _each_once(wanted.models))
        return _with_usage(accounts, changed)

    return {**await state.auth.do(change), "current": key_id == who.key_id}


@router.delete("/keys/{key_id}")
async def revoke_key(who: Operator, state: AppState, key_id: str) -> dict[str, Any]:
    """It stays in the list, as revoked."""
    revoked = await state.auth.do(lambda accounts: _with_usage(accounts, accounts.revoke(key_id)))
    return {**revoked, "current": key_id == who.key_id}


def _with_usage(accounts: Accounts, key: ApiKey) -> dict[str, Any]:
    return {**key.told(), "used": asdict(accounts.used(key.id))}


def _shown(account: Account) -> dict[str, Any]:
    return account.told()


def _ordered(scopes: Sequence[KeyScope] | None) -> list[KeyScope] | None:
    """Each once, in one order."""
    return None if scopes is None else [each for each in SCOPES if each in scopes]


def _each_once(models: Sequence[str] | None) -> list[str] | None:
    return None if models is None else list(dict.fromkeys(models))


def _line(field: str, text: str, *, empty: bool = False) -> str:
    if not text.isprintable() or not (empty or text.strip()):
        raise invalid(field, f"{field} is {text!r:.60}; accepted: {_NAME}, without line breaks or control characters.")
    return text.strip()


session_router = APIRouter(tags=["Session"], dependencies=[ONLY_KNOWN])


class SessionRequest(BaseModel):
    """The body of `POST /api/session`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    key: str = Field(min_length=1, max_length=200, description="an API key, as `ponder keys create` shows it")


SessionBody = Annotated[SessionRequest, Depends(JsonBody(SessionRequest))]


async def _asked(state: AppState) -> State:
    """
    Raises:
        ApiError: 409, nobody is asked who they are.
    """
    if state.settings.auth == "off":
        message = "There is nothing to sign in to: this server asks nobody for a key (the setting auth is off)."
        raise ApiError(409, message, code="auth_off")
    return state


Asked = Annotated[State, Depends(_asked)]


@session_router.get(SESSION_PATH)
async def session(request: Request, state: AppState) -> dict[str, Any]:
    if state.settings.auth == "off":
        return _session_shown("off", LOCAL)
    return _session_shown("keys", await state.auth.who(Headers(scope=request.scope), address_of(request.scope)))


@session_router.post(SESSION_PATH)
async def sign_in(request: Request, state: Asked, wanted: SessionBody) -> Response:
    who, token = await state.auth.sign_in(wanted.key.strip(), address_of(request.scope))
    response = JSONResponse(_session_shown("keys", who))
    response.set_cookie(
        COOKIE, token, max_age=int(SESSION_S), secure=request.url.scheme == "https", httponly=True, samesite="strict"
    )
    return response


@session_router.delete(SESSION_PATH, status_code=204)
async def sign_out(request: Request, response: Response, state: Asked) -> None:
    if (token := session_token(request.headers)) is not None:
        await state.auth.sign_out(token)
    response.delete_cookie(COOKIE, secure=request.url.scheme == "https", httponly=True, samesite="strict")


def _session_shown(auth: str, who: Principal | None) -> dict[str, Any]:
    user = None if who is None else {"id": who.id, "name": who.name, "role": who.role}
    return {"auth": auth, "user": user, "expires_at": None if who is None else who.session_ends_at}
