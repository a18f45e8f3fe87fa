"""Number puzzles as a problem for `reasoning.tree`, and searches without a model that it must beat.

The rules are `training.puzzle`'s; states are the numbers that are left. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from reasoning.tree import Asking, Reply, Thought
from training import puzzle
from training.puzzle import Numbers, Step


@dataclass(frozen=True, slots=True)
class Left:
    """The numbers that are left, in the order of the last step; equal ones are one state, whatever the way there."""

    key: Numbers
    numbers: Numbers = field(compare=False)
    steps: tuple[Step, ...] = field(compare=False, default=())

    @classmethod
    def of(cls, numbers: Sequence[int], steps: tuple[Step, ...] = ()) -> Left:
        return cls(tuple(sorted(numbers)), tuple(numbers), steps)


class Puzzle:
    """Make `target` of `numbers`, each used once."""

    writes_on = False
    stop: tuple[str, ...] = ()

    def __init__(self, numbers: Sequence[int], target: int, asking: Asking) -> None:
        self.start = Left.of(numbers)
        self._target = target
        self._asking = asking

    def propose_prompt(self, state: Left) -> Sequence[int]:
        return self._asking.question(puzzle.propose_prompt(state.numbers, self._target))

    def value_prompt(self, state: Left) -> Sequence[int]:
        return self._asking.question(puzzle.value_prompt(state.numbers, self._target))

    def read(self, state: Left, reply: Reply) -> Sequence[Thought[Left]]:
        taken = (puzzle.read_step(line, state.numbers) for line in reply.text.splitlines())
        return [Thought(str(step), Left.of(step.state, (*state.steps, step))) for step in taken if step is not None]

    def check(self, state: Left) -> float | None:
        return None if len(state.numbers) > 1 else float(state.numbers[0] == self._target)

    def done(self, state: Left) -> bool:
        return len(state.numbers) == 1

    def answer(self, state: Left) -> str:
        return "\n".join(map(str, state.steps))


def leads_to(answer: str, numbers: Sequence[int], target: int) -> bool:
    """Whether the steps of an answer are legal one after the other and end at the target."""
    left = tuple(numbers)
    for line in answer.split("\n"):
        step = puzzle.read_step(line, left)
        if step is None:
            return False
        left = step.state
    return left == (target,)


def random_search(numbers: Sequence[int], target: int, states: int, rng: Random) -> bool:
    """Whether random legal play-outs reach the target while they visit so many states, the first one not counted."""
    visited = 0
    while visited < states:
        left: Numbers = tuple(numbers)
        while len(left) > 1 and visited < states:
            ways = puzzle.steps(left)
            if not ways:
                break
            left = rng.choice(ways).state
            visited += 1
        if left == (target,):
            return True
    return False
