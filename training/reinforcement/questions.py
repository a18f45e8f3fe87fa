"""The questions whose answers are rewarded: those of the evaluation's kinds, but in training's words, names, tools,
and passages, so that the evaluation stays unseen. Puzzles are left out: a step waits for its longest answer, and theirs
are ten times as long. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from training.conversation import Case, ModelReply
from training.evaluate import judged
from training.tasks import calculator, database, grounded, joint, tool_choice


@dataclass(frozen=True, slots=True)
class RewardedTask:
    """`share` is that of the questions; `make` samples one."""

    share: float
    make: Callable[[Random], Case]


def _tools(kind: tool_choice.Kind) -> Callable[[Random], Case]:
    return lambda rng: tool_choice.case(rng, rng.randint(1, 8), kind, "train")


def _made_up(*, present: bool) -> Callable[[Random], Case]:
    return lambda rng: grounded.case(rng, rng.randint(1, 6), present, "train")


def _prose(*, present: bool) -> Callable[[Random], Case]:
    return lambda rng: grounded.prose_case(rng, rng.randint(1, 6), present, "train")


TASKS = {
    "one of several tools": RewardedTask(14, _tools("call")),
    "no tool fits": RewardedTask(10, _tools("none")),
    "several calls": RewardedTask(6, _tools("several")),
    "a failed call": RewardedTask(5, _tools("repair")),
    "calculator": RewardedTask(9, lambda rng: calculator.case(rng, phrasing="train")),
    "made-up facts": RewardedTask(14, _made_up(present=True)),
    "made-up facts, absent": RewardedTask(8, _made_up(present=False)),
    "real prose": RewardedTask(5, _prose(present=True)),
    "real prose, absent": RewardedTask(4, _prose(present=False)),
    "sources and tools": RewardedTask(4, lambda rng: joint.case(rng, phrasing="train")),
    "tables": RewardedTask(4, lambda rng: database.case(rng, "train")),
}


def sample(rng: Random) -> tuple[str, Case]:
    """Samples a question, with the name of its task."""
    name = rng.choices(tuple(TASKS), [task.share for task in TASKS.values()])[0]
    return name, TASKS[name].make(rng)


def reward(case: Case, said: Sequence[ModelReply]) -> float:
    """Returns the mean of what the case's judge measures, 0 to 1: a share of the parts where it counts parts."""
    verdict = judged(case, said)
    parts = [float(x) if isinstance(x, bool) else x[0] / max(1, x[1]) for x in verdict.values()]
    return sum(parts) / len(parts)
