"""A request's body as JSON, or a clear refusal: too large, not UTF-8, not JSON, not an object.

The limit is enforced twice, on what the client announces and on what it really sends. What passes is safe to walk, to
show and to encode: no half characters, no numbers that are none, no depth that ends the stack. Knows nothing of fields.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, NoReturn

from fastapi import Request
from starlette.requests import ClientDisconnect

from app.errors import ApiError, invalid

MAX_BODY_BYTES = 10 * 1024 * 1024
MAX_DEPTH = 200  # objects and lists inside each other
_DRAIN_BYTES = 64 * 1024 * 1024  # read and dropped before a 413, so that a client still sending gets to read it
_DRAIN_S = 5.0


async def json_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object; an empty body is an empty object.

    Raises:
        ApiError: 413 or 400, saying why.
    """
    raw = await _read(request)
    if not raw.strip():
        return {}
    try:
        value = json_value(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise invalid(None, f"The body is not valid UTF-8 (byte {error.start}).", "invalid_json") from None
    except ValueError as error:
        raise invalid(None, f"The body is not valid JSON: {error}.", "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(None, f"The body is a JSON {type(value).__name__}; accepted: a JSON object.", "invalid_json")
    return value


def json_value(text: str) -> Any:
    """A client's JSON text as a value.

    Raises:
        ValueError: it is not JSON, or not as this module's docstring promises; the message says what is wrong.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:  # an escaped half is valid JSON but no character: it has no UTF-8 form
        raise ValueError("it has half of a surrogate pair (\\ud800 to \\udfff)") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _too_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


_TOO_DEEP = f"it is nested too deeply; accepted: at most {MAX_DEPTH} levels"


def _too_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            part
            for whole in level
            for part in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(part, dict | list)
        ]
        if not level:
            return False
    return True


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text:.40} is too large a number")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


async def _read(request: Request) -> bytes:
    announced = request.headers.get("content-length", "")
    too_large = announced.isdigit() and int(announced) > MAX_BODY_BYTES
    if too_large and "expect" in request.headers:
        raise _too_large(announced)  # the client asks before sending: say no now
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_DRAIN_S if too_large else None) as drain:
            async for chunk in request.stream():
                size += len(chunk)
                if size > MAX_BODY_BYTES and not too_large:
                    too_large = True
                    drain.reschedule(asyncio.get_running_loop().time() + _DRAIN_S)
                if too_large:
                    chunks.clear()
                    if size > _DRAIN_BYTES:
                        break
                else:
                    chunks.append(chunk)
    except TimeoutError:
        pass
    except ClientDisconnect:
        raise ApiError(499, "The client closed the connection.", code="client_closed") from None
    if too_large:
        raise _too_large(announced or f"more than {MAX_BODY_BYTES}")
    return b"".join(chunks)


def _too_large(size: str) -> ApiError:
    message = f"The body has {size} bytes; accepted: at most {MAX_BODY_BYTES} (10 MiB)."
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
