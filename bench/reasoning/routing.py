"""Learned routing between the draft model and the large one (as RouteLLM, Ong et al. 2024, arXiv 2406.18665).

A logistic regression says how likely the large model is right where the small one is not: from the question's
embedding, before anything is written; or from that and how sure the small model was of its first tokens. Beside it are
the gates of a cascade, routing by lot, and the best that any router could do. Every question is judged by a regression
that has not seen it (five folds).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from bench.reasoning.asked import SEED, BenchRow, each, row
from engine import GREEDY, Engine, Span
from reasoning.candidate import Draft
from reasoning.strategy import Context
from reasoning.thinking import Markers
from retrieval.embedding import SentenceEmbedder
from training.abilities import ABILITIES
from training.conversation import Case, ModelReply
from training.evaluate import judged

MAX_TOKENS = 768
DRAFT_TOKENS = 384  # of the small model's answer
FIRST = 16  # tokens of the small model that are read before it is gone on with
FOLDS = 5
RIDGE = 3.0  # penalty of the regression, on standardised features
POINTS = 40  # of a frontier, about
GOAL = 0.7  # of the large model's cost


@dataclass(frozen=True, slots=True)
class RoutedAnswer:
    """`first`: mean and least probability of the first tokens, and their entropy in nats."""

    right: bool
    tokens: int
    whole: bool
    confidence: float
    first: tuple[float, float, float]


def cases(n: int) -> list[Case]:
    """Returns `n` questions of the abilities without tools, as many of each."""
    made: list[list[Case]] = []
    for ability in ABILITIES:
        found = ability.cases(Random(f"{SEED}-routing-{ability.name}"), -(-n // 10))
        if not found[0].prompt.tools:
            made.append(found)
    return [case for turn in zip(*made, strict=True) for case in turn][:n]


async def answered(engine: Engine, asked: Sequence[Case], most: int) -> list[RoutedAnswer]:
    """Returns every question's greedy answer, of at most so many tokens."""

    async def one(case: Case) -> RoutedAnswer:
        context = Context(engine.tokenizer, Span(GREEDY, most), Markers.of(engine.tokenizer))
        prompt = engine.tokenizer.apply_chat_template(
            case.prompt.as_json(), enable_thinking=case.prompt.enable_thinking
        )
        async with await engine.open(prompt) as seq:
            made = await Draft(seq, context, measured=True).write()
        thinking = "".join(piece.text for piece in made.pieces if piece.part == "thinking").strip()
        right, *_ = judged(case, [ModelReply(thinking, made.text.strip(), (), not made.whole)]).values()
        begun = replace(made, logprobs=made.logprobs[:FIRST])
        least = min((each.logprob for each in begun.logprobs), default=0.0)
        first = (begun.confidence, math.exp(least), begun.entropy)
        return RoutedAnswer(right is True, made.spent, made.whole, made.confidence, first)

    return await each(asked, one)


def routed(
    asked: Sequence[Case], small: Sequence[RoutedAnswer], large: Sequence[RoutedAnswer], ratio: float
) -> list[BenchRow]:
    """Returns the rows of every router's frontier. A token of the large model costs `ratio` times one of the small one;
    `cost` is in the large model's alone."""
    n, whole = len(asked), sum(answer.tokens for answer in large) * ratio
    gains = np.array([b.right and not a.right for a, b in zip(small, large, strict=True)])
    texts = ["\n".join(message.content for message in case.prompt.messages)[-1000:] for case in asked]
    embedded = np.asarray(SentenceEmbedder().embed(texts), dtype=np.float64)
    first = np.array([answer.first for answer in small])
    spent, begun = [a.tokens for a in small], [min(a.tokens, FIRST) for a in small]
    gates: dict[str, tuple[np.ndarray, Sequence[int]]] = {  # the need of the large model, and what is paid before it
        "confidence of the whole answer": (np.array([-a.confidence * a.whole for a in small]), spent),
        "confidence of the first tokens": (-first[:, 0], begun),
        "learned: question": (held_out(embedded, gains), [0] * n),
        "learned: question and first tokens": (held_out(np.hstack([embedded, first]), gains), begun),
        "by lot": (np.array([Random(f"{SEED}-lot-{at}").random() for at in range(n)]), [0] * n),
        "best possible": (gains.astype(np.float64), [0] * n),
    }
    rows = [row("routing/large alone", [a.right for a in large], [a.tokens for a in large], more={"cost": 1.0})]
    for name, (need, paid) in gates.items():
        order = np.argsort(-need, kind="stable")
        for count in sorted({*(round(at * n / POINTS) for at in range(POINTS + 1)), int(gains.sum())}):
            up = set(order[:count].tolist())
            right = [large[at].right if at in up else small[at].right for at in range(n)]
            cost = sum(paid[at] + large[at].tokens * ratio if at in up else spent[at] for at in range(n))
            tokens = [paid[at] + large[at].tokens if at in up else spent[at] for at in range(n)]
            more = {"cost": cost / whole, "to the large": count / n}
            rows.append(row(f"routing/{name}/{count}", right, tokens, more=more))
    return rows


def held_out(features: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """Returns each question's probability of a gain, by a regression on the other folds."""
    found = np.zeros(len(gains))
    folds = np.random.default_rng(SEED).permutation(len(gains)) % FOLDS
    for fold in range(FOLDS):
        known = folds != fold
        found[~known] = _logistic(features[known], gains[known], features[~known])
    return found


def _logistic(known: np.ndarray, gains: np.ndarray, unknown: np.ndarray) -> np.ndarray:
    """Fits by Newton's method with a penalty, and returns the probabilities of the unknown."""
    mean, scale = known.mean(0), known.std(0) + 1e-9
    x = np.hstack([(known - mean) / scale, np.ones((len(known), 1))])
    penalty = np.diag([RIDGE * x.shape[1] ** 0.5] * (x.shape[1] - 1) + [1e-6])
    weights = np.zeros(x.shape[1])
    for _ in range(20):
        made = 1 / (1 + np.exp(-x @ weights))
        curve = (x * (made * (1 - made))[:, None]).T @ x + penalty
        weights -= np.linalg.solve(curve, x.T @ (made - gains) + penalty @ weights)
    return 1 / (1 + np.exp(-np.hstack([(unknown - mean) / scale, np.ones((len(unknown), 1))]) @ weights))


def summary(rows: Sequence[BenchRow]) -> list[str]:
    """For each router its accuracy at the goal's cost, and the cheapest point that is right as often as the large
    model."""
    alone, *rest = rows
    told = [f"large alone: {alone.share:.1%} ({alone.low:.1%} to {alone.high:.1%})"]
    for name in dict.fromkeys(made.name.split("/")[1] for made in rest):
        points = [(made, (made.more or {})["cost"]) for made in rest if made.name.split("/")[1] == name]
        best = max((made.share for made, cost in points if cost <= GOAL), default=0.0)
        cheapest = min((cost for made, cost in points if made.share >= alone.share), default=math.inf)
        told.append(f"{name}: {best:.1%} at {GOAL:.0%} of its cost or less; as often right at {cheapest:.0%}")
    return told
