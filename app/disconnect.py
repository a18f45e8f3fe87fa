"""Work that ends when the client that asked for it goes away.

`/v1` promises that nobody pays for an answer nobody reads: a closed connection cancels the work, which closes its
sequences. Knows nothing of what the work is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from app.errors import ApiError

T = TypeVar("T")


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first.

    Raises:
        ApiError: the client left (it will not read this, but the log may).
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "The client closed the connection.", code="client_closed")
    finally:
        await finish(task, gone)


async def finish(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait until its clean-up is done."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
