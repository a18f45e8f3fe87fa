"""What the logits of a step mean for the jobs that wait for them: scores are read, tokens drawn, spans advanced.

Tokens are taken as soon as they are there, as what may follow depends on them; `tell` makes replies of them and may
come later. Knows nothing of commands or scheduling: what ends is handed to whoever made it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine import messages as m
from engine.constrain.matcher import ConstraintFailed
from engine.draws import Draw, Drawing
from engine.jobs import Job, ScoreJob, SpanJob
from engine.kernels.pinned import to_device
from engine.masking import Masking
from engine.outputs import Prefill, SpanOutput
from engine.reading import token_logprobs
from engine.sampler import begin_sampling
from engine.scores import read_scores
from engine.sequence import SequenceState
from engine.spans import SpanWriter, draw
from engine.step import Row


class Ending(Protocol):
    """Who hears that a job is over."""

    def finish(self, seq: SequenceState) -> None:
        """The job is; the sequence stays."""
        ...

    def drop(self, seq: SequenceState) -> None:
        """A throw-away child is read: it goes."""
        ...

    def again(self, seq: SequenceState) -> None:
        """What was drawn means nothing: its token is drawn again."""
        ...


@dataclass(frozen=True, slots=True)
class Begun:
    """A step's draws on their way, for the spans in `spans`. `failed` are those whose constraint cannot go on. With
    `only_draws` every row draws, and nothing is read. `ahead`: they were begun before the tokens before them were
    known. `done` tells that the device is done with the step, where it computes still and nothing is fetched.
    """

    spans: list[tuple[SequenceState, SpanJob]]
    failed: dict[int, ConstraintFailed]
    drawing: Drawing | None
    only_draws: bool
    ahead: bool
    done: torch.cuda.Event | None = None


def _reads(job: Job | None) -> bool:
    """Whether a job wants the logits themselves."""
    return isinstance(job, ScoreJob) or (isinstance(job, SpanJob) and job.reading_prompt)


def _rows(logits: Tensor, index: list[int]) -> Tensor:
    """A copy of some rows."""
    return logits.index_select(0, to_device(torch.tensor(index), logits.device))


class Answers:
    """The jobs of one core. `emit` takes the replies."""

    def __init__(self, writer: SpanWriter, masking: Masking, ending: Ending, emit: Callable[[m.Reply], None]) -> None:
        self.generated_tokens = 0
        self._writer = writer
        self._masking = masking
        self._ending = ending
        self._emit = emit
        self._untold: list[tuple[SequenceState, SpanJob]] = []

    def begin(self, rows: list[Row], logits: Tensor) -> Begun:
        """Begin to draw for the spans that reach their last token; a GPU may still be computing the logits."""
        spans: list[tuple[SequenceState, SpanJob]] = []
        draws: list[Draw | None] = []
        index: list[int] = []
        at = 0
        for row in rows:
            seq, end = row.seq, row.start + row.count
            at += max(0, end - max(row.start, row.logits_from))
            unknown = int(row.drawn_at is not None)
            if isinstance(seq.job, SpanJob) and end == len(seq.tokens) + unknown:
                spans.append((seq, seq.job))
                draws.append(draw(seq, seq.job, unknown))
                index.append(at - 1)
        if not spans:
            done = torch.cuda.Event(blocking=True) if logits.is_cuda else None
            if done is not None:
                done.record()
            return Begun([], {}, None, only_draws=False, ahead=False, done=done)
        # drawing changes logits, and prompts and scores are read from what the model said
        whole = index == list(range(len(logits))) and not any(_reads(row.seq.job) for row in rows)
        failed: dict[int, ConstraintFailed] = {}
        forbid = self._masking.forbid([job for _, job in spans], failed)
        drawing = begin_sampling(logits if whole else _rows(logits, index), draws, forbid)
        only_draws = whole and len(spans) == len(rows)
        return Begun(spans, failed, drawing, only_draws, ahead=rows[0].drawn_at is not None)

    def read(self, rows: list[Row], logits: Tensor, begun: Begun) -> None:
        """Hand each row's logits to its job, and take what was drawn since `begin`."""
        at = 0
        scores: list[tuple[ScoreJob, int, range]] = []
        scored: list[tuple[SequenceState, ScoreJob]] = []
        for row in () if begun.only_draws else rows:
            seq, start, end = row.seq, row.start, row.start + row.count
            first = max(start, row.logits_from)
            wanted = max(0, end - first)
            job = seq.job
            if isinstance(job, SpanJob):
                if job.reading_prompt:
                    self._read_prompt(seq, job, first, logits[at : at + wanted])
                if end < len(seq.tokens) and not job.announced:
                    self._emit(m.Reading(job.id, Prefill(end, len(seq), seq.cached_tokens)))
            elif job is not None:
                scores.append((job, first, range(at, at + wanted)))
                if end == len(seq):
                    scored.append((seq, job))
            at += wanted
        if scores:
            read_scores(logits, scores)
            self._end_scores(scored)
        if begun.drawing is not None:
            self._take(begun, begun.drawing)

    def tell(self) -> None:
        """Replies of all that was taken and not yet told. A stop string may end a span only now."""
        untold, self._untold = self._untold, []
        for seq, job in untold:
            for output in self._writer.tell(seq, job):
                if output.finish_reason is not None and seq.job is job:
                    self._ending.finish(seq)
                self.emit(seq, job, output)

    def fail(self, seq: SequenceState, job: SpanJob, failed: ConstraintFailed) -> None:
        """The span's constraint cannot go on: the client cuts the sequence back to what it was given."""
        self._ending.finish(seq)
        self._emit(m.Failed(job.id, str(failed)))

    def emit(self, seq: SequenceState, job: SpanJob, output: SpanOutput) -> None:
        if not job.announced:
            job.announced = True
            read = job.span.prompt_logprobs is not None and not job.reading_prompt
            prompt = tuple(job.prompt_logprobs) if read else None
            output = replace(
                output, prompt_logprobs=prompt, prompt_tokens=job.prompt_tokens, cached_tokens=seq.cached_tokens
            )
        self._emit(m.Piece(job.id, output))

    # -- parts

    def _take(self, begun: Begun, drawing: Drawing) -> None:
        drawn, failed = drawing.fetch(), begun.failed
        logprobs = drawn.logprobs
        for at, ((seq, job), token) in enumerate(zip(begun.spans, drawn.token_ids, strict=True)):
            if seq.job is not job:  # it ended meanwhile: by a stop string, or by the token before
                continue
            if at in failed:
                self.fail(seq, job, failed[at])
                continue
            if begun.ahead and not job.open:  # the token before began what holds this one
                self._ending.again(seq)
                continue
            produced = job.produced
            try:
                goes_on = self._writer.take(seq, job, token, logprobs.get(at))
            except ConstraintFailed as failure:
                self.fail(seq, job, failure)
                continue
            self.generated_tokens += job.produced - produced
            self._untold.append((seq, job))
            if not goes_on:
                self._ending.finish(seq)

    def _end_scores(self, scored: list[tuple[SequenceState, ScoreJob]]) -> None:
        """What these children had to read is read."""
        for seq, job in scored:
            job.request.open_children -= 1
            self._ending.drop(seq)
            if job.request.open_children == 0:
                scores = tuple(tuple(candidate) for candidate in job.request.logprobs)
                self._emit(m.Scored(job.request.id, scores))

    def _read_prompt(self, seq: SequenceState, job: SpanJob, first: int, logits: Tensor) -> None:
        """Log-probabilities of the prompt's tokens; a preempted sequence reads again from the start."""
        del job.prompt_logprobs[first + 1 :]
        tokens = seq.tokens[first + 1 : first + 1 + len(logits)]
        job.prompt_logprobs += token_logprobs(logits[: len(tokens)], tokens, job.span.prompt_logprobs or 0)
        if len(tokens) < len(logits):
            job.reading_prompt = False
