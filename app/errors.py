"""Errors as the outside sees them: one JSON shape, OpenAI's, with a sentence a person can act on.

Our routes raise `ApiError`. Engine errors, unknown paths and bugs are turned into the same shape here, so a client
needs one way of reading errors, and a bug shows its caller nothing of our insides. Anthropic's and Ollama's APIs have
shapes of their own, whatever refuses the request on its way there.
"""

from __future__ import annotations

import logging
import math
import re
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from app.db.sqlite import STORAGE_ERRORS, KeyReused, NameTaken, NotThere, WrongPlace
from app.document_library import disk_trouble
from engine.errors import (
    ChatTemplateError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineError,
    EngineRestarting,
    EngineStopped,
    InvalidParameter,
    QueueFull,
    SequenceClosed,
)
from engine.structured_output.matcher import ConstraintFailed, ConstraintRefused
from retrieval import BadFilter, BadQuery, NotAllowed, NotFound, OverQuota, SourceTaken
from retrieval.document_database import StoreError

log = logging.getLogger("ponder")


class ApiError(Exception):
    """An answer other than the one asked for. `param` names the field at fault, `code` is stable and for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.headers = dict(headers or {})

    def reworded(self, reword: Callable[[str], str]) -> ApiError:
        """Returns the error with its field and its message put through `reword`: one API's request is often made into
        another's, whose refusal names its own fields."""
        param = None if self.param is None else reword(self.param)
        return ApiError(
            self.status, reword(self.message), param=param, code=self.code, kind=self.kind, headers=self.headers
        )

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str | None) -> dict[str, Any]:
        """The body in the shape of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        if self.code in _OVERLOADED:
            kind = "overloaded_error"
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.param == "thread":  # by these details a client knows that it has to send the whole conversation
            error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {"type": "error", "error": error, "request_id": request_id}

    def ollama_body(self) -> dict[str, Any]:
        """The body in the shape of Ollama's API."""
        return {"error": self.message}

    def response(self) -> JSONResponse:
        return ErrorResponse(self)


REQUEST_ID = "ponder.request_id"  # of a request's scope
_ANTHROPIC_PATHS = re.compile(r"/v1/messages(/|$)")
OLLAMA_PATHS = "/api/(chat|generate|embed|embeddings|version|tags|ps|show)"
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 422: "api_error", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_OVERLOADED = frozenset({"queue_full", "overloaded"})


class ErrorResponse(JSONResponse):
    """An error as a response, in the shape of the API that its request was for."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.body(), error.status, headers=error.headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_anthropic(scope["path"]):
            error = self._error
            await JSONResponse(error.anthropic_body(scope.get(REQUEST_ID)), error.status, error.headers)(
                scope, receive, send
            )
        elif is_ollama(scope["path"]):
            await JSONResponse(self._error.ollama_body(), self._error.status, self._error.headers)(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def is_anthropic(path: str) -> bool:
    """Returns whether a request to `path` is for Anthropic's API."""
    return _ANTHROPIC_PATHS.match(path) is not None


def is_ollama(path: str) -> bool:
    """Returns whether a request to `path` is for Ollama's API."""
    return re.fullmatch(f"{OLLAMA_PATHS}/?", path) is not None


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that blames one field."""
    return ApiError(400, message, param=param, code=code)


def from_exception(error: BaseException, *, param: str | None = None) -> ApiError:
    """Any exception as an `ApiError`. One that nobody foresaw is logged with its trace and shown without it."""
    match error:
        case ApiError():
            return error
        case InvalidParameter():
            return invalid(error.name, str(error))
        case ContextLengthExceeded():
            return invalid(param, str(error), error.code)
        case ConstraintRefused() | ConstraintFailed():
            return invalid(param, str(error), error.code)
        case ChatTemplateError():
            return invalid("messages", str(error), error.code)
        case QueueFull():
            retry = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return ApiError(429, str(error), code=error.code, kind="rate_limit_error", headers=retry)
        case BadQuery():
            return invalid(param, str(error), "invalid_query")
        case BadFilter():
            return invalid("filters", str(error))
        case NotThere():
            return ApiError(404, str(error), code=f"{error.what}_not_found")
        case WrongPlace():
            return invalid(error.field, str(error))
        case NameTaken():
            return ApiError(409, str(error), param="name", code="name_taken")
        case KeyReused():
            return ApiError(409, str(error), param="Idempotency-Key", code="idempotency_key_reused")
        case SourceTaken():
            return ApiError(409, str(error), param="source", code="name_taken")
        case NotFound():
            return ApiError(404, str(error), code="not_found")
        case OverQuota():
            return ApiError(413, str(error), param="file", code="storage_quota_exceeded")
        case NotAllowed():
            return ApiError(403, str(error), code="not_allowed", kind="permission_error")
        case StoreError() if error.is_away:
            log.error("the PostgreSQL database does not answer: %s", error)
            message = "The server's database does not answer. Try again shortly."
            return ApiError(
                503, message, code="database_unreachable", kind="server_error", headers={"Retry-After": "5"}
            )
        case OSError() | sqlite3.Error() | StoreError() if reason := disk_trouble(error):
            log.error("the disk cannot be written to: %s", error)
            return ApiError(507, reason, code="disk_unusable", kind="server_error")
        case EngineRestarting():
            retry = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return ApiError(503, str(error), code=error.code, kind="server_error", headers=retry)
        case DeadlineExceeded():
            message = "The answer was not begun before the request's deadline."
            return ApiError(408, message, code=error.code, kind="server_error")
        case EngineStopped() | SequenceClosed():
            return stopping()
        case EngineError():
            log.error("engine error", exc_info=error)
            return ApiError(500, str(error), code=error.code, kind="server_error")
        case _:
            log.error("unforeseen error", exc_info=error)
            message = "Something went wrong inside Ponder; the server's log has the details."
            return ApiError(500, message, code="internal_error", kind="server_error")


def stopping() -> ApiError:
    message = "The engine is not running: the server is stopping, or its engine failed. Try again shortly."
    return ApiError(503, message, code="engine_stopped", kind="server_error", headers={"Retry-After": "5"})


def note(scope: Scope, error: ApiError) -> ApiError:
    """Report an error sent to a client to the app of `scope`, if it has one."""
    app: Any = scope.get("app")  # Starlette keeps state untyped
    if (hear := getattr(getattr(app, "state", None), "on_error", None)) is not None:
        hear(error)
    return error


def install(
    app: FastAPI,
    hear: Callable[[ApiError], None] = lambda error: None,
    methods_at: Callable[[FastAPI, str], list[str]] = lambda app, path: [],
) -> None:
    """Make every error response of `app` take the one shape. `hear` gets each error; `methods_at` returns the methods
    of an address."""
    app.state.on_error = hear

    @app.exception_handler(ApiError)
    async def _api_error(request: Request, error: ApiError) -> JSONResponse:
        return note(request.scope, error).response()

    async def _known(request: Request, error: Exception) -> JSONResponse:
        return note(request.scope, from_exception(error)).response()

    ours = (NotThere, WrongPlace, NameTaken, KeyReused)
    for kind in (*ours, EngineError, NotFound, NotAllowed, OverQuota, SourceTaken, OSError, *STORAGE_ERRORS):
        app.add_exception_handler(kind, _known)

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
        messages = {
            404: f"There is nothing at {request.url.path}.",
            405: f"{request.method} is not accepted at {request.url.path}.",
        }
        message = messages.get(error.status_code, str(error.detail))
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        headers = dict(error.headers or {})
        if error.status_code == 405 and (methods := methods_at(app, request.url.path)):
            headers["Allow"] = ", ".join(methods)  # Starlette lists those of one of its routes
        return note(request.scope, ApiError(error.status_code, message, code=code, headers=headers)).response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])
        return note(request.scope, invalid(param, f"{param}: {first['msg']}.")).response()

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, error: Exception) -> JSONResponse:
        return note(request.scope, from_exception(error)).response()
