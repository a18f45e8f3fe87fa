"""Thinking about a number puzzle: a search that tries, checks, rejects and tries again, written in few tokens.

    >>> print(trace(Random(95), (3, 5, 7, 9), 24, 1.0).thinking)
    3 5 7 9 to 24
    9-7=2 3 5
    3+5=8 2 no
    Wait, 7-5=2 3 9
    9-2=7 3 yes
    7*3=21. Wait, not 24.
    3+9=12 2 yes
    12*2=24=(3+9)*2=(3+9)*(7-5)

A line is a step and the rest after it. With two numbers left it ends in `no`, or in `yes` and the last step, into
which the steps before are put one by one. `Wait,` gives up a first step, or a `yes` that was wrong. Rejected steps are
real failures, sampled by a rule of thumb that a small model can learn. Knows nothing of wording.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from training.puzzle import Numbers, PuzzleStep, routes, steps

GIVEN_UP = "I found no solution."
HABIT = 0.88  # a step's weight over that of the one before: a habitual order is easier to learn, and not to repeat
CLOSE = 6  # how far the last step of a wrong `yes` may be from the target


@dataclass(frozen=True, slots=True)
class CountdownTrace:
    thinking: str
    answer: str


def promise(step: PuzzleStep, target: int) -> float:
    """The rule of thumb: small results, and a number among those left that divides the target."""
    if step.value == 0:
        return 0.03
    weight = 0.8 if step.operator == "/" else 1.0
    if (step.operator in "*/" and step.right == 1) or (step.operator == "*" and step.left == 1):
        weight = 0.4
    weight *= 0.15 if step.value > 2 * target else 0.6 if step.value > target else 1.0
    return weight * (1.6 if any(number > 1 and target % number == 0 for number in step.state) else 1.0)


def draw(rng: Random, among: Sequence[PuzzleStep], target: int, count: int, sharpness: float = 3.0) -> list[PuzzleStep]:
    """Up to `count` of them, the promising and the earlier ones rather first; none with the same rest as another."""
    left = [(step, promise(step, target) ** sharpness * HABIT**at) for at, step in enumerate(among)]
    chosen: list[PuzzleStep] = []
    while left and len(chosen) < count:
        step = rng.choices(left, [weight for _, weight in left])[0][0]
        chosen.append(step)
        left = [(other, weight) for other, weight in left if sorted(other.state) != sorted(step.state)]
    return chosen


def path(rng: Random, state: Numbers, target: int) -> tuple[PuzzleStep, ...]:
    """Steps to the target, as a rule the most promising ones. The state must have a solution."""
    found: list[PuzzleStep] = []
    while len(state) > 1:
        good = [step for step in steps(state) if routes(step.state, target)]
        best = draw(rng, good, target, 1, sharpness=6.0)[0]
        found.append(best)
        state = best.state
    return tuple(found)


def expressions(taken: Sequence[PuzzleStep]) -> list[str]:
    """The last step, then the same with the earlier steps put in, the latest first."""
    last = taken[-1]
    tokens = [str(last.left), last.operator, str(last.right)]
    written = ["".join(tokens)]
    for step in reversed(taken[:-1]):
        at = tokens.index(str(step.value))
        tokens[at : at + 1] = ["(", str(step.left), step.operator, str(step.right), ")"]
        written.append("".join(tokens))
    return written


def answer(taken: Sequence[PuzzleStep], target: int) -> str:
    return re.sub(r"(?<=[\d)])([-+*/])", r" \1 ", expressions(taken)[-1]) + f" = {target}"


def _rejected(rng: Random, state: Numbers, target: int, count: int, wrong_yes: bool) -> list[str]:
    """Lines of tries that leave two numbers which do not make the target."""
    tried = draw(rng, [step for step in steps(state) if not routes(step.state, target)], target, count)
    lines = [f"{step} no" for step in tried]
    if wrong_yes and tried:
        last = [min(steps(step.state), key=lambda made: abs(made.value - target)) for step in tried]
        at = min(range(len(last)), key=lambda i: abs(last[i].value - target))
        if abs(last[at].value - target) <= CLOSE:
            lines[at : at + 1] = [f"{tried[at]} yes", f"{last[at]}. Wait, not {target}."]
    return lines


def _few(rng: Random, progress: float, weights: Sequence[int]) -> int:
    """Samples an index by weight; at first only the lowest."""
    usual = max(1, round(len(weights) * min(1.0, 0.2 + 1.6 * progress)))
    return rng.choices(range(usual), weights[:usual])[0]


def trace(rng: Random, numbers: Numbers, target: int, progress: float) -> CountdownTrace:
    """A search that ends well, or in `GIVEN_UP` when there is no solution."""
    lines = [f"{' '.join(map(str, numbers))} to {target}"]
    solvable = routes(numbers, target) > 0
    taken = path(rng, numbers, target) if solvable else ()
    if len(numbers) == 4:
        rejected = _few(rng, progress, (44, 22, 13, 8, 5, 4, 2, 1, 1)) if solvable else rng.randint(6, 8)
        wrong = [step for step in steps(numbers) if not routes(step.state, target)]
        firsts = draw(rng, wrong, target, rejected)
        doubted = rng.randrange(len(firsts) + 1) if rng.random() < min(0.5, progress) else -1
        for at, first in enumerate(firsts):
            lines.append("Wait, " * (at > 0) + str(first))
            count = 1 + _few(rng, progress, (4, 10, 20, 25, 20))
            lines += _rejected(rng, first.state, target, count, doubted == at)
        if solvable:
            lines.append("Wait, " * bool(firsts) + str(taken[0]))
            count = _few(rng, progress, (40, 25, 20, 15))
            lines += _rejected(rng, taken[0].state, target, count, doubted == len(firsts))
    elif len(numbers) == 3:
        count = _few(rng, progress, (30, 25, 20, 15, 10)) if solvable else rng.randint(5, 8)
        lines += _rejected(rng, numbers, target, count, rng.random() < min(0.5, progress))
    if not solvable:
        return CountdownTrace("\n".join(lines), GIVEN_UP)
    if len(numbers) > 2:
        lines.append(f"{taken[-2]} yes")
    written = expressions(taken)
    lines.append("=".join([written[0], str(target), *written[1:]]))
    return CountdownTrace("\n".join(lines), answer(taken, target))
