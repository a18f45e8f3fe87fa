"""Ways of answering, measured: every token counts, whoever wrote it, and what cannot be measured is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine import GREEDY, Engine, EngineConfig, Sampling, Span
from reasoning.evaluate import BadWay, MeasuredWay, Task, Way, measure, wilson
from training import evaluate


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[Engine]:
    async with await Engine.start(EngineConfig(str(model), dtype="float32", kv_blocks=1024)) as engine:
        yield engine


def tasks(count: int, right: str = "", **more: Any) -> list[Task]:
    """Right is what has this text in it; the scripted model answers in small letters."""
    return [
        Task(({"role": "user", "content": f"Say {at}."},), lambda text: right in text, **more) for at in range(count)
    ]


async def measured(engine: Engine, way: Way, count: int = 6, right: str = "", **more: Any) -> tuple[MeasuredWay, int]:
    """The row, and how many tokens the engine made for it."""
    before = (await engine.stats()).generated_tokens
    row = await measure(engine, tasks(count, right), way, **{"span": Span(Sampling(seed=3), 200), **more})
    stats = await engine.stats()
    assert (stats.sequences, stats.running, stats.blocks_used) == (0, 0, 0)
    return row, stats.generated_tokens - before


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("plain", {}), ("best_of_n", {"n": 3}), ("self_consistency", {"n": 4, "compare": "text"}),
     ("tree", {"beam": 2, "depth": 3, "samples": 2, "step_tokens": 8, "nodes": 20})],
)  # fmt: skip
async def test_every_token_that_was_written_counts(engine: Engine, strategy: str, options: dict[str, Any]) -> None:
    row, made = await measured(engine, Way("it", "it", strategy, options))
    # Stop tokens and markers are made, or appended, without being the answer's text; warming makes a token a fork.
    assert made * 0.6 <= row.tokens * row.n <= made * 1.1
    assert (row.name, row.curve, row.n, row.failed) == ("it", "it", 6, 0) and row.right + row.cut == 6


async def test_thinking_is_told_apart_and_can_be_turned_off(engine: Engine) -> None:
    thought, _ = await measured(engine, Way("on", "on", "budget", {"min_tokens": 12, "max_tokens": 20}))
    off, _ = await measured(engine, Way("off", "off", thinking=False))
    assert 12 <= thought.thinking <= 20 < thought.tokens + 20 and off.thinking == 0 < off.tokens


async def test_what_a_limit_cut_is_wrong(engine: Engine) -> None:
    row, _ = await measured(engine, Way("short", "short"), span=Span(Sampling(seed=3), 2))
    assert row.cut == 6 and row.right == 0 and row.tokens == 2
    none, _ = await measured(engine, Way("plain", "plain"), right="0")
    assert none.right == 0 and none.low == 0 < none.high < 0.5


async def test_a_question_too_long_for_the_context_fails_alone(model: Path) -> None:
    config = EngineConfig(str(model), dtype="float32", kv_blocks=64, max_model_len=120)
    async with await Engine.start(config) as engine:
        asked = [*tasks(2), Task(({"role": "user", "content": "x" * 200},), lambda text: True)]
        row = await measure(engine, asked, Way("plain", "plain"), span=Span(GREEDY, 40))
    assert row.failed == 1 and row.n == 3 and row.right + row.cut == 2


async def test_the_same_seed_measures_the_same(engine: Engine) -> None:
    way = Way("three", "three", "best_of_n", {"n": 3, "temperature": 1.0})
    first, again = (await measured(engine, way))[0], (await measured(engine, way))[0]
    assert (first.right, first.tokens, first.thinking) == (again.right, again.tokens, again.thinking)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (Way("w", "w", "wish"), "wish.*best_of_n"), (Way("w", "w", "best_of_n", {"m": 2}), "strategy_options.m"),
        (Way("w", "w", "plain", {"n": 2}), "no options"),
        (Way("w", "w", "best_of_n", {"verifier": "checker"}), "judge"),
    ],
)  # fmt: skip
async def test_ways_that_cannot_be_measured_are_refused(engine: Engine, way: Way, words: str) -> None:
    with pytest.raises(BadWay, match=words):
        await measured(engine, way)
    assert (await engine.stats()).sequences == 0
    with pytest.raises(BadWay, match="no tasks"):
        await measure(engine, [], Way("plain", "plain"))


async def test_a_checker_that_knows_no_answer_may_verify(engine: Engine) -> None:
    asked = tasks(2, checker=lambda text: 1.0)
    way = Way("checked", "checked", "best_of_n", {"n": 3, "verifier": "checker", "enough": 1.0})
    assert (await measure(engine, asked, way)).failed == 0


async def test_who_cancels_leaves_nothing(engine: Engine) -> None:
    told: list[int] = []
    job = asyncio.ensure_future(
        measure(engine, tasks(40), Way("b", "b", "best_of_n", {"n": 4}), at_once=8, done=told.append)
    )
    while not told:
        await asyncio.sleep(0)
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)
    assert job.cancelled() and len(told) < 40
    assert (await engine.stats()).sequences == 0


def test_intervals_are_those_of_training() -> None:
    for n in (1, 10, 300):
        for right in {0, 1, n // 2, n}:
            assert wilson(right, n) == pytest.approx(evaluate.wilson(right, n))
            low, high = wilson(right, n)
            assert low <= right / n <= high
