"""Proposes drafts for the decodes of the next step, and learns from what became of them.

Proposers are asked in order, and models only where those before them are not likely to be right; what they propose is
joined into one token tree (`joined_trees`). A draft ends before a stop token, at
the span's length, and where a constraint does not allow it. How much of all drafts is verified is then decided at once
(`control`). Knows nothing of blocks or devices.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.config import EngineConfig
from engine.core.request import SequenceState, SpanJob
from engine.core.step import Row, Step
from engine.core.token_tree import Tree, path_to, preorder
from engine.errors import InvalidParameter
from engine.multimodal.image_input import FIRST_IMAGE_ID
from engine.outputs import SpeculationStats
from engine.params import Span
from engine.speculation.control import Calibration, StepTimes, chosen_lengths
from engine.speculation.joined_trees import RatedTree, joined
from engine.speculation.proposer import DraftTokens, Proposer
from engine.speculation.suffix import SuffixProposer

MAX_PENDING = 16  # tokens that a decode may have to run besides: those that a constraint forced
_LIKELY = 0.6  # probability of a first token from which on no model is asked
_REMEMBERED = 0.95  # weight of a sequence's earlier drafted tokens, for each later one
_FORGIVEN = 0.01  # share of a sequence's lost trust that comes back with each draft that is not verified
_RETRIED = 0.02  # the same of a model that is not asked
_SMOOTHED = 0.1  # weight of a proposer's newest draft
_MAX_LEARNT = 1024  # pairs of proposer and adapter that are remembered
_TRUST_PRIOR = 6.0  # expected right tokens, before a sequence's own record counts as much as all others'


@dataclass(slots=True)
class _Record:
    """Outcome of one sequence's drafts."""

    right: float = _TRUST_PRIOR
    expected: float = _TRUST_PRIOR
    tree: RatedTree | None = None  # the draft that is being verified
    rows: int = 0
    accepted: int = 0

    @property
    def trust(self) -> float:
        return min(1.0, self.right / self.expected)


@dataclass(slots=True)
class _Learnt:
    """Share of a proposer's tokens that were right, for the sequences of one adapter or of none: a draft model or heads
    of the base are wrong more often for an adapter, which must not switch them off for others."""

    likely: float = 1.0  # probability of a draft's first token, smoothed; of a proposer that is not asked it grows back
    calibration: Calibration = field(default_factory=Calibration)


@dataclass(slots=True)
class _Costs:
    """Costs of a proposer's drafts, in seconds for a token of each sequence."""

    token_s: float = 0.0

    def took(self, seconds: float, tokens: int) -> None:
        """Learns the time of drafts of up to so many tokens."""
        if tokens:
            each = seconds / tokens
            self.token_s += (min(each, 4 * self.token_s) - self.token_s) * _SMOOTHED if self.token_s else each


class _Asked(NamedTuple):
    """A span that may be drafted for, and the most tokens of its draft."""

    seq: SequenceState
    job: SpanJob
    budget: int


class _Proposed(NamedTuple):
    """A sequence's draft, and of each token the probability that it and those before it are right: it never rises from
    one to the next, so the first tokens of a tree are its likeliest."""

    tree: RatedTree
    survival: list[float]


class Speculator:
    """Drafts of one core. `order`: the proposers that a span without a wish of its own uses, whose drafts are joined;
    `max_tokens` of a draft. Without `trees`, of a token tree the best path is verified."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        order: Sequence[str],
        max_tokens: int,
        vocab_size: int = FIRST_IMAGE_ID,
        clock: Callable[[], float] = time.perf_counter,
        *,
        trees: bool = False,
    ) -> None:
        self._proposers = {each.name: each for each in proposers}
        self._order = tuple(order)
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._clock = clock
        self._trees = trees
        self._costs = {each.name: _Costs() for each in proposers}
        self._learnt: OrderedDict[tuple[str, int], _Learnt] = (
            OrderedDict()
        )  # by proposer and adapter, used last at the end
        self._records: dict[int, _Record] = {}
        self.times = StepTimes()
        self._accepted = 0  # in the step that runs
        self._drafted_at = [0] * max_tokens
        self._accepted_at = [0] * max_tokens
        self._steps = self._rows = 0
        self._saved_s = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the proposers, which a span may ask for."""
        return tuple(self._proposers)

    def wanted(self, span: Span) -> bool:
        """Returns whether drafts may be proposed for a span."""
        return bool(self._order) if span.speculation is None else span.speculation.proposer != "off"

    def drafts(self, running: Collection[SequenceState]) -> dict[int, Tree]:
        """Returns the drafts to verify in the next step, by sequence; none beside a prompt that is being read."""
        asked: list[_Asked] = []
        for seq in running:
            if seq.remaining > MAX_PENDING:
                return {}
            if isinstance(job := seq.job, SpanJob) and job.speculates and (budget := self._budget(job)) > 0:
                asked.append(_Asked(seq, job, budget))
        if not asked:
            return {}
        found = self._proposed(asked, sum(seq.remaining for seq in running))
        lengths = chosen_lengths({id: each.survival for id, each in found.items()}, len(running), self.times)
        chosen: dict[int, Tree] = {}
        adapters = {each.seq.id: each.seq.adapter for each in asked}
        for id, (tree, _) in found.items():
            record, count = self._records[id], lengths.get(id, 0)
            for name, confidence in tree.sources[count] if count < len(tree.sources) else ():  # it is not verified
                self._learnt_of(name, adapters[id]).calibration.forget(confidence)
            if id not in lengths:
                record.expected += (record.right - record.expected) * _FORGIVEN
            tree = tree.cut(count)
            record.tree = tree = tree.chosen(preorder(tree.parents)) if tree.parents else tree
            if tree.tokens:
                chosen[id] = tree.tokens, tree.parents
        return chosen

    def verified(self, row: Row, path: Sequence[int], *, ended: bool) -> None:
        """Learns that the tokens `path` of a row's draft were right, and others after the same ones were not, unless
        the span `ended` with them."""
        record = self._records[row.seq.id]
        assert record.tree is not None, "a draft was verified"
        last, right, depths = path[-1] if path else -1, {-1, *path}, {-1: -1}
        for at in range(len(row.draft)):
            parent = row.parents[at] if row.parents else at - 1
            depths[at] = depths[parent] + 1
            self._drafted_at[depths[at]] += 1
            if at in right:
                self._accepted_at[depths[at]] += 1
            if parent not in right or (parent == last and ended):
                continue
            record.right = _REMEMBERED * record.right + (at in right)
            record.expected = _REMEMBERED * record.expected + record.tree.probability[at]
            for name, confidence in record.tree.sources[at]:
                self._learnt_of(name, row.seq.adapter).calibration.learn(confidence, at in right)
        self._rows += 1
        self._accepted += len(path)

    def ran(self, step: Step, seconds: float) -> None:
        """Learns from the time of a step that only decodes."""
        accepted, self._accepted = self._accepted, 0
        if not step.rows or any(row.count > MAX_PENDING for row in step.rows):
            return
        rows = sum(row.count for row in step.rows)
        self.times.ran(step.tokens, seconds)
        if step.tokens > rows:
            self._steps += 1
            alone = self.times.seconds(rows)
            self._saved_s += accepted / rows * alone - (seconds - alone)

    def sampled(self, seq: SequenceState, row: int) -> None:
        """Reports that a sequence's newest token was sampled from this row of the step's logits."""
        for each in self._proposers.values():
            each.sampled(seq, row)

    def ended(self, seq: SequenceState, job: SpanJob) -> None:
        """Reports a span's end."""
        for each in self._proposers.values():
            each.ended(seq, job.prompt_tokens)

    def forget(self, seq: SequenceState) -> None:
        """Drops what is kept for a sequence that is closed."""
        self._records.pop(seq.id, None)
        for each in self._proposers.values():
            each.forget(seq)

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            drafted=sum(self._drafted_at),
            accepted=sum(self._accepted_at),
            rows=self._rows,
            steps=self._steps,
            drafted_at=tuple(self._drafted_at),
            accepted_at=tuple(self._accepted_at),
            saved_s=self._saved_s,
        )

    def _budget(self, job: SpanJob) -> int:
        """Returns the most tokens of a draft: with the sample after it, it reaches the span's length."""
        early = job.modes is not None and job.produced < job.span.min_tokens  # which tokens may end it depends on modes
        if early or not job.produced or job.reading_prompt:
            return 0
        wish = job.span.speculation
        most = self._max_tokens if wish is None or wish.max_tokens is None else min(wish.max_tokens, self._max_tokens)
        return min(most, job.max_tokens - job.produced - 1)

    def _proposed(self, asked: Sequence[_Asked], tokens: int) -> dict[int, _Proposed]:
        """Returns each sequence's draft, joined of all that is proposed for it. A model is asked while the first token
        is not likely enough."""
        trees: dict[int, list[RatedTree]] = {each.seq.id: [] for each in asked}
        unlikely = dict.fromkeys(trees, 1.0)  # probability that the first token is another one
        adapters = {each.seq.adapter for each in asked}
        for name, proposer in self._proposers.items():
            worth = self._worth(name, tokens)
            of_it = [
                each
                for each in asked
                if name in self._names(each.job.span)
                and not (proposer.model and 1 - unlikely[each.seq.id] >= _LIKELY)
                and not (proposer.model and self._learnt_of(name, each.seq.adapter).likely < worth)
            ]
            for adapter in adapters - {each.seq.adapter for each in of_it}:
                learnt = self._learnt_of(name, adapter)
                learnt.likely += (1 - learnt.likely) * _RETRIED
            if not of_it:
                continue
            began = self._clock()
            drafts = proposer.propose_all([(each.seq, each.budget) for each in of_it], worth)
            self._costs[name].took(self._clock() - began, max(len(draft.tokens) for draft in drafts))
            for (seq, job, budget), draft in zip(of_it, drafts, strict=True):
                kept = self._kept(job, draft.cut(budget))
                if not kept.tokens:
                    continue
                learnt, record = self._learnt_of(name, seq.adapter), self._records.setdefault(seq.id, _Record())
                tree = RatedTree.of(name, kept, learnt.calibration.probability)
                likely = tree.likely
                learnt.likely += (record.trust * likely - learnt.likely) * _SMOOTHED
                unlikely[seq.id] *= 1 - record.trust * likely
                trees[seq.id].append(tree)
        return {
            seq.id: _Proposed(
                *joined(trees[seq.id]).likeliest(budget, self._records[seq.id].trust, chain=not self._trees)
            )
            for seq, _, budget in asked
            if trees[seq.id]
        }

    def _learnt_of(self, name: str, adapter: int) -> _Learnt:
        key = name, adapter
        if key not in self._learnt:
            self._learnt[key] = _Learnt()
            if len(self._learnt) > _MAX_LEARNT:
                self._learnt.popitem(last=False)
        self._learnt.move_to_end(key)
        return self._learnt[key]

    def _names(self, span: Span) -> tuple[str, ...]:
        if span.speculation is None or span.speculation.proposer == "auto":
            return self._order or tuple(self._proposers)
        return (span.speculation.proposer,)

    def _worth(self, name: str, tokens: int) -> float:
        """Returns the probability from which on one more drafted token gains time, in a step of so many tokens."""
        alone = self.times.seconds(tokens)
        marginal = self.times.seconds(tokens + 4) - alone
        return min(1.0, (self._costs[name].token_s + marginal / 4) * tokens / alone)

    def _kept(self, job: SpanJob, draft: DraftTokens) -> DraftTokens:
        """Returns the tokens of a draft that may come: each is of the vocabulary, which an image's are not, none ends
        the span, and the constraint takes each after those before it."""
        kept, last, ahead = list[int](), -1, None if job.modes is None else job.modes.lookahead()
        for at, token in enumerate(draft.tokens):
            parent = draft.parent(at)
            if parent >= 0 and parent not in kept:
                continue
            if job.modes is not None and parent != last:  # the machine is at another token
                ahead = job.modes.lookahead()
                for before in path_to(draft.parents, parent):
                    ahead.accept(draft.tokens[before])
            last = at
            known = 0 <= token < self._vocab_size and token not in job.stop_ids
            if known and (ahead is None or ahead.accept(token)):
                kept.append(at)
        return draft if len(kept) == len(draft.tokens) else draft.chosen(kept)


_HINTS = {  # of proposers that not every engine has
    "draft": "; draft and medusa come with draft_model",
    "medusa": "; draft and medusa come with draft_model",
    "mtp": "; mtp comes with a checkpoint that has one layer of multi-token prediction (mtp.*)",
}


def build_speculator(
    speculation: str,
    config: EngineConfig,
    vocab_size: int,
    more: Sequence[Proposer],
    models: Sequence[Proposer],
    *,
    trees: bool,
) -> Speculator:
    """Returns the proposers of a core, in the order in which they are asked: `more`, those that need no model, which a
    span may always ask for, and `models` between them. `trees`: steps verify token trees.

    Raises:
        InvalidParameter: no proposer has the configured name.
    """
    proposers = [*more, SuffixProposer(), *models, SuffixProposer("ngram", 2, pooled=False)]
    names = [each.name for each in proposers]
    if speculation not in ("off", "auto", *names):
        accepted, hint = ", ".join(("off", "auto", *names)), _HINTS.get(speculation, "")
        message = f"speculation is {speculation!r}; accepted: {accepted}{hint}."
        raise InvalidParameter("speculation", message)
    order = {"off": [], "auto": names}.get(speculation, [speculation])
    return Speculator(proposers, order, config.speculation_tokens, vocab_size, trees=trees)
