"""State of a running span, advanced by each sampled token: its text, its constraint, jump-forward tokens, its end.

Sections of a constrained span are detokenised apart, and the markers between them are no text. Knows nothing of
scheduling, batches or replies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from engine.core.messages import Generate
from engine.core.repetition import RepetitionDetector
from engine.core.request import SequenceState, SpanJob
from engine.core.sampler import is_greedy, looks_back
from engine.core.sampling_types import RowSampling
from engine.model.detokenizer import SpanText, Utf8Decoder
from engine.outputs import FinishReason, Kind, SpanOutput, TokenLogprob
from engine.structured_output.matcher import ConstraintFailed
from engine.structured_output.mode_machine import ModeMachine

_CONTEXT = 8  # tokens before a section: its first characters may depend on them


def row_sampling(seq: SequenceState, job: SpanJob, unknown: int = 0, draft: tuple[int, ...] = ()) -> RowSampling | None:
    """Returns the sampling request of the span's next token, after `unknown` tokens in flight or after a `draft`; None
    where it is greedy."""
    span, unknown = job.span, unknown + len(draft)
    early = job.produced + unknown < span.min_tokens and (job.modes is None or job.modes.free)
    if job.greedy and not early:
        return None
    return RowSampling(
        sampling=span.sampling,
        seed=job.seed,
        stream=seq.stream,
        position=seq.text_len + unknown,
        counts=seq.counts + Counter(draft) if draft and job.looks_back else seq.counts,
        seen=seq.seen() | set(draft) if span.sampling.repetition_penalty != 1.0 else frozenset(),
        banned=job.stop_ids if early else frozenset(),
        logprobs=max(span.logprobs or 0, 1) if span.min_confidence else span.logprobs,
    )


class SpanState:
    """Advances spans; `eos` are the model's end-of-sequence ids, `make_decoder` gives a fresh detokeniser, with
    `skip_special=False` one that shows special tokens.

    A token is taken in two parts. `take` does the part that the next step depends on: the sequence grows, and the span
    may end by the token's id, a repetition or its length. `outputs` does the rest, and may be called while the next
    step runs: text, stop strings, outputs. In a constrained span the next token depends on all of it, so `take` does it
    at once.
    """

    def __init__(self, make_decoder: Callable[..., Utf8Decoder], eos: frozenset[int]) -> None:
        self._make_decoder = make_decoder
        self._eos = eos

    def begin(self, command: Generate, prompt_tokens: int) -> SpanJob:
        """Returns the job of a span on a sequence of so many tokens."""
        span = command.span
        return SpanJob(
            id=command.request,
            span=span,
            seed=command.seed,
            max_tokens=command.max_tokens,
            stop_ids=frozenset(span.stop_token_ids) | (frozenset() if span.ignore_eos else self._eos),
            prompt_tokens=prompt_tokens,
            greedy=is_greedy(span.sampling) and span.logprobs is None and not span.min_confidence,
            looks_back=looks_back(span.sampling),
            reading_prompt=span.prompt_logprobs is not None and not command.begun,
            prompt_logprobs=[None],
            announced=command.begun,
            delivered=command.delivered,
            repetition=None if span.repetition_detection is None else RepetitionDetector(span.repetition_detection),
        )

    def take(self, seq: SequenceState, job: SpanJob, token: int, logprob: TokenLogprob | None = None) -> bool:
        """Appends a sampled token, and its jump-forward tokens. Returns whether the span goes on, as far as is known.

        Raises:
            ConstraintFailed: the constraint cannot go on; the span is over, and the sampled token is invalid.
        """
        job.token, job.logprob = token, logprob
        if token in job.stop_ids:
            job.produced += 1
            reason = None if token in self._eos and token not in job.span.stop_token_ids else token
            job.ended = ("stop", reason)
            if job.span.keep_stop_token:
                seq.push(token)
            return False
        if job.modes is not None:
            job.token = None
            job.fresh += self._constrained(seq, job, job.modes, token, logprob)
            return job.fresh[-1].finish_reason is None
        job.produced += 1
        seq.push(token)
        if _repeats(job, token):
            job.ended = ("repetition", None)
            return False
        if job.produced >= job.max_tokens:
            job.ended = ("length", None)
            return False
        return True

    def outputs(self, seq: SequenceState, job: SpanJob) -> list[SpanOutput]:
        """Returns the outputs since the last time. The last one has a finish reason if the span is over."""
        self.make_output(seq, job)
        fresh, job.fresh = job.fresh, []
        return fresh if len(fresh) < 2 else _joined(fresh)

    def make_output(self, seq: SequenceState, job: SpanJob) -> bool:
        """Makes the output of the newest token before the next one is taken, for `outputs` to return. Returns whether
        the span goes on."""
        token, job.token = job.token, None
        if token is not None:
            job.fresh += self._output(seq, job, token)
        return not job.fresh or job.fresh[-1].finish_reason is None

    def _output(self, seq: SequenceState, job: SpanJob, token: int) -> list[SpanOutput]:
        """Returns the output of the newest token of a span without a constraint."""
        logprobs = () if job.logprob is None else (job.logprob,)
        if job.ended is not None and job.ended[0] == "stop":
            if not job.span.keep_stop_token:
                return [self.finish(job, *job.ended)]
            return [self.finish(job, *job.ended, (token,), logprobs)]
        if job.text is None:
            self._begin_section(seq.tokens[-_CONTEXT - 1 : -1], job, "text")
            assert job.text is not None
        text, matched = job.text.push(token, may_stop=job.produced >= job.span.min_tokens)
        if matched is not None:
            return [_output(job, (token,), text, logprobs, "stop", matched)]
        if job.ended is not None:
            return [self.finish(job, *job.ended, (token,), logprobs, text)]
        return [SpanOutput((token,), text, logprobs)]

    def replay(self, seq: SequenceState, job: SpanJob, tokens: Iterable[int]) -> None:
        """Replays tokens that the span generated and delivered before: restores sequence, text and constraint.

        Raises:
            ConstraintFailed: the constraint does not accept them.
        """
        for token in tokens:
            if job.modes is None:
                self.take(seq, job, token)
                self.outputs(seq, job)
            else:
                self._take(seq, job, job.modes, token, ())

    def _constrained(
        self, seq: SequenceState, job: SpanJob, modes: ModeMachine, token: int, logprob: TokenLogprob | None
    ) -> list[SpanOutput]:
        """Takes a sampled token of a constrained span, and jumps forward over the tokens that must follow it."""
        outputs = self._take(seq, job, modes, token, () if logprob is None else (logprob,))
        if outputs[-1].finish_reason is not None or job.span.logprobs is not None:
            return outputs
        for forced in modes.forced():
            if forced in job.stop_ids:
                break  # it is sampled, so that it ends the span in one place only
            outputs += self._take(seq, job, modes, forced, ())
            if outputs[-1].finish_reason is not None:
                break
        return _joined(outputs)

    def finish(
        self,
        job: SpanJob,
        finish: FinishReason,
        reason: str | int | None,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        text: str = "",
    ) -> SpanOutput:
        """Ends a span, with its held-back text, which may still complete a stop string.

        A constrained body that is cut off stays a prefix of its grammar's language: without half characters.
        """
        rest, matched = ("", None) if job.text is None else job.text.finish(whole=job.kind == "body")
        if matched is not None:
            finish, reason = "stop", matched
        return _output(job, tokens, text + rest, logprobs, finish, reason)

    def _take(
        self, seq: SequenceState, job: SpanJob, modes: ModeMachine, token: int, logprobs: tuple[TokenLogprob, ...]
    ) -> list[SpanOutput]:
        job.produced += 1
        if not modes.accept(token):
            raise ConstraintFailed("no token of the vocabulary continues the constrained text")
        before = self._end_section(job) if modes.section != job.section else []
        text, matched = "", None
        if modes.kind is not None:
            if job.text is None:
                self._begin_section(seq.tokens[-_CONTEXT:], job, modes.kind)
            assert job.text is not None
            text, matched = job.text.push(token, may_stop=job.produced >= job.span.min_tokens)
        seq.push(token)
        if matched is not None:
            return [*before, _output(job, (token,), text, logprobs, "stop", matched)]
        if modes.must_end():
            return [*before, self.finish(job, "stop", None, (token,), logprobs, text)]
        if _repeats(job, token if modes.kind in ("text", "thought") else None):
            return [*before, self.finish(job, "repetition", None, (token,), logprobs, text)]
        if job.produced >= job.max_tokens:
            return [*before, self.finish(job, "length", None, (token,), logprobs, text)]
        return [*before, _output(job, (token,), text, logprobs)]

    def _begin_section(self, before: list[int], job: SpanJob, kind: Kind) -> None:
        layout = None if job.span.constraint is None else job.span.constraint.layout
        shown = kind == "body" and layout is not None and layout.shows_control
        decoder = self._make_decoder(skip_special=False) if shown else self._make_decoder()
        decoder.push(before)
        if job.section:  # no character reaches over a marker
            decoder.flush()
        marked = layout is not None and layout.begin is not None
        stops = kind == "text" or (kind == "body" and not marked)
        job.text = SpanText(decoder, job.span.stop if stops else ())
        job.kind = kind

    def _end_section(self, job: SpanJob) -> list[SpanOutput]:
        """Releases the held-back text of the section before the marker. It has no whole stop string."""
        rest = "" if job.text is None else job.text.finish()[0]
        outputs = [_output(job, (), rest)] if rest else []
        assert job.modes is not None
        job.text, job.kind, job.section = None, "text", job.modes.section
        return outputs


def _repeats(job: SpanJob, token: int | None) -> bool:
    """Returns whether the span ends with its newest token for a repetition. None: a token of a body, or a marker."""
    if job.repetition is None:
        return False
    if token is None:
        job.repetition.clear()
        return False
    return job.repetition.push(token) and job.produced >= job.span.min_tokens


def _output(
    job: SpanJob,
    tokens: tuple[int, ...],
    text: str,
    logprobs: tuple[TokenLogprob, ...] = (),
    finish: FinishReason | None = None,
    reason: str | int | None = None,
) -> SpanOutput:
    return SpanOutput(
        tokens, text, logprobs, finish_reason=finish, stop_reason=reason, kind=job.kind, section=job.section
    )


def _joined(outputs: list[SpanOutput]) -> list[SpanOutput]:
    """Joins adjacent outputs of one section, those of drafts apart."""
    joined = outputs[:1]
    for output in outputs[1:]:
        last = joined[-1]
        if (last.kind, last.section, last.drafted) == (output.kind, output.section, output.drafted):
            joined[-1] = replace(
                output,
                token_ids=last.token_ids + output.token_ids,
                text=last.text + output.text,
                logprobs=last.logprobs + output.logprobs,
            )
        else:
            joined.append(output)
    return joined
