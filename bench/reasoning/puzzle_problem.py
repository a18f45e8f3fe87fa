"""Number puzzles as a problem for `reasoning.tree`, and searches without a model that it must beat.

The rules are `training.puzzle`'s; states are the numbers that are left. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from reasoning.tree import Asking, Reply, Thought
from training import puzzle
from training.puzzle import Numbers, PuzzleStep


@dataclass(frozen=True, slots=True)
class Left:
    """The numbers that are left, in the order of the last step; equal ones are one state, by any path."""

    key: Numbers
    numbers: Numbers = field(compare=False)
    steps: tuple[PuzzleStep, ...] = field(compare=False, default=())

    @classmethod
    def of(cls, numbers: Sequence[int], steps: tuple[PuzzleStep, ...] = ()) -> Left:
        return cls(tuple(sorted(numbers)), tuple(numbers), steps)


class PuzzleProblem:
    """Make `target` of `numbers`, each used once.

    All its prompts begin alike, and the two of a state up to where they ask for this or for that. A search begins with
    `head`, and a state's branch has its numbers besides, so that neither is computed twice.
    """

    writes_on = False
    stop: tuple[str, ...] = ()

    def __init__(self, numbers: Sequence[int], target: int, asking: Asking) -> None:
        self.start = Left.of(numbers)
        self._target = target
        self._asking = asking
        some = [self.start, Left.of((1,)), Left.of((20, 3)), Left.of((999, 4, 56))]
        self.head = _alike([whole for state in some for whole in self.wholes(state)])

    def wholes(self, state: Left) -> tuple[list[int], list[int]]:
        """The prompts that ask for steps from a state and for its value, from their first token on."""
        head, texts = self._asking.head(), (puzzle.propose_prompt, puzzle.value_prompt)
        propose, value = ([*head, *self._asking.question(ask(state.numbers, self._target))] for ask in texts)
        return propose, value

    def propose_prompt(self, state: Left) -> Sequence[int]:
        propose, _ = self.wholes(state)
        return propose[self._standing(state) :]

    def value_prompt(self, state: Left) -> Sequence[int]:
        _, value = self.wholes(state)
        return value[self._standing(state) :]

    def read(self, state: Left, reply: Reply) -> Sequence[Thought[Left]]:
        taken = (puzzle.read_step(line, state.numbers) for line in reply.text.splitlines())
        return [self._thought(step, (*state.steps, step)) for step in taken if step is not None]

    def _thought(self, step: PuzzleStep, steps: tuple[PuzzleStep, ...]) -> Thought[Left]:
        state = Left.of(step.state, steps)
        kept = () if self.done(state) else tuple(_alike(self.wholes(state))[len(self.head) :])
        return Thought(str(step), state, kept, afresh=True)

    def _standing(self, state: Left) -> int:
        """Returns how many tokens of a state's prompts stand in its branch already: the first state's has the head
        alone."""
        return len(_alike(self.wholes(state)) if state.steps else self.head)

    def check(self, state: Left) -> float | None:
        return None if len(state.numbers) > 1 else float(state.numbers[0] == self._target)

    def done(self, state: Left) -> bool:
        return len(state.numbers) == 1

    def answer(self, state: Left) -> str:
        return "\n".join(map(str, state.steps))


def _alike(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Returns their common prefix."""
    same = [tokens[0] for tokens in zip(*prompts, strict=False) if len(set(tokens)) == 1]
    first = next((at for at, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1), len(same))
    return same[:first]


def leads_to(answer: str, numbers: Sequence[int], target: int) -> bool:
    """Returns whether the steps of an answer are legal one after the other and end at the target."""
    left = tuple(numbers)
    for line in answer.split("\n"):
        step = puzzle.read_step(line, left)
        if step is None:
            return False
        left = step.state
    return left == (target,)


def random_search(numbers: Sequence[int], target: int, states: int, rng: Random) -> bool:
    """Returns whether random legal play-outs reach the target while they visit so many states, the first one not
    counted."""
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
