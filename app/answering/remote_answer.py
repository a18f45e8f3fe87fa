"""One answer of a remote model: its turns as deltas, with calls and forms checked on arrival, and usage settled.

Text is passed on as it comes, calls when their turn is over, and an answer that has a form when it is found valid. A
call is the model's wish alone: it has an id of ours, names a tool that was offered, and runs, if at all, by the same
executor as a served model's. Knows nothing of connections.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from app.admission.request_budget import scheduling, too_late
from app.answering.remote_model import RemotePlan, SentToRemote
from app.answering.sub_agents import ToolLoop
from app.remote.wire_formats import (
    CallPart,
    Finish,
    RemoteEnd,
    RemoteError,
    RemoteItem,
    RemotePrompt,
    RemoteUsage,
    estimated,
)
from app.request_body import json_value
from reasoning.agent import LIMIT_NOTES, Called, HandedOver, Happened, Limit, Limited, Returned, Wrote
from reasoning.dialogue import turn_messages
from reasoning.strategy import Event
from reasoning.thinking import Piece, Tally
from reasoning.turn import CallMore, CallStart, Content, Reasoning, new_call_id
from tools.outcome import Call

log = logging.getLogger("ponder")

TRIES = 2  # at an answer with valid calls and a valid form
_MAX_BYTES_PER_TOKEN = 64  # fewer tokens than that make no text of this length


@dataclass(slots=True)
class RemoteAnswer:
    """Makes one answer. `tally` fills as it grows; `wrong_with(schema, text)` returns why a JSON text is not valid.

    With `loop` the model's calls are run and their results sent to it.
    """

    plan: RemotePlan
    tally: Tally
    wrong_with: Callable[[str, str], Awaitable[str | None]]
    why: str
    on_event: Callable[[Event], None] = lambda event: None
    loop: ToolLoop | None = None
    steps: int = 0
    written: int = 0  # tokens
    _report: SentToRemote = field(init=False)
    _calls: list[Call] = field(default_factory=list)  # of the newest turn, where they may run
    _said: str = ""

    def __post_init__(self) -> None:
        self._report = SentToRemote(self.plan.served.name, self.why, passages=self.plan.passages)

    async def stream(self) -> AsyncGenerator[Happened, None]:
        """Yields all that happens until the answer is there.

        Raises:
            RemoteError: the remote fails, or its budget is used up.
            ApiError: 408: the request's deadline came before anything.
        """
        prompt, loop = self.plan.prompt, self.loop
        left_s = scheduling()["deadline_s"]
        until = None if left_s is None else asyncio.get_running_loop().time() + left_s
        began = 0.0 if loop is None else loop.clock()
        while True:
            async with aclosing(self._turn(prompt, until)) as happening:
                async for each in happening:
                    yield each
            if loop is None or not self._calls or prompt.tool_choice == "none":
                return
            calls = list(self._calls)
            for call in calls:
                yield Called(call)
            try:
                texts = await loop.tools.run(calls)
            except HandedOver:
                return
            for call, text in zip(calls, texts, strict=True):
                yield Returned(call, text)
            self.steps += 1
            self._report = replace(self._report, tool_results=self._report.tool_results + len(texts))
            limit = self._limit(loop, began)
            if limit is not None:
                yield Limited(limit)
                texts[-1] = f"{texts[-1]}\n\n{LIMIT_NOTES[limit]}"
                prompt = replace(prompt, tool_choice="none")
            elif prompt.tool_choice is not None:  # a call that was asked for has been made
                prompt = replace(prompt, tool_choice="auto")
            spoken = [(call.id, call.name, json_value(str(call.arguments))) for call in calls]
            prompt = replace(prompt, messages=[*prompt.messages, *turn_messages(self._said, spoken, texts)])

    def _limit(self, loop: ToolLoop, began: float) -> Limit | None:
        if self.steps >= loop.limits.steps:
            return "steps"
        if self.written >= loop.limits.tokens:
            return "tokens"
        return "seconds" if loop.clock() - began >= loop.limits.seconds else None

    async def _turn(self, prompt: RemotePrompt, until: float | None) -> AsyncGenerator[Wrote, None]:
        holds = self.plan.check is not None
        for tried in range(TRIES):
            turn, passed = _RemoteTurn(), False
            async with aclosing(self._request(prompt, turn, until)) as deltas:
                async for delta in deltas:
                    if not holds:
                        passed = True
                        yield _wrote(delta)
            wrong = await self._wrong(turn, prompt)
            if wrong is None:
                break
            if passed or tried == TRIES - 1:
                what = f"gave an answer that is not as it was asked for: {wrong[:200]}"
                message = self.plan.served.client.redacted(f"The remote model {self.plan.served.name!r} {what}.")
                self._tell(error=message)
                raise RemoteError(502, message, "remote_answer_invalid")
        for delta in turn.deltas if holds else ():
            yield _wrote(delta)
        for index, call in enumerate(turn.calls):
            start = CallStart(index, call.id, call.name)
            yield Wrote(Piece("call", "", 0), (start, CallMore(index, str(call.arguments))))
        self._said = turn.content
        self._calls = turn.calls if turn.finish == "stop" else []
        finish = turn.finish or "stop"
        last = Piece("answer", "", turn.uncounted, finish_reason=finish)
        yield Wrote(last, (), "tool_calls" if self._calls else finish)

    async def _request(
        self, prompt: RemotePrompt, turn: _RemoteTurn, until: float | None
    ) -> AsyncGenerator[Content | Reasoning, None]:
        """Yields the text of one request's answer; `turn` gets all of it."""
        from app.remote.http_client import DeadlinePassed

        served, guess = self.plan.served, prompt.estimated_tokens
        reserved = served.spending.reserve(guess, prompt.max_tokens)
        self._tell(
            sending=True, messages=len(prompt.messages), characters=prompt.characters, images=prompt.images,
            requests=self._report.requests + 1,
        )  # fmt: skip
        log.info(
            "sent to the remote model %s: %d messages, %d characters, %d images, %d passages, %d tool results (%s)",
            served.name, len(prompt.messages), prompt.characters, prompt.images, self.plan.passages,
            self._report.tool_results, self.why,
        )  # fmt: skip
        self.tally.prompt_tokens += guess
        refused, failure, begun = False, self._report.error, time.monotonic()
        try:
            async with aclosing(served.client.items(prompt, until)) as items:
                async for item in items:
                    turn.take(item)
                    if isinstance(item, Content | Reasoning):
                        self.tally.completion_tokens += 1  # until the remote says how many there are
                        yield item
            if turn.finish is None:
                message = f"The remote model {served.name!r} broke off before the end of its answer."
                raise RemoteError(502, message, "remote_dropped")
        except DeadlinePassed:
            if not turn.deltas:
                raise too_late(time.monotonic() - begun) from None
            turn.finish = "length"
        except RemoteError as error:
            refused = turn.is_empty and error.code != "remote_timeout"
            failure = error.message
            raise
        finally:
            read, written = (0, 0) if refused else turn.counts(prompt, served.name)
            cost = self._report.cost + served.spending.settle(reserved, read, written)
            self.written += written
            self.tally.prompt_tokens += read - guess
            self.tally.completion_tokens += written - len(turn.deltas)
            self.tally.cached_tokens += min(turn.usage.cached or 0, read)
            self.tally.reasoning_tokens += min(turn.usage.reasoning or 0, written)
            turn.uncounted = max(0, written - len(turn.deltas))
            self._tell(cost=round(cost, 8), error=failure)

    def _tell(self, *, sending: bool = False, **fields: Any) -> None:  # Any: fields of the report
        self._report = replace(self._report, sending=sending, **fields)
        self.on_event(self._report)

    async def _wrong(self, turn: _RemoteTurn, prompt: RemotePrompt) -> str | None:
        """Returns why a turn is not as it was asked for; None where it is, or where a limit cut it."""
        tools = {tool.name: tool for tool in self.plan.tools}
        turn.close()
        for call in turn.calls:
            tool = tools.get(call.name)
            if tool is None or prompt.tool_choice == "none":
                return f"it calls {call.name!r:.70}, which it may not call"
            if turn.finish == "length":
                continue
            text = str(call.arguments)
            try:
                value = json_value(text)
            except ValueError as error:
                return f"its call of {call.name!r} is not JSON ({error})"
            if not isinstance(value, dict):
                return f"the arguments of its call of {call.name!r} are no object"
            if (wrong := await self.wrong_with(json.dumps(tool.arguments), text)) is not None:
                return f"its call of {call.name!r} is not valid: {wrong}"
        if turn.finish == "length":
            return None
        if prompt.parallel is False and len(turn.calls) > 1:
            return f"it makes {len(turn.calls)} calls at once"
        if not turn.calls and tools and prompt.tool_choice not in (None, "auto", "none"):
            return "it makes no call"
        if self.plan.check is not None and not turn.calls:
            return await self.wrong_with(self.plan.check, turn.content)
        return None


@dataclass(slots=True)
class _RemoteTurn:
    """A turn as it was received."""

    deltas: list[Content | Reasoning] = field(default_factory=list)
    usage: RemoteUsage = field(default_factory=RemoteUsage)
    finish: Finish | None = None
    calls: list[Call] = field(default_factory=list)  # once it is closed
    uncounted: int = 0  # tokens that came in no piece of text of their own
    _parts: dict[int, list[CallPart]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.deltas and not self._parts and self.usage == RemoteUsage()

    @property
    def content(self) -> str:
        return "".join(each.text for each in self.deltas if isinstance(each, Content))

    def take(self, item: RemoteItem) -> None:
        match item:
            case Content() | Reasoning():
                self.deltas.append(item)
            case CallPart():
                self._parts.setdefault(item.index, []).append(item)
            case RemoteUsage():  # a later count takes the place of an earlier one
                counts = {name: count for name, count in asdict(item).items() if count is not None}
                self.usage = replace(self.usage, **counts)
            case RemoteEnd(finish):
                self.finish = finish

    def close(self) -> None:
        """Puts the calls together, each under an id of ours."""
        for _, parts in sorted(self._parts.items()):
            name = next((part.name for part in parts if part.name is not None), "")
            self.calls.append(Call(new_call_id(), name, "".join(part.text for part in parts) or "{}"))

    def counts(self, prompt: RemotePrompt, model: str) -> tuple[int, int]:
        """Returns the tokens read and written: the remote's counts where they can be true, else estimates."""
        text = "".join(each.text for each in self.deltas)
        text += "".join(part.text for parts in self._parts.values() for part in parts)
        read, written, size = self.usage.prompt, self.usage.completion, len(text.encode())
        if read is None or not 0 < read <= prompt.most_tokens:
            self._doubt(model, "prompt", read)
            read = prompt.estimated_tokens
        if written is None or not size <= written * _MAX_BYTES_PER_TOKEN or written > prompt.max_tokens:
            self._doubt(model, "completion", written)
            written = min(estimated(text), prompt.max_tokens)
        return read, written

    def _doubt(self, model: str, what: str, count: int | None) -> None:
        if count is not None and self.finish is not None:
            log.warning("the remote model %s says %d %s tokens, which cannot be", model, count, what)


def _wrote(delta: Content | Reasoning) -> Wrote:
    return Wrote(Piece("answer" if isinstance(delta, Content) else "thinking", delta.text, 1), (delta,))
