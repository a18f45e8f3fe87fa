"""Link to two cores of one vocabulary: the first decodes, the fallback takes over where the first is not sure.

The deferral of a cascade, token by token (Kim et al. 2023, BiLD's fallback policy): the first core ends a span before
a token of low confidence, and the fallback goes on with it on a copy of the sequence: tokens, random key and penalty
counts are restored, text and constraint are replayed, and one prefill computes the K/V. When the span is over, the
first core gets the tokens, and the copy is closed; its K/V stays in the fallback's prefix cache. So the first core has
every sequence, whole but for spans that run. A sequence with an adapter is the first core's alone: the fallback's
weights have none. Knows nothing of threads, processes or tensors.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.core import messages as m
from engine.errors import InvalidParameter
from engine.ipc.link import CoreListener, Link, Listener, State
from engine.ipc.sequence_journal import SequenceJournal
from engine.model.numerics import Numerics
from engine.model.tokenizer import Tokenizer


@dataclass(slots=True)
class _DeferredSpan:
    """A span that the fallback runs on `copy`, and its tokens from there on."""

    sequence: int
    copy: int
    tokens: list[int] = field(default_factory=list)


class FallbackLink:
    """A `Link` made of two. `min_confidence` is that of spans that name none."""

    def __init__(
        self,
        first: Callable[[Listener], Link],
        fallback: Callable[[Listener], Link],
        min_confidence: float,
        listener: Listener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._min_confidence = min_confidence
        self._listener = listener
        self._journal = SequenceJournal(clock)
        self._deferred: dict[int, _DeferredSpan] = {}  # by request
        self._copies = itertools.count(m.first_id(0))  # a core takes no id twice
        self._first = first(CoreListener(self._hear_first, listener.given_up, listener.ended))
        self._fallback = fallback(CoreListener(self._hear_fallback, listener.given_up, listener.ended))

    @property
    def state(self) -> State:
        return self._fallback.state if self._first.state == "running" else self._first.state

    async def start(self) -> m.Loaded:
        """Raises `InvalidParameter` also where the two have different tokens."""
        first = await self._first.start()
        try:
            fallback = await self._fallback.start()
            await asyncio.to_thread(_check_vocabularies, first, fallback)
        except BaseException:
            await self.close()
            raise
        return replace(
            first, max_model_len=min(first.max_model_len, fallback.max_model_len),
            numerics=self._numerics(first.numerics, fallback),
        )  # fmt: skip

    def send(self, command: m.Command) -> None:
        if isinstance(command, m.Compile):  # a span that is deferred finds it ready; one reply is enough
            self._fallback.send(command)
        if isinstance(command, m.Cancel) and command.request in self._deferred:
            self._hand_back(command.request)
        self._journal.sent(command)
        if isinstance(command, m.Generate):
            self._generate(command)
            return
        self._first.send(command)
        if isinstance(command, m.Close):
            for span in self._deferred.values():  # of sequences that close with it: the fallback's reply ends them
                if span.sequence not in self._journal:
                    self._fallback.send(m.Close(span.copy))

    async def close(self) -> None:
        await asyncio.gather(self._first.close(), self._fallback.close())

    # -- parts

    def _numerics(self, first: Numerics, fallback: m.Loaded) -> Numerics:
        """Returns the numerics of both, with all that decides which of them samples a token."""
        other = fallback.numerics
        weights = f"{first.quantization}, below {self._min_confidence:g} {other.quantization} of {fallback.path}"
        invariant = first.batch_invariant and other.batch_invariant
        return replace(first, quantization=weights, batch_invariant=invariant)

    def _generate(self, command: m.Generate) -> None:
        if command.fallback and self._defer(command.request):
            return
        span = command.span
        if span.min_confidence is None and not command.followers and not self._journal.adapter_of(command.sequence):
            span = replace(span, min_confidence=self._min_confidence)
        self._first.send(replace(command, span=span))

    def _hear_first(self, replies: list[m.Reply]) -> None:
        heard: list[m.Reply] = []
        for reply in replies:
            if not isinstance(reply, m.Deferred):
                self._journal.heard(reply)
                heard.append(reply)
            elif not self._defer(reply.request):  # it was closed meanwhile, and its first core had no span any more
                heard.append(m.Closed(reply.request, "the sequence was closed"))
        self._listener.deliver(heard)

    def _defer(self, request: int) -> bool:
        """Has the fallback run the span from here on. Returns whether it still runs."""
        if (commands := self._journal.handover(request)) is None:
            return False
        restore, generate = commands
        copy = next(self._copies)
        self._deferred[request] = _DeferredSpan(restore.sequence, copy)
        span = replace(generate.span, min_confidence=None)
        for image in self._journal.images(restore.tokens):
            self._fallback.send(image)
        self._fallback.send(replace(restore, sequence=copy))
        self._fallback.send(replace(generate, sequence=copy, span=span, fallback=False))
        return True

    def _hear_fallback(self, replies: list[m.Reply]) -> None:
        heard: list[m.Reply] = []
        for reply in replies:
            span = self._deferred.get(reply.request)
            if span is None:  # cancelled, or compiled here too
                continue
            self._journal.heard(reply)
            match reply:
                case m.OutputPiece(request, output):
                    span.tokens.extend(output.token_ids)
                    heard.append(m.OutputPiece(request, replace(output, fallback=True)))
                    if output.finish_reason is not None:
                        self._hand_back(request)
                case m.PromptProgress():
                    heard.append(reply)
                case _:
                    heard.append(reply)
                    self._hand_back(reply.request)
        self._listener.deliver(heard)

    def _hand_back(self, request: int) -> None:
        """Gives the first core the tokens that it lacks, and closes the copy."""
        span = self._deferred.pop(request)
        if span.tokens:
            self._first.send(m.Append(span.sequence, tuple(span.tokens), generated=True))
        self._fallback.send(m.Close(span.copy))


def _check_vocabularies(first: m.Loaded, fallback: m.Loaded) -> None:
    """
    Raises:
        InvalidParameter: a token id stands for another text in the other, or another one ends a sequence.
    """
    if first.path == fallback.path:
        return
    one, other = Tokenizer.load(Path(first.path)), Tokenizer.load(Path(fallback.path))
    same = first.vocab_size == fallback.vocab_size and one.vocab_size == other.vocab_size
    ends = set(one.eos_token_ids) == set(other.eos_token_ids)
    if not (same and ends and all(one.token_text(id) == other.token_text(id) for id in range(one.vocab_size))):
        raise InvalidParameter(
            "fallback", f"The fallback weights in {fallback.path} have other tokens than {first.path}; accepted: a "
            "model of the same tokenizer.",
        )  # fmt: skip
