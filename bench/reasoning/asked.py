"""The questions: puzzles of the evaluation, and sums of a seed that training never has. And rows of their results.

Knows nothing of how they are answered.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations_with_replacement
from pathlib import Path
from random import Random
from typing import Literal, TypeVar

from engine import Engine
from reasoning.evaluate import wilson
from training import puzzle
from training.conversation import Case, Conversation, Message, ModelReply, Verdict
from training.tasks import arithmetic, countdown

MODELS = Path(__file__).parents[2] / "models"
SEED = 20_000_023
MAX_TOKENS = 2048  # of an answer, thinking included
AT_ONCE = 128  # sequences in a batch

Kind = Literal["game24", "countdown4", "arithmetic"]
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class BenchQuestion:
    """A case, and the numbers and target of a puzzle; none for a sum."""

    case: Case
    numbers: tuple[int, ...] = ()
    target: int = 0

    def right(self, text: str, whole: bool = True) -> bool:
        (verdict,) = (
            v for k, v in self.case.judge([ModelReply("", text.strip(), (), not whole)]).items() if "right" in k
        )
        return verdict is True

    def prompt(self, engine: Engine) -> list[int]:
        return engine.tokenizer.apply_chat_template(self.case.prompt.as_json())


@dataclass(frozen=True, slots=True)
class BenchRow:
    """`tokens` and `thinking` are means an answer; `low` to `high` contains the true share with 95% confidence."""

    name: str
    n: int
    share: float
    low: float
    high: float
    tokens: float
    thinking: float = 0.0
    more: dict[str, float] | None = None


def row(
    name: str,
    right: Sequence[bool],
    tokens: Sequence[float],
    thinking: Sequence[float] = (),
    more: dict[str, float] | None = None,
) -> BenchRow:
    n, k = len(right), sum(right)
    mean = sum(thinking) / n if thinking else 0.0
    return BenchRow(name, n, k / n, *wilson(k, n), sum(tokens) / n, mean, more)


def expected(name: str, n: int, share: float, tokens: float, more: dict[str, float] | None = None) -> BenchRow:
    """Of a random choice with a known expected share: the interval of as many questions."""
    return BenchRow(name, n, share, *wilson(share * n, n), tokens, 0.0, more)


def questions(kind: Kind, n: int, *, choosing: bool = False) -> list[BenchQuestion]:
    """Different ones, none of which is in the training set by the puzzles' rule or by its seed.

    Puzzles for `choosing` options are others than those that are measured, as long as both are enough.

    Raises:
        ValueError: there are not so many puzzles.
    """
    rng = Random(f"{SEED}-{kind}-{choosing}")
    if kind == "arithmetic":
        sums: dict[str, BenchQuestion] = {}
        while len(sums) < n:
            case = arithmetic.case(rng, rng.choice("+-×/"))
            sums.setdefault(case.prompt.messages[0].content, BenchQuestion(case))
        return list(sums.values())
    if kind == "countdown4":
        return [BenchQuestion(countdown.case(rng, kind)) for _ in range(n)]
    kept = _kept()
    if n > len(kept):
        raise ValueError(f"there are {len(kept)} puzzles that training leaves out; accepted: at most so many")
    return [_question(rng, numbers) for numbers in (kept[-n:] if choosing else kept[:n])]


@lru_cache(maxsize=1)
def _kept() -> tuple[tuple[int, ...], ...]:
    """Every game of 24 that training leaves out and that has a solution, shuffled."""
    every = [numbers for numbers in combinations_with_replacement(range(1, 14), 4) if puzzle.excluded(numbers, 24)]
    Random(SEED).shuffle(every)
    return tuple(numbers for numbers in every if puzzle.solve(numbers, 24) is not None)


def _question(rng: Random, numbers: tuple[int, ...]) -> BenchQuestion:
    numbers = tuple(rng.sample(numbers, len(numbers)))
    asked = countdown.ask(rng, "held_out", numbers, 24)
    case = replace(countdown.case(rng, "game24"), prompt=Conversation((Message("user", asked),)))
    return BenchQuestion(replace(case, judge=_judge(numbers)), numbers, 24)


def _judge(numbers: tuple[int, ...]) -> Callable[[Sequence[ModelReply]], Verdict]:
    return lambda said: {"right answer": not said[-1].broken and puzzle.check(said[-1].content, numbers, 24)}


async def each(items: Sequence[T], do: Callable[[T], Awaitable[U]], at_once: int = AT_ONCE) -> list[U]:
    """`do` for all, so many at once."""
    gate = asyncio.Semaphore(at_once)

    async def one(item: T) -> U:
        async with gate:
            return await do(item)

    return await asyncio.gather(*map(one, items))


def tell(made: BenchRow) -> BenchRow:
    """The row, shown as soon as it is there."""
    print(f"  {made.name}: {made.share:.1%}, {made.tokens:.0f} tokens", file=sys.stderr, flush=True)
    return made
