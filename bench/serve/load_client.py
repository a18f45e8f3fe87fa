"""Sends conversations when they are due and notes when each piece of an answer came. Judges nothing.

Open loop: requests that a slow server has not answered yet delay nobody. How late the client itself was is noted too,
as a client that is short of time measures itself.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.serve.asks import LoadRequest, LoadTurn


@dataclass(slots=True)
class TurnOutcome:
    """The outcome of one turn. Times are seconds since the start of the load."""

    kind: str
    turn: int
    due: float
    sent: float = 0.0
    pieces: list[float] = field(default_factory=list)  # when each part of the answer came
    ended: float = 0.0
    status: int = 0  # HTTP's; 0: no answer at all
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def answered(self) -> bool:
        return self.status == 200 and not self.error and bool(self.pieces)

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.due

    @property
    def itl(self) -> float:
        """Mean seconds between two tokens of the answer."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.completion_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A server to load: its address with `/v1`, the model to ask for, and a key if it wants one."""

    name: str
    url: str
    model: str
    key: str = ""


@dataclass(slots=True)
class Load:
    """One server's load and its answers. `late` are the client's own delays, `busy` its share of a core."""

    target: LoadTarget
    outcomes: list[TurnOutcome]
    seconds: float
    late: list[float]
    busy: float


async def load(
    target: LoadTarget,
    asks: Sequence[LoadRequest],
    *,
    timeout_s: float = 600.0,
    patience_s: float | None = None,
    extra: dict[str, Any] | None = None,  # Any: JSON, more fields of each request
    done: Callable[[], None] = lambda: None,
) -> Load:
    """Send every conversation at its time. A turn that takes longer than `timeout_s` counts as failed; `patience_s`
    after the last arrival the unfinished turns are given up.
    """
    outcomes: list[TurnOutcome] = []
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    timeout, pool = aiohttp.ClientTimeout(timeout_s), aiohttp.TCPConnector(limit=0)
    base = target.url.rstrip("/") + "/"
    async with aiohttp.ClientSession(base, headers=headers, timeout=timeout, connector=pool) as http:
        began, cpu = time.perf_counter(), time.process_time()

        def now() -> float:
            return time.perf_counter() - began

        async def converse(ask: LoadRequest) -> None:
            messages: list[dict[str, str]] = []
            for number, turn in enumerate(ask.turns):
                due = ask.at if number == 0 else now() + turn.after
                await asyncio.sleep(max(0.0, due - now()))
                outcome = TurnOutcome(ask.kind, number, due)
                outcomes.append(outcome)
                messages.append({"role": "user", "content": turn.words})
                words = await _ask(http, target.model, messages, turn, outcome, now, extra or {})
                done()
                if not outcome.answered:
                    return
                messages.append({"role": "assistant", "content": words})

        tasks = [asyncio.create_task(converse(ask)) for ask in asks]
        try:
            last = max((ask.at for ask in asks), default=0.0)
            await asyncio.wait(tasks, timeout=None if patience_s is None else last + patience_s) if tasks else None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        seconds = now()
        busy = (time.process_time() - cpu) / max(seconds, 1e-9)
    late = [outcome.sent - outcome.due for outcome in outcomes if outcome.sent]
    return Load(target, outcomes, seconds, late, busy)


async def _ask(
    http: aiohttp.ClientSession,
    model: str,
    messages: list[dict[str, str]],
    turn: LoadTurn,
    outcome: TurnOutcome,
    now: Callable[[], float],
    extra: dict[str, Any],
) -> str:
    body = {
        "model": model, "messages": messages, "max_tokens": turn.max_tokens, "stream": True,
        "stream_options": {"include_usage": True}, **extra,
    }  # fmt: skip
    words: list[str] = []
    outcome.sent = now()
    try:
        async with http.post("chat/completions", json=body) as reply:
            outcome.status = reply.status
            if reply.status != 200:
                outcome.error = (await reply.text(errors="replace"))[:300]
                return ""
            async for data in _events(reply):
                if "error" in data:
                    outcome.error = json.dumps(data["error"])[:300]
                    break
                if usage := data.get("usage"):
                    outcome.prompt_tokens = usage["prompt_tokens"]
                    outcome.completion_tokens = usage["completion_tokens"]
                    outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                for choice in data.get("choices", ()):
                    delta = choice.get("delta", {})
                    if delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
                        outcome.pieces.append(now())
                        words.append(delta.get("content") or "")
    except asyncio.CancelledError:
        outcome.error = "given up"
        raise
    except (aiohttp.ClientError, TimeoutError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:300]
    finally:
        outcome.ended = now()
    return "".join(words)


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:  # Any: JSON
    async for line in reply.content:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield json.loads(data)
