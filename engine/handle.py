"""Handle of a live sequence, for API requests, strategies and tests.

It mirrors the sequence's tokens on the caller's side and turns calls into commands; it knows nothing of K/V, batches or
threads. One span or score runs on a handle at a time. Handles belong to the event loop of their engine.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from engine.core import messages as m
from engine.errors import DeadlineExceeded, FollowerClosed, InvalidParameter, SequenceBusy, SequenceClosed
from engine.ipc.link import Client, PendingRequest
from engine.multimodal.image_input import ImageInput
from engine.outputs import Prefill, SpanOutput, SpanResult, sections_of
from engine.params import Span, StreamingWindow
from engine.span_checks import check_endless, check_span, refuse_endless
from engine.structured_output.matcher import CompileTimeout, ConstraintFailed, ConstraintRefused


class Sequence:
    """A sequence of tokens that can be extended, generated from, forked, scored and cut back.

    Get one from `Engine.open` or `fork`. Closing it, or leaving `async with`, closes everything forked from it.
    `on_prefill` gets the progress of a chunked prefill, where that takes several steps; forks have none.
    """

    def __init__(
        self,
        engine: Client,
        id: int,
        tokens: list[int],
        parent: Sequence | None = None,
        images: tuple[ImageInput, ...] = (),
        adapter: str | None = None,
        streaming: StreamingWindow | None = None,
        deadline: float | None = None,
    ) -> None:
        self.adapter = adapter  # its name
        self.streaming = streaming  # of an endless sequence
        self._engine = engine
        self._id = id
        self._tokens = tokens
        self._parent = parent
        self.deadline = deadline  # by time.monotonic; None: none
        self._images = images  # keeps them known to the engine
        self._children: set[Sequence] = set()
        self._busy = False
        self._closed = False
        self._deferred_at: int | None = None  # tokens before the first one of the fallback weights
        self.on_prefill: Callable[[Prefill], None] | None = None

    @property
    def tokens(self) -> list[int]:
        """Returns a copy of all tokens so far, given and generated."""
        return self._tokens.copy()

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def past_deadline(self) -> bool:
        """Returns whether the deadline has passed: spans write nothing, scores raise `DeadlineExceeded`; tokens can
        still be appended, cut and forked."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def append(self, tokens: Iterable[int]) -> None:
        """Appends tokens. Costs nothing until the next `generate` or `score`.

        Raises:
            ContextLengthExceeded: they would not fit the context.
            InvalidParameter: a token id is outside the vocabulary, and of no image known to the engine.
            SequenceBusy, SequenceClosed: see there.
        """
        self._check_free()
        added = tuple(tokens)
        self._engine.check_prompt(added)
        check_endless(added, self.streaming)
        if self.streaming is None:
            self._engine.check_length(len(self) + len(added))
        self._tokens.extend(added)
        self._images += self._engine.add_images(added)
        self._engine.post(m.Append(self._id, added))

    def generate(self, span: Span) -> SpanStream:
        """Starts one span; iterate over the result for its pieces as they come.

        Leaving the loop early cancels the span, and the sequence then ends with the last piece that was yielded.

        Raises:
            ContextLengthExceeded: the sequence with the span's `max_tokens` can never fit.
            InvalidParameter: a token id of the span is outside the vocabulary, the sequence is empty, the span has a
                `min_confidence` and the engine no fallback weights, or it names a proposer that the engine lacks.
            QueueFull: too many spans wait already.
            SequenceBusy, SequenceClosed, EngineStopped: see there.
        """
        return self._generate(span, (), ())

    def generate_mixed(self, others: Iterable[Sequence], weights: Iterable[float], span: Span) -> SpanStream:
        """Starts one span that this sequence and `others` write together: each token is sampled from the weighted sum
        of their distributions, and appended to all of them. RAG-Token (Lewis et al. 2020), where each has another
        document.

        `weights`: this sequence's, then one for each of `others`; they are divided by their sum. Sampling, stops,
        log-probabilities and a constraint apply to the mixture. Random numbers and penalties are of this sequence, and
        so are the counts of the prompt. Until the span is over all of them are busy. If one of `others` closes
        meanwhile the span fails; a span that is left early truncates all of them.

        Raises:
            InvalidParameter: also when `weights` are not one positive, finite number for each sequence, a sequence is
                there twice or of another engine, or the span has `prompt_logprobs` or a `min_confidence`.
            FollowerClosed: from the stream, when one of `others` closed.
            ContextLengthExceeded, QueueFull, SequenceBusy, SequenceClosed, EngineStopped: as `generate`, for each.
        """
        followers, shares = tuple(others), tuple(weights)
        members = (self, *followers)
        if len({id(each) for each in members}) < len(members):
            raise InvalidParameter("others", "others has a sequence twice, or the leader; accepted: each once.")
        for each in members:
            refuse_endless(each.streaming, "a mixture's tokens have one position in all of its sequences")
        if any(each._engine is not self._engine for each in followers):
            raise InvalidParameter("others", "others has a sequence of another engine; accepted: of the same one.")
        if len(shares) != len(members) or not all(share > 0 and math.isfinite(share) for share in shares):
            raise InvalidParameter(
                "weights", f"weights are {list(shares)}; accepted: {len(members)} positive, finite numbers, the "
                "leader's first. Leave out a sequence of weight 0.",
            )  # fmt: skip
        if span.prompt_logprobs is not None:
            raise InvalidParameter(
                "prompt_logprobs", "prompt_logprobs is set, and the sequences of a mixture have several prompts; "
                "accepted: None.",
            )  # fmt: skip
        if span.speculation is not None:
            span.speculation.check_unused("a mixture")
        if span.min_confidence:
            raise InvalidParameter(
                "min_confidence", f"min_confidence is {span.min_confidence}, and a mixture is sampled by the first "
                "weights alone; accepted: None.",
            )  # fmt: skip
        total = math.fsum(shares)
        return self._generate(span, followers, tuple(math.log(share) - math.log(total) for share in shares))

    def _generate(self, span: Span, followers: tuple[Sequence, ...], log_weights: tuple[float, ...]) -> SpanStream:
        members = (self, *followers)
        for each in members:
            each._check_free()
        max_tokens = min(each._check_span(span) for each in members)
        self._engine.check_queue()
        seed = span.sampling.seed if span.sampling.seed is not None else secrets.randbits(63)
        request = self._engine.request()
        ids = tuple(each._id for each in followers)
        weights = log_weights if followers else ()  # alone it is a span like any other
        fallback = self._deferred_at is not None and span.min_confidence != 0 and not followers
        self._engine.post(
            m.Generate(
                self._id, request.id, span, seed, max_tokens, followers=ids, log_weights=weights, fallback=fallback
            )
        )
        for each in members:
            each._busy = True
        return SpanStream(self, self._engine, request, followers)

    async def generate_all(self, span: Span) -> SpanResult:
        """Runs one span to its end. Raises the errors of `generate`."""
        return await self.generate(span).result()

    def fork(self, n: int = 1, *, scope: Sequence | None = None) -> list[Sequence]:
        """Forks `n` children with the same tokens, K/V and penalty counts, and random keys of their own.

        They share all blocks copy-on-write: a child that writes into the last, partial block copies that one block
        first. Calling `fork` again in the same order gives children with the same random numbers.

        Children close with `scope`, by default this sequence. A search that drops a parent and keeps its children names
        the root here.

        Raises:
            InvalidParameter: `n` is less than 1.
            SequenceBusy, SequenceClosed: see there; also when the scope is closed.
        """
        self._check_free()
        owner = self if scope is None else scope
        if owner._closed:
            raise owner._ended("The scope of the fork is closed.")
        if n < 1:
            raise InvalidParameter("n", f"n is {n}; accepted: at least 1.")
        ids = tuple(self._engine.next_id() for _ in range(n))
        self._engine.post(m.Fork(self._id, ids, owner._id))
        given = (owner, self._images, self.adapter, self.streaming, self.deadline)
        children = [Sequence(self._engine, id, self._tokens.copy(), *given) for id in ids]
        for child in children:
            child._deferred_at = self._deferred_at
        owner._children.update(children)
        return children

    async def score(self, candidates: Iterable[Iterable[int]]) -> list[list[float]]:
        """Scores candidate continuations, all in one batch on throw-away forks.

        Returns one list per candidate with one natural-log probability per token, given the sequence and the
        candidate's earlier tokens; the sum is the continuation's. The sequence does not change.

        Raises:
            InvalidParameter: there are no candidates, one is empty, or a token id is outside the vocabulary.
            ContextLengthExceeded: a candidate does not fit.
            QueueFull, SequenceBusy, SequenceClosed, EngineStopped: see there.
        """
        self._check_free()
        refuse_endless(self.streaming, "candidates would be scored across what it forgets")
        wanted = tuple(tuple(c) for c in candidates)
        if not wanted or not all(wanted):
            raise InvalidParameter(
                "candidates", "candidates are empty; accepted: one or more, each of 1 token or more."
            )
        self._check_not_empty()
        for candidate in wanted:
            self._engine.check_tokens(candidate)
        self._engine.check_length(len(self) + max(map(len, wanted)))
        return await self._scored(wanted)

    async def value(self) -> float:
        """Returns the probability that the sequence ends right, by the model's value head after its last token.

        Raises:
            InvalidParameter: the model has no value head, or the engine does not read it.
            QueueFull, SequenceBusy, SequenceClosed, EngineStopped: see there.
        """
        self._check_free()
        self._check_not_empty()
        if not self._engine.value_head:
            raise InvalidParameter(
                "value",
                "There is no value head to read; accepted: a model with value_head.safetensors, on a CPU's kernels.",
            )
        ((value,),) = await self._scored(())
        return value

    async def _scored(self, candidates: tuple[tuple[int, ...], ...]) -> list[list[float]]:
        self._engine.check_queue()
        request = self._engine.request()
        self._busy = True
        answered = False
        try:
            self._engine.post(m.Score(self._id, request.id, candidates))
            (reply,) = await request.replies()
            answered = True
            if isinstance(reply, m.Closed):
                raise self._ended(reply.reason)
            assert isinstance(reply, m.Scored)
            return [list(logprobs) for logprobs in reply.logprobs]
        finally:
            if not answered:
                self._engine.post(m.Cancel(self._id, request.id))
            self._engine.forget(request)
            self._busy = False

    def truncate(self, n: int) -> None:
        """Keeps the first `n` tokens.

        Raises:
            InvalidParameter: `n` is negative, beyond the end, or within an image of a model that reads those whole.
            SequenceBusy, SequenceClosed: see there.
        """
        self._check_free()
        if not 0 <= n <= len(self):
            raise InvalidParameter("n", f"n is {n}; accepted: 0 to {len(self)}, the sequence's length.")
        if self._images:
            self._engine.check_whole(self._tokens[:n])
        del self._tokens[n:]
        if self._deferred_at is not None and n <= self._deferred_at:
            self._deferred_at = None
        self._engine.post(m.Truncate(self._id, n))

    def hold(self, ttl_s: float, *, waiting_for: Iterable[str] = ()) -> None:
        """Pins the sequence's K/V for `ttl_s` seconds, within which it is expected to go on: of idle K/V it is
        reclaimed last, and first after that time.

        `waiting_for` names tools or the like that it waits for. The engine learns how long each takes: the pin then
        lasts as long as nearly all such waits, and no longer; there is none where that is more than `ttl_s`.

        Raises:
            InvalidParameter: `ttl_s` is negative.
        """
        if ttl_s < 0:
            raise InvalidParameter("ttl_s", f"ttl_s is {ttl_s}; accepted: 0 or more seconds.")
        if not self._closed:
            self._engine.post(m.Hold(self._id, ttl_s, tuple(waiting_for)))

    async def snapshot(self) -> bytes:
        """Returns the sequence as bytes, for `Engine.resume` of another engine of the same model.

        Tokens, penalty counts and sampling go on there as they would here. K/V is written to the engine's disk tier, if
        it has one, where a later engine over the same directory finds it; else tokens are prefilled again there. Forks
        of the sequence are not part of it.

        Raises:
            SequenceBusy, SequenceClosed, EngineStopped: see there.
        """
        self._check_free()
        refuse_endless(self.streaming, "snapshots have no sequence that forgets")
        request = self._engine.request(queued=False)
        self._busy = True
        try:
            self._engine.post(m.Snap(self._id, request.id))
            (reply,) = await request.replies()
        finally:
            self._engine.forget(request)
            self._busy = False
        if isinstance(reply, m.Closed):
            raise self._ended(reply.reason)
        assert isinstance(reply, m.Snapped)
        return reply.data

    def close(self) -> None:
        """Closes the sequence and everything forked from it; spans that run on them end with `SequenceClosed`.
        Idempotent."""
        if not self._closed:
            self._mark_closed()
            self._engine.post(m.Close(self._id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- parts

    def _mark_closed(self) -> None:
        self._closed = True
        children, self._children = self._children, set()
        for child in children:
            child._mark_closed()
        if self._parent is not None:
            self._parent._children.discard(self)

    def _ended(self, reason: str) -> SequenceClosed:
        """Returns the error that says why the sequence ended. Marks it closed, unless its deadline has passed."""
        if self.past_deadline:
            return DeadlineExceeded(reason)
        self._mark_closed()
        return SequenceClosed(reason)

    def _check_free(self) -> None:
        if self._closed:
            raise self._ended("The sequence is closed.")
        if self._busy:
            raise SequenceBusy("A span or score runs on this sequence; wait for it, or fork first.")

    def _check_not_empty(self) -> None:
        if not self._tokens:
            raise InvalidParameter("tokens", "The sequence is empty; accepted: at least one token to continue from.")

    def _check_span(self, span: Span) -> int:
        """Returns the span's `max_tokens` as a number that fits."""
        self._check_not_empty()
        return check_span(span, len(self), self._engine, self.adapter, self.streaming)


class SpanStream:
    """Pieces of one running span, as an async iterator.

    It ends after the piece with a `finish_reason`. `close`, leaving `with`, or dropping the stream before that cancels
    the span and truncates the sequence to the yielded tokens, so caller and engine never disagree about its tokens.
    """

    def __init__(
        self, sequence: Sequence, engine: Client, request: PendingRequest, followers: tuple[Sequence, ...] = ()
    ) -> None:
        """`followers` get the sequence's tokens, too."""
        self._sequence = sequence
        self._members = (sequence, *followers)
        self._engine = engine
        self._request = request
        self._replies: deque[m.Reply] = deque()
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SpanOutput:
        """Returns the next piece.

        Raises:
            ConstraintRefused: before the first piece: the span's constraint cannot be compiled. The sequence is as it
                was.
            ConstraintFailed: later: the constraint cannot go on. The sequence ends with the last piece.
            SequenceClosed: the sequence was closed meanwhile.
            EngineStopped: the engine failed.
        """
        if self._over:
            raise StopAsyncIteration
        reply = await self._next()
        while isinstance(reply, m.PromptProgress):
            if self._sequence.on_prefill is not None:
                self._sequence.on_prefill(reply.prefill)
            reply = await self._next()
        if isinstance(reply, m.Closed):
            self._end()
            error = self._sequence._ended(f"The sequence ended while a span ran on it: {reply.reason}.")
            if isinstance(error, DeadlineExceeded):  # it had closed when the span reached it
                return SpanOutput(finish_reason="deadline", prompt_tokens=len(self._sequence))
            self._truncate()
            raise error
        if isinstance(reply, m.RequestRefused):
            self._end()
            if reply.timed_out:
                raise CompileTimeout("; ".join(reply.reasons))
            raise ConstraintRefused(reply.reasons)
        if isinstance(reply, m.RequestFailed):
            self._end()
            self._truncate()
            if self._sequence._closed:
                raise self._sequence._ended("The sequence is closed.")
            if reply.follower_closed:
                raise FollowerClosed(f"The span ended: {reply.reason}.")
            raise ConstraintFailed(reply.reason)
        assert isinstance(reply, m.OutputPiece)
        output = reply.output
        if output.fallback and self._sequence._deferred_at is None:
            self._sequence._deferred_at = len(self._sequence)
        for each in self._members:
            each._tokens.extend(output.token_ids)
        if output.finish_reason is not None:
            self._end()
        return output

    async def result(self) -> SpanResult:
        """Runs the span to its end. Raises the errors of `__anext__`."""
        with self:
            pieces = [piece async for piece in self]
        first, last = pieces[0], pieces[-1]
        assert last.finish_reason is not None
        return SpanResult(
            token_ids=tuple(t for p in pieces for t in p.token_ids),
            text="".join(p.text for p in pieces),
            logprobs=tuple(lp for p in pieces for lp in p.logprobs),
            prompt_logprobs=first.prompt_logprobs,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            prompt_tokens=first.prompt_tokens,
            cached_tokens=first.cached_tokens,
            forgotten_tokens=last.forgotten_tokens,
            sections=sections_of(pieces),
        )

    async def _next(self) -> m.Reply:
        if not self._replies:
            self._replies.extend(await self._request.replies())
        return self._replies.popleft()

    def close(self) -> None:
        """Cancels the span if it still runs. Idempotent."""
        if not self._over:
            self._end()
            if not self._sequence._closed:
                self._engine.post(m.Cancel(self._sequence._id, self._request.id))
            self._truncate()

    async def aclose(self) -> None:
        """Does the same, for `contextlib.aclosing`."""
        self.close()

    def _end(self) -> None:
        self._over = True
        self._engine.forget(self._request)
        for each in self._members:
            each._busy = False

    def _truncate(self) -> None:
        """Cuts the sequences that are open back to the tokens that were yielded."""
        for each in self._members:
            if not each._closed:
                self._engine.post(m.Truncate(each._id, len(each)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
