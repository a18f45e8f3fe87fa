"""Turns a step's samples and logits into the replies of its requests.

`sample` starts sampling; `collect` takes the tokens as soon as they are there, since the next step depends on them;
`emit_outputs` makes replies of them and may come later. Where candidate continuations are scored, those of one token
share one child sequence, since one row of logits decides them all; each longer one has its own. On a GPU the
log-probabilities of many rows are computed at once, and come back in one copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.core import messages as m
from engine.core.request import FollowerJob, Job, PrefillJob, ScoreGroup, ScoreJob, SequenceState, SpanJob
from engine.core.sampler import begin_sampling, logprob_of, row_logprobs
from engine.core.sampling_types import PendingSamples, RowSampling, SampledTokens
from engine.core.span_state import SpanState, row_sampling
from engine.core.step import Row
from engine.core.token_tree import child_of, path_to
from engine.kernels.buffers import from_device, to_device
from engine.kernels.logprobs import logprobs
from engine.multimodal.image_input import FIRST_IMAGE_ID
from engine.outputs import Prefill, SpanOutput, TokenLogprob
from engine.structured_output.bitmask import Masking
from engine.structured_output.matcher import ConstraintFailed

ROWS = 256  # rows of logits that a GPU handles at once: finding a row's top tokens copies it


def token_logprobs(logits: Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprob]:
    """Computes log-probabilities of `tokens[i]` and the `k` likeliest in row i of `logits` (len(tokens), vocabulary),
    fp32."""
    if logits.is_cuda and tokens:
        return _on_device(logits, tokens, k)
    return [logprob_of(row_logprobs(row), token, k) for row, token in zip(logits, tokens, strict=True)]


def chosen_logprobs(logits: Tensor, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Computes log-probabilities of `tokens[i]` in row `rows[i]` of `logits` (any, vocabulary), fp32. Repeats of a row
    are adjacent."""
    if logits.is_cuda and tokens:
        where, asked = to_device(torch.tensor([rows, tokens]), logits.device)
        found: list[float] = from_device(logprobs(logits, where.int(), asked, 0).chosen)().tolist()
        return found
    found, last, row = [], -1, logits[:0]
    for at, token in zip(rows, tokens, strict=True):
        if at != last:
            last, row = at, row_logprobs(logits[at])
        found.append(float(row[token]))
    return found


def _on_device(logits: Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprob]:
    asked = to_device(torch.tensor(tokens), logits.device)
    rows = torch.arange(len(tokens), dtype=torch.int32, device=logits.device)
    parts: list[Tensor] = []
    for some_rows, some in zip(rows.split(ROWS), asked.split(ROWS), strict=True):
        found = logprobs(logits, some_rows, some, k)
        floats = torch.cat([found.chosen[:, None], found.values], 1)
        parts.append(torch.cat([floats.view(torch.int32), found.tokens.int()], 1))
    whole = from_device(torch.cat(parts))().numpy()
    floats_of, ids = np.split(whole, [(whole.shape[1] + 1) // 2], axis=1)
    values = np.ascontiguousarray(floats_of).view(np.float32).tolist()
    return [
        TokenLogprob(token, chosen, tuple(zip(top_ids, top, strict=True)))
        for token, (chosen, *top), top_ids in zip(tokens, values, ids.tolist(), strict=True)
    ]


Targets = dict[int, list[tuple[int, int, int]]]  # position -> (candidate, index in it, token id) triples


def score_jobs(
    request: int, candidates: Sequence[Sequence[int]], length: int
) -> tuple[ScoreGroup, int, list[tuple[Sequence[int], Targets]]]:
    """Builds the jobs that score candidates after a sequence of `length` tokens.

    Returns the request, the first position whose logits matter, and each child's tokens to append and targets; one
    child without targets where there are no candidates.
    """
    first = length - 1
    if not candidates:
        return ScoreGroup(request, [[0.0]]), first, [((), {})]
    jobs: list[tuple[Sequence[int], Targets]] = []
    singles = [(i, 0, c[0]) for i, c in enumerate(candidates) if len(c) == 1]
    if singles:
        jobs.append(((), {first: singles}))
    for i, candidate in enumerate(candidates):
        if len(candidate) > 1:
            jobs.append((candidate[:-1], {first + j: [(i, j, token)] for j, token in enumerate(candidate)}))
    return ScoreGroup(request, [[0.0] * len(c) for c in candidates]), first, jobs


def read_scores(logits: Tensor, reads: Iterable[tuple[ScoreJob, int, range]]) -> None:
    """Records the log-probabilities that a step's logits (any, vocabulary) decide, all at once. `reads`: each job, the
    position of its first row, and its rows."""
    rows: list[int] = []
    tokens: list[int] = []
    places: list[tuple[list[float], int]] = []
    for job, first, its_rows in reads:
        for position, row in enumerate(its_rows, first):
            for candidate, index, token in job.targets.get(position, ()):
                rows.append(row)
                tokens.append(token)
                places.append((job.request.logprobs[candidate], index))
    for (scores, index), value in zip(places, chosen_logprobs(logits, rows, tokens), strict=True):
        scores[index] = value


class JobListener(Protocol):
    """Is notified when a job is over."""

    def finish(self, seq: SequenceState) -> None:
        """Ends the job; the sequence stays."""
        ...

    def drop(self, seq: SequenceState) -> None:
        """Removes a throw-away child that is scored."""
        ...

    def resample(self, seq: SequenceState) -> None:
        """Samples the token again; the one before is invalid."""
        ...

    def park(self, seq: SequenceState) -> None:
        """Lets a member of a mixture wait for the others."""
        ...

    def share(self, seq: SequenceState, job: SpanJob) -> None:
        """Gives the followers of a mixture the tokens that its leader `seq` has taken."""
        ...

    def unpark(self, seq: SequenceState, job: SpanJob) -> None:
        """Lets all members of a mixture go on."""
        ...

    def sampled(self, seq: SequenceState, at: int) -> None:
        """Hears that a sequence's newest token came from this row of the step's logits."""
        ...

    def verified(self, row: Row, path: Sequence[int]) -> None:
        """Takes over the tokens `path` of a row's draft, which the span has sampled itself, from its beginning on."""
        ...


class SpanRows(NamedTuple):
    """A span that samples in a step: after its newest token, and after each of the row's draft. `at`: the first of
    these rows among the step's logits."""

    seq: SequenceState
    job: SpanJob
    at: int = 0
    row: Row | None = None  # with a draft

    @property
    def draft(self) -> tuple[int, ...]:
        return () if self.row is None else self.row.draft


@dataclass(frozen=True, slots=True)
class SamplingInFlight:
    """A step's samples in flight, for the spans in `spans`: one of each, and one more for each token of its draft.
    `failed` are those whose constraint cannot go on, by sample. With `only_samples` every row samples one token, and no
    logits are read. `ahead`: launched before the tokens of the step before were known. `parked`: members of mixtures
    that are not complete yet, with their jobs. `done`: the event of the step's end, where nothing is fetched from
    it."""

    spans: list[SpanRows]
    failed: dict[int, ConstraintFailed]
    samples: PendingSamples | None
    only_samples: bool
    ahead: bool
    parked: tuple[tuple[SequenceState, Job], ...] = ()
    done: torch.cuda.Event | None = None


def _reads(job: Job | None) -> bool:
    """Returns whether a job needs the logits themselves."""
    return isinstance(job, ScoreJob) or (isinstance(job, SpanJob) and job.reading_prompt)


def _rows(logits: Tensor, index: list[int]) -> Tensor:
    """Copies some rows."""
    return logits.index_select(0, to_device(torch.tensor(index, dtype=torch.int64), logits.device))


@dataclass(slots=True)
class MixedRows:
    """Rows of the mixtures in one step: those complete, as (1, vocabulary) each, with their leaders' spans, and the
    members of the others."""

    spans: list[SpanRows] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    parked: list[tuple[SequenceState, Job]] = field(default_factory=list)

    def deliver(self, seq: SequenceState, job: SpanJob | FollowerJob, logits: Tensor) -> None:
        leader = job.leader if isinstance(job, FollowerJob) else seq
        leading = leader.job
        assert isinstance(leading, SpanJob) and leading.mixture is not None
        self.parked.append((seq, job))
        complete = leading.mixture.deliver(seq.id, logits)
        if complete is not None:
            self.spans.append(SpanRows(leader, leading))
            self.rows.append(complete[None])
            members = leading.mixture.members
            self.parked = [each for each in self.parked if each[0].id not in members]


class OutputProcessor:
    """Processes the outputs of one core's jobs. `emit` takes the replies."""

    def __init__(
        self,
        span_state: SpanState,
        masking: Masking,
        ending: JobListener,
        emit: Callable[[m.Reply], None],
        value: Callable[[int], float] | None = None,
    ) -> None:
        """`value` reads the value head at a row of the newest step's logits."""
        self.generated: Counter[int] = Counter()  # tokens, by the number of their sequence's adapter
        self._span_state = span_state
        self._masking = masking
        self._ending = ending
        self._emit = emit
        self._value = value
        self._pending: list[tuple[SequenceState, SpanJob]] = []

    def sample(self, rows: list[Row], logits: Tensor) -> SamplingInFlight:
        """Starts sampling for the spans that reach their last token; a GPU may still be computing the logits."""
        spans: list[SpanRows] = []
        requests: list[RowSampling | None] = []
        index: list[int] = []
        mixed = MixedRows()
        at = 0
        for row in rows:
            seq, end, draft = row.seq, row.start + row.count, row.draft
            at += max(0, end - max(row.start, row.logits_from)) + len(draft)
            unknown = int(row.sampled_at is not None)
            job = seq.job
            if job is None or isinstance(job, ScoreJob | PrefillJob) or end != len(seq.tokens) + unknown:
                continue
            if isinstance(job, FollowerJob) or job.mixture is not None:
                mixed.deliver(seq, job, logits[at - 1])
                continue
            spans.append(SpanRows(seq, job, at - 1 - len(draft), row if draft else None))
            requests.append(row_sampling(seq, job, unknown))
            paths = (path_to(row.parents, node) for node in range(len(draft)))
            requests.extend(row_sampling(seq, job, 0, tuple(draft[at] for at in path)) for path in paths)
            index.extend(range(at - 1 - len(draft), at))
        spans += mixed.spans
        requests += [row_sampling(each.seq, each.job) for each in mixed.spans]
        parked = tuple(mixed.parked)
        if not spans:
            done = torch.cuda.Event(blocking=True) if logits.is_cuda else None
            if done is not None:
                done.record()
            return SamplingInFlight([], {}, None, only_samples=False, ahead=False, parked=parked, done=done)
        # sampling changes logits in place, and prompts and scores need the model's own
        whole = index == list(range(len(logits))) and not mixed.rows and not any(_reads(row.seq.job) for row in rows)
        failed: dict[int, ConstraintFailed] = {}
        apply_mask = self._masking.apply_mask([(each.job.id, len(each.draft)) for each in spans], failed)
        rows_of_spans = logits if whole else _rows(logits, index)
        if mixed.rows:
            rows_of_spans = torch.cat([rows_of_spans, *mixed.rows])
        samples = begin_sampling(rows_of_spans, requests, apply_mask)
        only_samples = whole and len(requests) == len(rows)
        return SamplingInFlight(spans, failed, samples, only_samples, rows[0].sampled_at is not None, parked)

    def collect(self, rows: list[Row], logits: Tensor, begun: SamplingInFlight) -> None:
        """Hands each row's logits to its job, and takes the tokens sampled since `sample`."""
        at = 0
        scores: list[tuple[ScoreJob, int, range]] = []
        scored: list[tuple[SequenceState, ScoreJob]] = []
        for row in () if begun.only_samples else rows:
            seq, start, end = row.seq, row.start, row.start + row.count
            first = max(start, row.logits_from)
            wanted = max(0, end - first)
            job = seq.job
            if isinstance(job, SpanJob):
                if job.reading_prompt:
                    self._read_prompt(seq, job, first, logits[at : at + wanted])
                if end < len(seq.tokens) and not job.announced:
                    self._emit(m.PromptProgress(job.id, Prefill(end, len(seq), seq.cached_tokens)))
            elif isinstance(job, ScoreJob):
                scores.append((job, first, range(at, at + wanted)))
                if end == len(seq):
                    scored.append((seq, job))
                    if not job.targets:
                        assert self._value is not None, "the handle refuses to ask where there is no value head"
                        job.request.logprobs[0][0] = self._value(at + wanted - 1)
            at += wanted + len(row.draft)
        if scores:
            read_scores(logits, scores)
            self._end_scores(scored)
        for seq, job in begun.parked:
            if seq.job is job:
                self._ending.park(seq)
        if begun.samples is not None:
            self._take(begun, begun.samples)

    def emit_outputs(self) -> None:
        """Emits the outputs of all tokens taken since the last call. A stop string may end a span only now."""
        untold, self._pending = self._pending, []
        for seq, job in untold:
            for output in self._span_state.outputs(seq, job):
                if output.finish_reason is not None and seq.job is job:
                    self._ending.finish(seq)
                self.emit(seq, job, output)

    def fail(self, seq: SequenceState, job: SpanJob, failed: ConstraintFailed) -> None:
        """Ends a span whose constraint cannot go on: the client truncates the sequence to its length before the
        span."""
        self._ending.finish(seq)
        self._emit_fresh(seq, job)
        self._emit(m.RequestFailed(job.id, str(failed)))

    def emit(self, seq: SequenceState, job: SpanJob, output: SpanOutput) -> None:
        if not job.announced:
            job.announced = True
            read = job.span.prompt_logprobs is not None and not job.reading_prompt
            prompt = tuple(job.prompt_logprobs) if read else None
            output = replace(
                output, prompt_logprobs=prompt, prompt_tokens=job.prompt_tokens, cached_tokens=seq.cached_tokens
            )
        if seq.forgotten:
            output = replace(output, forgotten_tokens=len(seq.forgotten))
        self._emit(m.OutputPiece(job.id, output))

    # -- parts

    def _emit_fresh(self, seq: SequenceState, job: SpanJob) -> None:
        """Emits the outputs of a draft's first tokens before the error of a later one."""
        for output in self._span_state.outputs(seq, job):
            self.emit(seq, job, output)

    def _take(self, begun: SamplingInFlight, samples: PendingSamples) -> None:
        sampled, at = samples.fetch(), 0
        for each in begun.spans:
            seq, job, _, row = each
            if seq.job is job:  # else it ended meanwhile: by a stop string, or by the token before
                produced = job.produced
                if row is None:
                    taken = self._take_one(begun, sampled, seq, job, at)
                    if taken and job.speculates:
                        self._ending.sampled(seq, each.at)
                else:
                    taken = self._take_draft(begun, sampled, row, each, at)
                self.generated[seq.adapter] += job.produced - produced
                if taken:
                    self._pending.append((seq, job))
            at += 1 + len(each.draft)

    def _take_draft(
        self, begun: SamplingInFlight, sampled: SampledTokens, row: Row, each: SpanRows, first: int
    ) -> bool:
        """Takes the samples after a sequence's newest token and after tokens of its draft, along the path that the span
        has sampled itself: the others are of another text. Returns whether there is any output."""
        seq, job, path = row.seq, each.job, list[int]()
        made, node = len(job.fresh), -1
        while self._take_one(begun, sampled, seq, job, first + 1 + node):
            self._ending.sampled(seq, each.at + 1 + node)
            if not self._span_state.make_output(seq, job) and seq.job is job:
                self._ending.finish(seq)
            while len(path) < len(seq.tokens) - row.end:
                following = child_of(row.draft, row.parents, node, seq.tokens[row.end + len(path)])
                if following is None:
                    break
                path.append(node := following)
            if len(path) < len(seq.tokens) - row.end:  # nor has the sample after a whole draft one
                break
            job.fresh[made:] = [replace(output, drafted=bool(output.token_ids)) for output in job.fresh[made:]]
            made = len(job.fresh)
            if seq.job is not job:
                break
        self._ending.verified(row, path)
        return bool(job.fresh)

    def _take_one(
        self, begun: SamplingInFlight, sampled: SampledTokens, seq: SequenceState, job: SpanJob, at: int
    ) -> bool:
        """Takes sample `at` of a step for a span. Returns whether there is a token."""
        if at in begun.failed:
            self.fail(seq, job, begun.failed[at])
            return False
        if begun.ahead and not job.open:  # the token before began a constrained section
            self._ending.resample(seq)
            return False
        logprob = sampled.logprobs.get(at)
        if job.defers(logprob):
            self._ending.finish(seq)
            self._emit_fresh(seq, job)
            self._emit(m.Deferred(job.id))
            return False
        try:
            goes_on = self._span_state.take(seq, job, sampled.token_ids[at], job.requested(logprob))
        except ConstraintFailed as failure:
            self.fail(seq, job, failure)
            return False
        if job.mixture is not None:
            self._ending.share(seq, job)
            if goes_on:
                self._ending.unpark(seq, job)
        if not goes_on:
            self._ending.finish(seq)
        return True

    def _end_scores(self, scored: list[tuple[SequenceState, ScoreJob]]) -> None:
        """Ends the scores whose children have been read."""
        for seq, job in scored:
            job.request.open_children -= 1
            self._ending.drop(seq)
            if job.request.open_children == 0:
                scores = tuple(tuple(candidate) for candidate in job.request.logprobs)
                self._emit(m.Scored(job.request.id, scores))

    def _read_prompt(self, seq: SequenceState, job: SpanJob, first: int, logits: Tensor) -> None:
        """Gathers log-probabilities of the prompt's tokens, None of an image's; a preempted sequence reads again from
        the start."""
        del job.prompt_logprobs[first + 1 :]
        tokens = seq.tokens[first + 1 : first + 1 + len(logits)]
        known = [min(token, logits.shape[1] - 1) for token in tokens]
        found = token_logprobs(logits[: len(tokens)], known, job.span.prompt_logprobs or 0)
        job.prompt_logprobs += [
            each if token < FIRST_IMAGE_ID else None for each, token in zip(found, tokens, strict=True)
        ]
        if len(tokens) < len(logits):
            job.reading_prompt = False
