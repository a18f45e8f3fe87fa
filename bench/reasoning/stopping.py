"""Votes that stop early, beside plain self-consistency, on the same answers to each question.

The answers are sampled once, whole, and each rule is replayed on them: the rows of a batch advance a token a step, so
the order in which answers end, and what of the others was written by then, follow from their lengths.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from bench.reasoning.asked import AT_ONCE, MAX_TOKENS, BenchQuestion, BenchRow, Kind, each, row, tell
from engine import Engine, Sampling, Span
from reasoning.candidate import Candidate, Draft, prefill
from reasoning.deep_conf import GroupConfidence, threshold
from reasoning.self_consistency import Compared, leader, majority, vote_of
from reasoning.strategy import Context
from reasoning.thinking import Markers

N = 16
TEMPERATURE = 0.7
DRAWS = 2000
PLAIN = "self-consistency"
WINDOW = 32  # tokens of a group


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """`confidences`: after each token, the lowest of the groups of `WINDOW` tokens so far; of all, where there are
    fewer."""

    right: bool
    tokens: int
    vote: str | None
    confidences: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StopRule:
    """The options of `self_consistency`, or with `warm_up` of `deep_conf`."""

    n: int = N
    at_once: int = N
    posterior: float | None = None
    m: int | None = None
    warm_up: int | None = None
    keep: float = 1.0
    consensus: float = 0.95


RULES = {
    PLAIN: StopRule(),
    f"{PLAIN} of 8": StopRule(8, 8),
    f"{PLAIN} of 4": StopRule(4, 4),
    "posterior .95, all at once": StopRule(posterior=0.95),
    "posterior .95, 4 at once": StopRule(posterior=0.95, at_once=4),
    "posterior .95, one by one": StopRule(posterior=0.95, at_once=1),
    "short-4@16": StopRule(m=4),
    "short-8@16": StopRule(m=8),
    "DeepConf, weights alone": StopRule(warm_up=4, consensus=1.0),
    "DeepConf, 90% kept": StopRule(warm_up=4, keep=0.9),
    "DeepConf, 50% kept": StopRule(warm_up=4, keep=0.5),
    "DeepConf, 10% kept": StopRule(warm_up=4, keep=0.1),
}


def sampled_answer(made: Candidate, right: bool, compare: Compared) -> SampledAnswer:
    group, lowest = GroupConfidence(WINDOW), list[float]()
    for logprob in made.logprobs:
        group.add((logprob,))
        lowest.append(group.lowest)
    vote = vote_of(made.text, compare) if made.whole else None
    return SampledAnswer(right, made.spent, vote, tuple(lowest))


async def sampled(engine: Engine, kind: Kind, asked: Sequence[BenchQuestion]) -> list[list[SampledAnswer]]:
    """`N` answers to every question."""
    compare: Compared = "last_number" if kind == "arithmetic" else "text"

    async def one(item: tuple[int, BenchQuestion]) -> list[SampledAnswer]:
        at, question = item
        span = Span(Sampling(temperature=TEMPERATURE, seed=at), MAX_TOKENS)
        context = Context(engine.tokenizer, span, Markers.of(engine.tokenizer))
        async with await engine.open(question.prompt(engine)) as seq:
            await prefill(seq)
            drafts = [Draft(fork, context, index, True) for index, fork in enumerate(seq.fork(N))]
            written = await asyncio.gather(*(draft.write() for draft in drafts))
        return [sampled_answer(made, question.right(made.text, made.whole), compare) for made in written]

    return await each(list(enumerate(asked)), one, at_once=AT_ONCE // N)


class Replay(NamedTuple):
    """Outcome of a rule: whether its answer is right, the tokens of all that were begun, and how many `ended` or were
    stopped."""

    right: bool
    tokens: int
    ended: int


def replayed(answers: Sequence[SampledAnswer], rule: StopRule) -> Replay:
    """Replays a rule on the answers to one question, in the order in which they are begun."""
    least: float | None = None
    begun: dict[int, int] = {}  # the step at which each began
    running: list[tuple[int, int]] = []  # (the step at which it ends, its index)
    ended: list[int] = []
    counts, votes = Counter[str](), dict[str, float]()
    best: dict[str, tuple[float, int]] = {}
    step = spent = 0

    def begin(count: int) -> None:
        for index in range(len(begun), min(rule.n, len(begun) + count)):
            begun[index] = step
            heappush(running, (step + _length(answers[index], least), index))

    begin(rule.warm_up or rule.at_once)
    while running:
        step, index = heappop(running)
        answer = answers[index]
        length = step - begun[index]
        spent += length
        ended.append(index)
        weight = 1.0 if rule.warm_up is None else answer.confidences[-1]
        if answer.vote is not None and length == answer.tokens:
            votes[answer.vote] = votes.get(answer.vote, 0.0) + weight
            counts[answer.vote] += 1
            best[answer.vote] = max(best.get(answer.vote, (0.0, -N)), (weight, -index))
        if rule.warm_up is None:
            (_, first), (_, second) = [*counts.most_common(2), ("", 0), ("", 0)][:2]
            if leader(votes, rule.n - len(ended))[1] or counts.total() == rule.m:
                break
            if rule.posterior is not None and majority(first, second) > rule.posterior:
                break
            begin(1)
        elif len(ended) >= rule.warm_up:
            if votes and max(votes.values()) >= rule.consensus * sum(votes.values()):
                break
            if len(ended) == rule.warm_up:
                least = threshold([answers[at].confidences[-1] for at in ended], rule.keep)
                begin(rule.n)
    spent += sum(step - begun[index] for _, index in running)
    winner = max(votes, key=lambda vote: (votes[vote], best[vote]), default=None)
    chosen = ended[0] if winner is None else -best[winner][1]
    return Replay(answers[chosen].right, spent, len(ended))


def _length(answer: SampledAnswer, least: float | None) -> int:
    """Tokens until it ends, or is stopped."""
    if least is None:
        return answer.tokens
    whole = enumerate(answer.confidences[WINDOW - 1 :], WINDOW)
    return next((at for at, lowest in whole if lowest < least), answer.tokens)


def paired(reference: Sequence[Replay], other: Sequence[Replay]) -> dict[str, float]:
    """Returns the share of right answers above the reference's, in points, and the tokens as a share of its tokens,
    with 95% intervals by bootstrap over questions."""
    rng, n = random.Random(0), len(reference)
    gained = [100.0 * (theirs.right - ours.right) for ours, theirs in zip(reference, other, strict=True)]

    def ratio(chosen: Sequence[int]) -> float:
        return sum(other[at].tokens for at in chosen) / sum(reference[at].tokens for at in chosen)

    draws = [rng.choices(range(n), k=n) for _ in range(DRAWS)]
    points = sorted(sum(gained[at] for at in chosen) / n for chosen in draws)
    ratios = sorted(map(ratio, draws))
    low, high = int(0.025 * DRAWS), int(0.975 * DRAWS)
    return {
        "points": sum(gained) / n, "points_low": points[low], "points_high": points[high],
        "tokens_share": ratio(range(n)), "tokens_low": ratios[low], "tokens_high": ratios[high],
    }  # fmt: skip


async def stopped(engine: Engine, kind: Kind, asked: Sequence[BenchQuestion]) -> list[BenchRow]:
    """All rules; `more` has what `paired` finds beside plain self-consistency."""
    answers = await sampled(engine, kind, asked)
    reference = [replayed(of_one, RULES[PLAIN]) for of_one in answers]
    rows: list[BenchRow] = []
    for name, rule in RULES.items():
        made = [replayed(of_one, rule) for of_one in answers]
        right, tokens, _ = zip(*made, strict=True)
        rows.append(tell(row(f"{kind}/{name}", right, tokens, more=paired(reference, made))))
    return rows
