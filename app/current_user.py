"""Dependencies of routes: the user of a request, the operator, and the server's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Depends, Request

from app.auth import LOCAL, WHO, KeyScope, Principal, out_of_scope, unauthorised
from app.errors import ApiError
from app.state import Serving, State


async def who_of(request: Request) -> Principal:
    """
    Raises:
        ApiError: 401, of a server that asks for keys, where nobody has been found by one.
    """
    found: Principal | None = request.scope.get(WHO)
    if found is None and Serving.of(request).settings.auth != "off":
        raise unauthorised("This needs an API key, or a session.")
    return found or LOCAL


def check_scope(who: Principal, scope: KeyScope) -> None:
    """Requires a scope of the key, besides the route's own.

    Raises:
        ApiError: 403.
    """
    if not who.may(scope):
        raise out_of_scope(who, scope)


def check_reasoning_scopes(
    checker: Mapping[str, Any] | None, options: Mapping[str, Any] | None, who: Principal
) -> None:
    """Requires the scope of tools where a request's checker runs one, and that of documents where its strategy's
    options name collections. Any: JSON.

    Raises:
        ApiError: 403.
    """
    if checker is not None and checker.get("type") in ("python", "tool"):
        check_scope(who, "tools")
    if options is not None and options.get("collections") is not None:
        check_scope(who, "documents")


async def user_of(who: Annotated[Principal, Depends(who_of)]) -> str:
    """The id of the user that a request comes from."""
    return who.id


async def operator_of(who: Annotated[Principal, Depends(who_of)]) -> Principal:
    """
    Raises:
        ApiError: 403, the user is no operator.
    """
    if who.role != "operator":
        message = f"This is for operators, and {who.id!r} is a user; an operator can change that."
        raise ApiError(403, message, code="operator_required", kind="permission_error")
    return who


async def state_of(request: Request) -> State:
    """The state of the server's primary process."""
    return State.of(request)


async def serving_of(request: Request) -> Serving:
    """The state of whichever process answers."""
    return Serving.of(request)


Asker = Annotated[Principal, Depends(who_of)]  # a route's parameter
User = Annotated[str, Depends(user_of)]
Operator = Annotated[Principal, Depends(operator_of)]
AppState = Annotated[State, Depends(state_of)]
AppServing = Annotated[Serving, Depends(serving_of)]
