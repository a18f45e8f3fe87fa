"""Answers to one request, made on the engine: prompts opened, forked for `n`, interleaved, metered, and closed.

Whoever stops reading, for whatever reason, closes the root sequences and with them everything below. Knows nothing of
the reply's shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from app.admission.ticket import output_limit, scheduling
from app.disconnect import finish
from app.errors import from_exception, invalid
from app.manner import Manner, Writer
from app.metrics import Counting
from app.served import Served
from engine.params import Span
from reasoning.strategy import Event, Spent
from reasoning.thinking import Piece, Tally, plain

if TYPE_CHECKING:
    from engine import Sequence as EngineSequence

T = TypeVar("T")


class Answering(Protocol):
    """Answers to one request, however they are made."""

    @property
    def tally(self) -> Tally: ...

    def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all answers as they come, each with its answer's index."""
        ...


@dataclass(slots=True)
class Generation:
    """One request's work for the engine. `tally` fills as pieces pass."""

    served: Served
    counting: Counting
    endpoint: str
    prompts: list[list[int]]
    n: int
    spans: list[Span]  # one for each prompt
    chat: bool  # tell thinking apart
    calls: bool = False  # what the spans' constraints hold are tool calls
    manner: Manner = field(default_factory=Manner)  # of a chat's answers
    variables: Mapping[str, Any] = field(default_factory=dict)  # of its template
    tenant: str = ""  # whose blocks of the prefix cache are found
    tally: Tally = field(default_factory=Tally)

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all answers as they come, each with its answer's index: prompt by prompt, n answers to each."""
        watch = self.counting.watch(self.endpoint)
        outcome = "cancelled"
        roots: list[EngineSequence] = []
        try:
            limit = max(span.max_tokens or 0 for span in self.spans)
            answering = len(self.prompts) * self.n
            watch.admit([self.served], self.tenant, sum(map(len, self.prompts)), limit, answering)
            answers: list[AsyncGenerator[Piece, None]] = []
            for prompt, span in zip(self.prompts, self.spans, strict=True):
                root = await self.served.engine.open(prompt, tenant=self.tenant, **scheduling())
                roots.append(root)
                root.on_prefill = lambda _: watch.reading()
                answers += [self._answer(seq, prompt, span) for seq in ([root] if self.n == 1 else root.fork(self.n))]
            self.tally.prompt_tokens = sum(map(len, self.prompts))
            cached: dict[int, int] = {}
            async with aclosing(interleave(answers)) as stream:
                async for index, piece in stream:
                    # The answers to one prompt share it; what the first to be admitted found cached is what was saved.
                    prompt_index = index // self.n
                    if piece.prompt_tokens and prompt_index not in cached:
                        cached[prompt_index] = piece.cached_tokens
                        self.tally.cached_tokens += piece.cached_tokens
                    self.tally.add(piece)
                    watch.tokens(index, piece.spent, self.tally.cached_tokens, piece.part)
                    yield index, piece
            outcome = "completed"
        except Exception as error:
            outcome = "refused" if from_exception(error).status < 500 else "failed"
            raise
        finally:
            for root in roots:
                root.close()
            watch.end(outcome)

    def _answer(self, seq: EngineSequence, prompt: list[int], span: Span) -> AsyncGenerator[Piece, None]:
        if not self.chat:
            return plain(seq, span)
        opened, closed = self.served.opens_thinking(prompt), self.served.closes_thinking(prompt)
        write = Writer(self.manner, self.served, self.variables, self._hear)
        return write(seq, span, self.served.markers, opened=opened, closed=closed, calls=self.calls)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Spent):
            self.tally.add_unseen(event.written, event.read)


def room_for(served: Served, prompt: Sequence[int], limit: int | None, param: str) -> int:
    """Tokens that an answer after `prompt` may have: what the context leaves, and no more than the request's key may.

    Raises:
        ApiError: 400 `context_length_exceeded`, with the numbers.
    """
    context = served.engine.max_tokens
    room = context - len(prompt)
    most = output_limit(limit)
    if room < 1:
        message = (
            f"The prompt has {len(prompt)} tokens and this model's context {context}; "
            f"accepted: at most {context - 1}, so that there is room for an answer."
        )
        raise invalid(param, message, "context_length_exceeded")
    if limit is not None and limit > room:
        message = (
            f"The prompt has {len(prompt)} tokens and asks for {limit} more; this model's context is {context}; "
            f"accepted: at most {room} more after this prompt."
        )
        raise invalid("max_tokens", message, "context_length_exceeded")
    return room if most is None else min(room, most)


async def interleave(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams in the order they come, each with its stream's index. The first failure ends them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(i, s)) for i, s in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            got = await queue.get()
            if got is None:
                running -= 1
            elif isinstance(got, BaseException):
                raise got
            else:
                yield got
    finally:
        await finish(*pumps)
