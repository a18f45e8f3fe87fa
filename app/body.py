"""A request's body, in pieces or as JSON, or a clear refusal: too large, not UTF-8, not JSON, not an object.

The limit is enforced twice, on what the client announces and on what it really sends. What passes is safe to walk, to
show and to encode: no half characters, no numbers that are none, no depth that ends the stack. Knows nothing of fields.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NoReturn

from fastapi import Request
from pydantic import ByteSize
from starlette.requests import ClientDisconnect

from app.errors import ApiError, invalid

MAX_BODY_BYTES = 10 * 1024 * 1024
MAX_DEPTH = 200  # objects and lists inside each other
_DRAIN_BYTES = 1 << 30  # read and dropped before a 413, so that a client still sending gets to read it
_DRAIN_S = 5.0
_LONG = 1 << 20  # characters; reading more than this would be felt by running streams


async def json_object(request: Request, most: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """The body, of at most `most` bytes, as a JSON object; an empty body is an empty object.

    Raises:
        ApiError: 413 or 400, saying why.
    """
    raw = b"".join([piece async for piece in pieces(request, most)])
    if not raw.strip():
        return {}
    try:
        text = raw.decode("utf-8")
        value = await asyncio.to_thread(json_value, text) if len(text) > _LONG else json_value(text)
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


async def pieces(request: Request, most: int) -> AsyncGenerator[bytes, None]:
    """The body as it comes, `most` bytes of it.

    Raises:
        ApiError: 413 when it is larger, by what is announced or by what comes.
    """
    announced = request.headers.get("content-length", "")
    size = 0
    too_large = announced.isdigit() and int(announced) > most
    if too_large and "expect" in request.headers:
        raise _too_large(announced, most)  # the client asks before sending: say no now
    stream = request.stream()
    try:
        while not too_large and (piece := await anext(stream, None)) is not None:
            size += len(piece)
            too_large = size > most
            if not too_large:
                yield piece
        if too_large:
            await _drain(stream)
    except ClientDisconnect:
        raise ApiError(499, "The client closed the connection.", code="client_closed") from None
    if too_large:
        raise _too_large(announced or f"more than {most}", most)


async def _drain(stream: AsyncIterator[bytes]) -> None:
    """Read on and drop it: whoever is told no while still sending may never read the answer."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            async for piece in stream:
                if (size := size + len(piece)) > _DRAIN_BYTES:
                    return


def _too_large(size: str, most: int) -> ApiError:
    limit = ByteSize(most).human_readable(separator=" ").replace(".0 ", " ")
    message = f"The body has {size} bytes; accepted: at most {most} ({limit})."
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
