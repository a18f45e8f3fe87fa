"""K/V that is offloaded and loaded, on a real model: the same greedy ids, whether copies fail or not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import GREEDY, Engine, EngineConfig, InvalidParameter, Span
from engine.kv_cache.snapshot import HEADER_BYTES, layout_of
from engine.model.numerics import Numerics
from tests.engine.kv_below import Eager

SPAN = Span(GREEDY, max_tokens=8, ignore_eos=True)
BLOCK = 3 * 2 * 4 * 2 * 16 * 4  # bytes of a block of the tests' model: layers, K and V, tokens, heads, width, float32


def prompt(text: int, length: int) -> list[int]:
    return [(text * 131 + i * i * 7 + i) % 300 + 3 for i in range(length)]


def config(model: Path, **options: object) -> EngineConfig:
    return EngineConfig(str(model), dtype="float32", block_size=4, **options)  # type: ignore[arg-type]  # options


async def ask(engine: Engine, tokens: list[int]) -> tuple[int, ...]:
    async with await engine.open(tokens) as seq:
        return (await seq.generate_all(SPAN)).token_ids


@pytest.fixture(scope="module")
def answers(random_model: Path) -> dict[tuple[int, int], tuple[int, ...]]:
    return {}


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mix=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 70)), min_size=4, max_size=12),
    blocks=st.sampled_from([24, 32, 60]),
    rows=st.sampled_from([0, 6, 200]),
    files=st.sampled_from([0, 10, 400]),
    restart=st.booleans(),
    loop=st.sampled_from(["plain", "overlapped"]),
)
def test_tiers_preemption_and_a_restart_never_change_an_answer(
    random_model: Path,
    answers: dict[tuple[int, int], tuple[int, ...]],
    tmp_path_factory: pytest.TempPathFactory,
    mix: list[tuple[int, int]],
    blocks: int,
    rows: int,
    files: int,
    restart: bool,
    loop: str,
) -> None:
    async def run() -> None:
        missing = [key for key in mix if key not in answers]
        if missing:
            async with await Engine.start(config(random_model, kv_blocks=64, prefix_cache=False)) as fresh:
                for key in missing:
                    answers[key] = await ask(fresh, prompt(*key))
        directory = str(tmp_path_factory.mktemp("kv"))
        crowded = config(
            random_model,
            kv_blocks=blocks,
            loop=loop,
            kv_host_bytes=rows * BLOCK,
            kv_disk_bytes=files * (HEADER_BYTES + BLOCK),
            kv_dir=directory if files else None,
        )
        for _ in range(1 + restart):
            async with await Engine.start(crowded) as engine:
                for half in (mix[::2], mix[1::2], mix):
                    results = await asyncio.gather(*(ask(engine, prompt(*key)) for key in half))
                    assert results == [answers[key] for key in half]
                engine._core.check()
                assert (await engine.stats()).blocks_used == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_host_bytes": -1}, "0 for none"),
        ({"kv_disk_bytes": 1 << 20}, "kv_dir is not"),
        ({"kv_host_bytes": 1 << 20, "prefix_cache": False}, "prefix_cache on"),
        ({"kv_host_bytes": 10}, "one block of this model"),
    ],
)
async def test_tiers_that_cannot_be_are_refused(random_model: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        await Engine.start(config(random_model, kv_blocks=8, **options))


@pytest.mark.parametrize("tier", ["kv_host_bytes", "kv_disk_bytes"])
async def test_what_was_evicted_is_copied_back_and_not_read_again(
    random_model: Path, tmp_path: Path, tier: str
) -> None:
    below = {tier: 1 << 20, "kv_dir": str(tmp_path)}
    async with await Engine.start(config(random_model, kv_blocks=24, **below)) as engine:
        assert engine._core._tiers is not None
        engine._core._tiers.rates = Eager()  # a model so small would rather compute
        first = await ask(engine, prompt(0, 60))
        for text in (1, 2, 1, 2):
            await ask(engine, prompt(text, 70))
        async with await engine.open(prompt(0, 60)) as seq:
            again = await seq.generate_all(SPAN)
        stats = (await engine.stats()).tiers
    assert again.token_ids == first and again.cached_tokens == 59
    assert stats.host_hit_blocks + stats.disk_hit_blocks > 0


@pytest.mark.parametrize(
    "changed",
    [{"quantization": "int8"}, {"kernels": "torch"}, {"dtype": "float16"}, {"batch_invariant": False}, {"threads": 2}],
)
def test_blocks_of_other_weights_or_kernels_are_not_taken(changed: dict[str, Any]) -> None:
    """Holds the fingerprint that a block is found by to name everything that computes keys and values."""
    shape, config = (2, 9, 4), EngineConfig("none")
    numerics = Numerics("bfloat16", "AMX", "none", "auto", "cpu", "AVX512", 0, "2.13", batch_invariant=True)
    before, after = (layout_of(b"model", config, each, shape) for each in (numerics, replace(numerics, **changed)))
    assert before != after
    assert before != layout_of(b"model", EngineConfig("none", block_size=8), numerics, shape)
    more = EngineConfig("none", max_running=3)
    assert before == layout_of(b"model", more, numerics, shape), "what computes nothing is not"
