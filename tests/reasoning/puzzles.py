"""Number puzzles as a problem for a search: with the bundled model, and with a model that can't do any."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

from reasoning.tree import Asking, Reply, Thought

_STEP = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")


class Left:
    """The numbers that are left; equal ones are one state, whatever the way there."""

    def __init__(self, numbers: Sequence[int], steps: tuple[str, ...] = ()) -> None:
        self.numbers = tuple(numbers)
        self.steps = steps

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Left) and sorted(self.numbers) == sorted(other.numbers)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.numbers)))


class Puzzle:
    """Make `target` of `numbers`, each used once. `asking` is the model's chat format."""

    writes_on = False
    stop: tuple[str, ...] = ()

    def __init__(self, numbers: Sequence[int], target: int, asking: Asking) -> None:
        self.start = Left(numbers)
        self.target = target
        self.asking = asking

    def propose_prompt(self, state: Left) -> Sequence[int]:
        return self.asking.question(f"{self._said(state)} Propose next steps.")

    def value_prompt(self, state: Left) -> Sequence[int]:
        return self.asking.question(f"{self._said(state)} Judge: sure, likely or impossible?")

    def read(self, state: Left, reply: Reply) -> Sequence[Thought[Left]]:
        legal = {str(thought.text): thought for thought in steps(state)}
        found = (_STEP.match(line) for line in reply.text.splitlines())
        return [legal[match[0]] for match in found if match is not None and match[0] in legal]

    def check(self, state: Left) -> float | None:
        return None if len(state.numbers) > 1 else float(state.numbers[0] == self.target)

    def done(self, state: Left) -> bool:
        return len(state.numbers) == 1

    def answer(self, state: Left) -> str:
        return ", ".join(state.steps)

    def _said(self, state: Left) -> str:
        return f"Numbers: {' '.join(map(str, state.numbers))}. Target: {self.target}."


def steps(state: Left) -> list[Thought[Left]]:
    """All legal ones, within whole numbers."""
    found: list[Thought[Left]] = []
    for i, j in combinations(range(len(state.numbers)), 2):
        rest = [n for at, n in enumerate(state.numbers) if at not in (i, j)]
        for left, right in ((state.numbers[i], state.numbers[j]), (state.numbers[j], state.numbers[i])):
            made = {"+": left + right, "-": left - right, "*": left * right}
            if right and left % right == 0:
                made["/"] = left // right
            for operator, value in made.items():
                if 0 <= value <= 999:
                    text = f"{left}{operator}{right}={value}"
                    found.append(Thought(text, Left([value, *rest], (*state.steps, text))))
    return found


def holds(answer: str, numbers: Sequence[int], target: int) -> bool:
    """Returns whether the steps of an answer lead from the numbers to the target: the oracle, apart from the search."""
    left = list(map(Fraction, numbers))
    for step in answer.split(", "):
        match = _STEP.fullmatch(step)
        if match is None:
            return False
        first, operator, second, value = Fraction(match[1]), match[2], Fraction(match[3]), Fraction(match[4])
        made = {"+": first + second, "-": first - second, "*": first * second, "/": first / second if second else None}
        if made[operator] != value:
            return False
        for number in (first, second):
            if number not in left:
                return False
            left.remove(number)
        left.append(value)
    return left == [target]
