"""A differential fuzz: however the engine gets there, greedy ids are those of a fresh single run in fp32.

Chunk size, prefix cache, a pool so small that sequences are preempted, forks, and whatever else is in the batch may
change the order of work, never its result.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import GREEDY, Engine, EngineConfig, Sampling, Span
from engine.config import LoopName

COUNT = 10
prompts = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 70)), min_size=1, max_size=6
)  # (which of three texts, how much of it): prefixes are shared


def prompt(text: int, length: int) -> list[int]:
    return [(text * 131 + i * i * 7 + i) % 300 + 3 for i in range(length)]


async def generate(engine: Engine, tokens: list[int], forks: int, noise: bool) -> list[tuple[int, ...]]:
    """Greedy ids of the sequence itself, or of a fork made in the middle; and of a sampled neighbour, dropped."""
    span = Span(GREEDY, max_tokens=COUNT, ignore_eos=True)
    async with await engine.open(tokens) as seq:
        if not forks:
            return [(await seq.generate_all(span)).token_ids]
        half = await seq.generate_all(Span(GREEDY, max_tokens=COUNT // 2, ignore_eos=True))
        rest = Span(GREEDY, max_tokens=COUNT - COUNT // 2, ignore_eos=True)
        kids = seq.fork(forks + noise)
        jobs = [kid.generate_all(rest) for kid in kids[:forks]]
        if noise:
            jobs.append(kids[-1].generate_all(Span(Sampling(seed=1), max_tokens=30, ignore_eos=True)))
        return [half.token_ids + r.token_ids for r in (await asyncio.gather(*jobs))[:forks]]


@pytest.fixture(
    scope="module",
    params=[
        "random_model",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                *("random_hybrid", "random_mixture", "random_latent", "random_recurrent", "random_mamba"),
                *("random_hybrid_mixture", "random_beside", "random_alone", "random_gemma4", "random_llama4"),
                "random_windows",
            )
        ),
    ],
)
def any_model(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def answers(any_model: Path) -> dict[tuple[int, int], tuple[int, ...]]:
    """Of each model its own."""
    return {}


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mix=prompts,
    budget=st.sampled_from([3, 16, 50, 512]),
    prefix_cache=st.booleans(),
    blocks=st.sampled_from([28, 40, 256]),
    forks=st.integers(0, 3),
    noise=st.booleans(),
    loop=st.sampled_from(get_args(LoopName)),
)
def test_every_way_of_running_gives_the_answer_of_a_fresh_single_run(
    any_model: Path,
    answers: dict[tuple[int, int], tuple[int, ...]],
    mix: list[tuple[int, int]],
    budget: int,
    prefix_cache: bool,
    blocks: int,
    forks: int,
    noise: bool,
    loop: LoopName,
) -> None:
    async def run() -> None:
        plain = EngineConfig(str(any_model), dtype="float32", kv_blocks=64, prefix_cache=False, max_running=1)
        missing = [key for key in mix if key not in answers]
        if missing:
            async with await Engine.start(plain) as fresh:
                for key in missing:
                    (answers[key],) = await generate(fresh, prompt(*key), 0, False)
        config = EngineConfig(
            str(any_model),
            dtype="float32",
            block_size=4,
            kv_blocks=blocks,
            prefix_cache=prefix_cache,
            max_batch_tokens=budget,
            loop=loop,
        )
        async with await Engine.start(config) as engine:
            results = await asyncio.gather(*(generate(engine, prompt(*key), forks, noise) for key in mix))
            for key, ids in zip(mix, results, strict=True):
                assert ids == [answers[key]] * max(1, forks)
            engine._core.check()
            assert (await engine.stats()).blocks_used == 0

    asyncio.run(run())


async def test_the_pool_was_small_enough_to_preempt(any_model: Path) -> None:
    """The fuzz above means what it says: with its smallest pool, sequences do lose their K/V and still agree."""
    config = EngineConfig(str(any_model), dtype="float32", block_size=4, kv_blocks=20, prefix_cache=False)
    span = Span(GREEDY, max_tokens=60, ignore_eos=True)  # so long that they run together, whenever each begins
    async with await Engine.start(config) as engine:
        opened = [await engine.open(prompt(i, 10)) for i in range(3)]
        crowded = await asyncio.gather(*(seq.generate_all(span) for seq in opened))
        assert (await engine.stats()).preemptions > 0
        for seq in opened:
            seq.close()
        for i, found in enumerate(crowded):
            async with await engine.open(prompt(i, 10)) as seq:
                assert found.token_ids == (await seq.generate_all(span)).token_ids
