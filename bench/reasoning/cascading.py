"""A cascade from the draft model to the large one: for every bar of a gate, how many are right and their cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from bench.reasoning.asked import MAX_TOKENS, BenchQuestion, BenchRow, each, row
from engine import GREEDY, Engine, Span
from reasoning.candidate import Draft
from reasoning.strategy import Context
from reasoning.thinking import Markers

POINTS = 24  # of a frontier, about
MIN_COUNT = 0.98  # of the large model's accuracy
MAX_COUNT = 0.6  # of its cost
DRAFT_TOKENS = 384  # of the small model's answer at most: one that comes to no end is left to the large one


@dataclass(frozen=True, slots=True)
class CascadeAnswer:
    """`checked`: a program's score of a puzzle's answer, which needs no solution; None for a sum. One that is not
    `whole` did not end by itself, and passes no gate.
    """

    right: bool
    tokens: int
    confidence: float
    entropy: float
    checked: bool | None
    whole: bool = True


GATES: dict[str, Callable[[CascadeAnswer], float]] = {  # how sure a gate is of an answer; the larger, the surer
    "confidence": lambda answer: answer.confidence,
    "entropy": lambda answer: -answer.entropy,
    "check, else confidence": lambda a: a.confidence if a.checked is None else 2.0 if a.checked else -1.0,
}


def parameters(model: Path) -> int:
    """Of a checkpoint, each once: a token goes through all of them, as the embedding is the output too."""
    with safe_open(str(model / "model.safetensors"), "numpy") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118  # it is no mapping
    total = 0
    for shape in shapes:
        size = 1
        for side in shape:
            size *= side
        total += size
    return total


async def answered(engine: Engine, asked: Sequence[BenchQuestion], most: int = MAX_TOKENS) -> list[CascadeAnswer]:
    """Every question answered greedily, with at most so many tokens."""

    async def one(question: BenchQuestion) -> CascadeAnswer:
        context = Context(engine.tokenizer, Span(GREEDY, most), Markers.of(engine.tokenizer))
        async with await engine.open(question.prompt(engine)) as seq:
            made = await Draft(seq, context, measured=True).write()
        right = question.right(made.text, made.whole)
        checked = right if question.numbers else None
        return CascadeAnswer(right, made.spent, made.confidence, made.entropy, checked, made.whole)

    return await each(asked, one)


def frontier(small: Sequence[CascadeAnswer], large: Sequence[CascadeAnswer], ratio: float) -> list[BenchRow]:
    """Rows for bars from "never escalate" to "always"; `cost` is that of the large model alone times so much.

    A token of the large model costs `ratio` times one of the small one.
    """
    n = len(small)
    whole = sum(answer.tokens for answer in large) * ratio
    rows = [
        row("cascade/large alone", [a.right for a in large], [a.tokens for a in large], more={"cost": 1.0}),
        row(
            "cascade/small alone", [a.right for a in small], [a.tokens for a in small],
            more={"cost": sum(a.tokens for a in small) / whole},
        ),
    ]  # fmt: skip
    for gate, sure in GATES.items():
        order = sorted(range(n), key=lambda at: (small[at].whole, sure(small[at])))  # the least sure first
        for count in sorted({round(at * n / POINTS) for at in range(POINTS + 1)}):
            up = set(order[:count])
            right = [large[at].right if at in up else small[at].right for at in range(n)]
            tokens = [small[at].tokens + (large[at].tokens if at in up else 0) for at in range(n)]
            cost = sum(a.tokens for a in small) + sum(large[at].tokens for at in up) * ratio
            more = {"cost": cost / whole, "escalated": count / n}
            rows.append(row(f"cascade/{gate}/{count / n:.0%} escalated", right, tokens, more=more))
    return rows


def summary(rows: Sequence[BenchRow]) -> list[str]:
    """For each gate the cheapest point that keeps enough of the large model's accuracy."""
    (alone,) = (each for each in rows if each.name == "cascade/large alone")
    bars = []
    for gate in GATES:
        good = [r for r in rows if r.name.startswith(f"cascade/{gate}/") and r.share >= MIN_COUNT * alone.share]
        best = min(good, key=lambda r: (r.more or {})["cost"])
        cost = (best.more or {})["cost"]
        bars.append(
            f"{gate}: {best.share / alone.share:.1%} of the large model's accuracy at {cost:.0%} of its cost "
            f"({'within' if cost <= MAX_COUNT else 'beyond'} {MAX_COUNT:.0%})"
        )
    return bars
