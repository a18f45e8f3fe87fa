"""Generates an answer: opens its sequence, streams pieces, checks them, counts usage.

Answers to one request, made on the engine: prompts opened, forked for `n`, interleaved, metered, and closed.

Whoever stops reading, for whatever reason, closes the root sequences and with them everything below.

Answers whose mask holds a superset of their schema: each is checked as a whole, and generated once more if it fails.

Nothing of an answer is given away before it is found valid, so a stream has its text at once.

Log-probabilities in the two shapes that OpenAI's API has: one for chat, one for plain completions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from app.admission.request_budget import output_limit, scheduling
from app.answering.reasoning_config import AnswerGenerator, ReasoningConfig
from app.answering.served_model import ServedModel
from app.connections import finish
from app.errors import ApiError, invalid
from app.observability.metrics import Counting
from engine.outputs import TokenLogprob
from engine.params import Span
from reasoning.strategy import Event, Spent
from reasoning.thinking import Piece, Tally, plain

if TYPE_CHECKING:
    from engine import Sequence as EngineSequence
    from engine import Tokenizer


T = TypeVar("T")


class AnswerJob(Protocol):
    """Answers to one request, however they are made."""

    @property
    def tally(self) -> Tally: ...

    def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all answers as they come, each with its answer's index."""
        ...


@dataclass(slots=True)
class Generation:
    """One request's work for the engine. `tally` fills as pieces pass."""

    served: ServedModel
    counting: Counting
    endpoint: str
    prompts: list[list[int]]
    n: int
    spans: list[Span]  # one for each prompt
    chat: bool  # tell thinking apart
    calls: bool = False  # what the spans' constraints hold are tool calls
    reasoning_config: ReasoningConfig = field(default_factory=ReasoningConfig)  # of a chat's answers
    variables: Mapping[str, Any] = field(default_factory=dict)  # of its template
    tenant: str = ""  # whose blocks of the prefix cache are found
    tally: Tally = field(default_factory=Tally)

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all answers as they come, each with its answer's index: prompt by prompt, n answers to each."""
        watch = self.counting.watch(self.endpoint)
        with watch.measured(), ExitStack() as closing:
            limit = max(span.max_tokens or 0 for span in self.spans)
            answering = len(self.prompts) * self.n
            watch.admit([self.served], self.tenant, sum(map(len, self.prompts)), limit, answering)
            answers: list[AsyncGenerator[Piece, None]] = []
            for prompt, span in zip(self.prompts, self.spans, strict=True):
                root = await self.served.engine.open(prompt, tenant=self.tenant, **scheduling())
                closing.callback(root.close)
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

    def _answer(self, seq: EngineSequence, prompt: list[int], span: Span) -> AsyncGenerator[Piece, None]:
        if not self.chat:
            return plain(seq, span)
        opened, closed = self.served.opens_thinking(prompt), self.served.closes_thinking(prompt)
        write = AnswerGenerator(self.reasoning_config, self.served, self.variables, self._hear)
        return write(seq, span, self.served.markers, opened=opened, closed=closed, calls=self.calls)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Spent):
            self.tally.add_unseen(event.written, event.read)


def remaining_context(served: ServedModel, prompt: Sequence[int], limit: int | None, param: str) -> int:
    """Tokens that an answer after `prompt` may have: what the context leaves, and no more than the request's key may.

    Raises:
        ApiError: 400 `context_length_exceeded`, with the numbers.
    """
    context = served.engine.max_model_len
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


TRIES = 2
WAIT_S = 20.0  # for the process that validates, on a busy machine
_SCRIPT = Path(__file__).with_name("validate_process.py")


@dataclass(slots=True)
class CheckedGeneration:
    """A `Generation` whose answers are valid against `schema` (JSON text), unless they were cut off."""

    first: Generation
    schema: str

    @property
    def tally(self) -> Tally:
        """All tries together."""
        return self.first.tally

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """As a `Generation` gives them, an answer's all together.

        Raises:
            ApiError: 422 `schema_not_met`: an answer was not valid the second time either.
        """
        held: dict[int, list[Piece]] = {}
        async with aclosing(self.first.pieces()) as pieces:
            async for index, piece in pieces:
                held.setdefault(index, []).append(piece)
                if piece.finish_reason is not None:
                    for each in await self._valid(index, held.pop(index)):
                        yield index, each

    async def _valid(self, index: int, pieces: list[Piece]) -> list[Piece]:
        wrong = await self._wrong(pieces)
        for at in range(1, TRIES):
            if wrong is None:
                return pieces
            pieces = await self._again(index, at)
            wrong = await self._wrong(pieces)
        if wrong is None:
            return pieces
        raise ApiError(
            422, f"The answer is not valid against its schema in {TRIES} tries: {wrong}. The schema cannot be held "
            'exactly and has "strict": false; accepted: asking again, or a schema that can be held.',
            param="response_format", code="schema_not_met", kind="schema_not_met",
        )  # fmt: skip

    async def _again(self, index: int, at: int) -> list[Piece]:
        """The answer anew. A greedy one would be the same, so it is drawn."""
        first, prompt = self.first, index // self.first.n
        span = first.spans[prompt]
        seed = span.sampling.seed
        sampling = replace(
            span.sampling, temperature=span.sampling.temperature or 1.0, seed=None if seed is None else seed ^ at
        )
        more = Tally()
        again = replace(
            first, prompts=[first.prompts[prompt]], n=1, spans=[replace(span, sampling=sampling)], tally=more
        )
        async with aclosing(again.pieces()) as found:
            pieces = [piece async for _, piece in found]
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"):
            setattr(first.tally, name, getattr(first.tally, name) + getattr(more, name))
        return pieces

    async def _wrong(self, pieces: Sequence[Piece]) -> str | None:
        """Tells what is wrong with an answer; None where nothing is, or where it was cut off."""
        if pieces[-1].finish_reason != "stop" or isinstance(pieces[-1].stop_reason, str):
            return None
        return await wrong_with(self.schema, "".join(piece.text for piece in pieces if piece.part == "answer"))


def not_routed() -> ApiError:
    """The refusal of an answer that has to be checked where several models may give it."""
    return invalid(
        "response_format", "response_format cannot be held exactly, and the model is 'auto'; "
        'accepted: one model\'s name together with "strict": false, or a schema that can be held.',
    )  # fmt: skip


async def wrong_with(schema: str, text: str) -> str | None:
    """Tells why a JSON text is not valid against a schema (both as text), in a process that may be killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", str(_SCRIPT),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        asked = json.dumps([json.loads(schema), text]).encode()
        answer, _ = await asyncio.wait_for(process.communicate(asked), WAIT_S)
        wrong: str | None = json.loads(answer)
        return wrong
    except (TimeoutError, ValueError):
        return "checking it takes too long, or too much memory"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


_FLOOR = -9999.0  # JSON has no infinity


def _finite(value: float) -> float:
    return value if value > _FLOOR else _FLOOR  # also turns a NaN into the floor


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": tokenizer.token_text(token), "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        {**one(e.token_id, e.logprob), "top_logprobs": [one(token, lp) for token, lp in e.top[:top]]} for e in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of a plain completion, in instalments: text offsets run on from one to the next."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0

    def take(self, entries: Sequence[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        """The next tokens, each with its log-probability: None for a prompt's first, which nothing precedes."""
        text = self._tokenizer.token_text
        tokens = [text(token) for token, _ in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if e is None else _finite(e.logprob) for _, e in entries],
            "top_logprobs": [
                None if e is None else {text(t): _finite(lp) for t, lp in self._with_chosen(e)} for _, e in entries
            ]
            if self._top
            else None,
            "text_offset": offsets,
        }

    def _with_chosen(self, entry: TokenLogprob) -> list[tuple[int, float]]:
        # As OpenAI documents it, the chosen token is always there, so there may be one more than asked for. It goes
        # first: should two ids share a text, the likeliest one's value stands.
        likeliest = list(entry.top[: self._top])
        return [(entry.token_id, entry.logprob), *likeliest[::-1]]
