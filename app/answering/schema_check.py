"""Checks a JSON text against a schema in a process of its own, bounded in time and memory."""

from __future__ import annotations

import json

from tools.workers.process_pool import ProcessPool, WorkerFailed

WAIT_S = 20.0  # for the process that validates, on a busy machine
_MEMORY_BYTES = 1 << 30  # of that process


async def wrong_with(schema: str, text: str) -> str | None:
    """Returns the reason why a JSON text is not valid against a schema (both as text), from a process of its own."""
    worker = ProcessPool("tools.workers.schema_check", timeout_s=WAIT_S, memory_bytes=_MEMORY_BYTES, requests=1)
    try:
        wrong: str | None = await worker.ask({"schema": json.loads(schema), "text": text, "explain": True})
        return wrong
    except WorkerFailed:
        return "checking it takes too long, or too much memory"
    except ValueError as error:
        return f"the schema cannot be checked: {error}"
