"""Samples groups of answers with our own engine, in processes of one thread each.

Every worker starts an engine on the policy's weights of the step, which takes a quarter of a second, and answers its
questions many at once. What a step asks, and the seeds that it samples by, depend on (seed, step) alone. Knows nothing
of gradients.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.util import Finalize
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

import torch

from engine import Engine, EngineConfig, Sampling
from training.evaluate import turns
from training.reinforcement import questions
from training.train_tokenizer import TURN_END

KV_BYTES = 1 << 30  # of a worker; touched only as far as it is used


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled answer: for each message of the model the tokens before it and its own, and the reward, 0 to 1."""

    turns: tuple[tuple[list[int], list[int]], ...]
    reward: float


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The answers to one question of a task."""

    task: str
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """Some questions of a step: their number, how many answers each gets, and what seeds them."""

    weights: Path  # a model's folder, another one at each step
    seed: str
    first: int
    questions: int
    answers: int


class RolloutWorker:
    """Keeps the engine of the weights that were asked for last."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine: Engine | None = None
        self._weights: Path | None = None

    def answer(self, asked: RolloutRequest) -> list[RolloutGroup]:
        return self._loop.run_until_complete(self._answer(asked))

    def close(self) -> None:
        """Stops the engine."""
        if self._engine is not None:
            self._loop.run_until_complete(self._engine.stop())
            self._engine = None
        self._loop.close()

    async def _answer(self, asked: RolloutRequest) -> list[RolloutGroup]:
        if self._engine is None or self._weights != asked.weights:
            if self._engine is not None:
                await self._engine.stop()
            config = EngineConfig(model=str(asked.weights), device="cpu", threads=1, kv_bytes=KV_BYTES)
            self._engine, self._weights = await Engine.start(config), asked.weights
        engine = self._engine
        return list(
            await asyncio.gather(
                *(group(engine, f"{asked.seed}-{asked.first + at}", asked.answers) for at in range(asked.questions))
            )
        )


async def group(engine: Engine, seed: str, answers: int) -> RolloutGroup:
    """Samples `answers` answers to the question of a seed, at temperature 1, calls held to no schema."""
    rng = Random(f"reinforcement-{seed}")
    task, case = questions.sample(rng)
    first = rng.randrange(1 << 31)
    end = engine.tokenizer.token_id(TURN_END)
    assert end is not None, "the bundled tokenizer has it"

    async def one(number: int) -> Rollout:
        taken = await turns(engine, case, Sampling(temperature=1.0, seed=first + number), free=True)
        said = tuple(
            (turn.prompt, [*turn.result.token_ids, *([end] if turn.result.finish_reason == "stop" else [])])
            for turn in taken
        )
        return Rollout(said, questions.reward(case, [turn.reply for turn in taken]))

    return RolloutGroup(task, tuple(await asyncio.gather(*(one(number) for number in range(answers)))))


_of_worker: list[RolloutWorker] = []


def _start_worker() -> None:
    torch.set_num_threads(1)
    _of_worker[:] = [RolloutWorker()]
    Finalize(None, _of_worker[0].close, exitpriority=1)  # a process of a pool runs no `atexit`


def _answer_in_worker(asked: RolloutRequest) -> list[RolloutGroup]:
    return _of_worker[0].answer(asked)


class RolloutWorkers:
    """The processes; close them by leaving `with`."""

    def __init__(self, count: int) -> None:
        self._pool = ProcessPoolExecutor(count, get_context("spawn"), _start_worker)

    def sample(self, weights: Path, seed: str, groups: int, answers: int, at_once: int = 2) -> Iterator[RolloutGroup]:
        """Yields so many groups of `answers` answers each, `at_once` questions of one worker at a time."""
        asked = [
            RolloutRequest(weights, seed, first, min(at_once, groups - first), answers)
            for first in range(0, groups, at_once)
        ]
        for made in self._pool.map(_answer_in_worker, asked):
            yield from made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


def usual_workers() -> int:
    """Returns a process for each core but one, which the learner has."""
    return max(1, (os.cpu_count() or 1) - 1)
