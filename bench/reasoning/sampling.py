"""Several answers to each question: best of n, self-consistency, and their shares at another way's tokens."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.reasoning.asked import AT_ONCE, MAX_TOKENS, BenchQuestion, BenchRow, each, expected, row
from engine import Engine, Sampling, Span
from reasoning.candidate import Candidate, Draft, prefill
from reasoning.self_consistency import vote_of
from reasoning.strategy import Context
from reasoning.thinking import Markers

SAMPLES = 8
SHOWN = (1, 2, 4, 8)
TEMPERATURE = 0.7
CONFIDENT, VOTED, CHECKED = "best of n by confidence", "self-consistency", "best of n by the checker"


@dataclass(frozen=True, slots=True)
class Sample:
    right: bool
    tokens: int
    confidence: float
    vote: str | None


async def sampled(engine: Engine, asked: Sequence[BenchQuestion]) -> list[list[Sample]]:
    """`SAMPLES` answers to every question."""

    async def one(item: tuple[int, BenchQuestion]) -> list[Sample]:
        at, question = item
        span = Span(Sampling(temperature=TEMPERATURE, seed=at), MAX_TOKENS)
        context = Context(engine.tokenizer, span, Markers.of(engine.tokenizer))
        async with await engine.open(question.prompt(engine)) as seq:
            await prefill(seq)
            drafts = [Draft(fork, context, index, True) for index, fork in enumerate(seq.fork(SAMPLES))]
            made: list[Candidate] = await asyncio.gather(*(draft.write() for draft in drafts))
        return [
            Sample(question.right(c.text, c.whole), c.spent, c.confidence, _vote(c, bool(question.numbers)))
            for c in made
        ]

    return await each(list(enumerate(asked)), one, at_once=AT_ONCE // SAMPLES + 1)


def _vote(candidate: Candidate, expression: bool) -> str | None:
    """An expression votes by its numbers and operators alone; an answer that was cut has no vote."""
    if not candidate.whole:
        return None
    return vote_of(re.sub(r"\s+", "", candidate.text), "text") if expression else vote_of(candidate.text, "last_number")


def curves(kind: str, samples: Sequence[Sequence[Sample]]) -> list[BenchRow]:
    """Best of n and self-consistency over the first n samples, for every n."""
    rows: list[BenchRow] = []
    for n in range(1, len(samples[0]) + 1):
        first = [answers[:n] for answers in samples]
        tokens = [sum(a.tokens for a in answers) for answers in first]
        chosen = {
            CHECKED: [any(a.right for a in answers) for answers in first],
            CONFIDENT: [max(answers, key=lambda a: a.confidence).right for answers in first],
            VOTED: [_winner(answers).right for answers in first],
        }
        rows += [row(f"{kind}/{name}/n={n}", right, tokens, more={"samples": n}) for name, right in chosen.items()]
    return rows


def _winner(answers: Sequence[Sample]) -> Sample:
    """The first answer that most agree with; the first of all where none has a vote."""
    votes = Counter(a.vote for a in answers if a.vote is not None)
    winner = votes.most_common(1)[0][0] if votes else None
    return next((a for a in answers if a.vote == winner), answers[0])


def at_tokens(curve: Sequence[BenchRow], tokens: float, name: str) -> BenchRow | None:
    """Returns a curve's row at a mean of so many tokens: a random mix of the two ways around it with that mean.

    None beyond the curve's ends; up to a tenth below its first point that one is taken.
    """
    order = sorted(curve, key=lambda each: each.tokens)
    if order and 0.9 * order[0].tokens <= tokens < order[0].tokens:
        tokens = order[0].tokens
    for below, above in pairwise(order):
        if below.tokens <= tokens <= above.tokens:
            part = (tokens - below.tokens) / (above.tokens - below.tokens or 1.0)
            return expected(name, below.n, (1 - part) * below.share + part * above.share, tokens)
    return None


def beside(others: Sequence[BenchRow], curve: Sequence[BenchRow], name: str) -> list[BenchRow]:
    """Returns a curve's rows at the tokens of each of the other rows, where it was measured that far."""
    made = (at_tokens(curve, other.tokens, f"{name} at the tokens of {other.name}") for other in others)
    return [each for each in made if each is not None]
