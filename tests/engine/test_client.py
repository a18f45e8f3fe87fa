"""Replies of an engine on their way to their awaiters."""

from __future__ import annotations

import asyncio

import pytest

from engine.core import messages as m
from engine.errors import EngineStopped
from engine.ipc.link import PendingRequest


async def test_what_came_before_an_engine_failed_is_given_and_then_the_failure() -> None:
    request, reply = PendingRequest(1), m.Closed(1, "its end")
    waiting = asyncio.create_task(request.replies())
    await asyncio.sleep(0)
    request.deliver(reply)
    request.fail(EngineStopped("It failed."))  # before the one who waits has run
    assert await waiting == [reply]
    for _ in range(2):
        with pytest.raises(EngineStopped, match="It failed"):
            await asyncio.wait_for(request.replies(), 5)
