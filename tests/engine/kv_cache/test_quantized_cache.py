"""The quantized cache: codes near the written values, attention over them right, and every way of running the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from engine import Engine, InvalidParameter
from engine.config import KvDType
from engine.kernels import cpu
from engine.kv_cache.quantized_cache import Coding, QuantizedCache
from engine.model.attention import AttentionPlan, paged
from engine.model.batch import Batch, KVCache
from engine.model.memory import block_bytes
from engine.model.model_spec import ModelSpec
from tests.engine.kv_below import Eager
from tests.engine.kv_cache.test_kv_tiers import ask, config, prompt

SHAPE = (2, 9, 4, 2, 32)  # layers, blocks, block size, heads, width
CODINGS: tuple[Coding, ...] = get_args(Coding)
# Any: fields. On kernels a token's codes are the same bits in any step; in float32 on torch one may be its neighbour.
INT4: dict[str, Any] = {"dtype": "bfloat16", "deterministic": cpu.library() is None, "kv_max_kl": 1.0}


def filled(
    seed: int = 0, coding: Coding = "int8"
) -> tuple[QuantizedCache, KVCache, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The same K/V in both kinds of cache, as far as the codes say it: every slot is written. And what was, by layer:
    as it was given, and as it is read back.
    """
    torch.manual_seed(seed)
    quantised = QuantizedCache(*SHAPE, torch.float32, "cpu", coding)
    plain = KVCache(*SHAPE, torch.float32, "cpu")
    slots = torch.randperm(SHAPE[1] * SHAPE[2])
    written = list[tuple[torch.Tensor, torch.Tensor]]()
    for layer, floats in zip(quantised.layers(), plain.layers(), strict=True):
        new = torch.randn(2, len(slots), *SHAPE[3:]) * 10 ** torch.randn(2, len(slots), SHAPE[3], 1)
        layer.store(slots, new)
        blocks = torch.arange(2 * SHAPE[1])
        layer.gather(blocks, floats.view(2 * SHAPE[1], -1))
        kept = floats.view(2, -1, *SHAPE[3:])[:, slots]
        written.append((new, kept))
    return quantised, plain, written


def test_what_is_read_back_is_within_half_a_step_of_what_was_written() -> None:
    for new, kept in filled()[2]:
        assert ((kept - new).abs() <= new.abs().amax(-1, keepdim=True) / 127 * 0.5001).all()


def test_fp8_is_within_a_sixteenth_of_each_number_or_half_a_step_of_the_least() -> None:
    for new, kept in filled(coding="fp8")[2]:
        least = new.abs().amax(-1, keepdim=True) / 448 * 2**-10
        assert ((kept - new).abs() <= torch.maximum(new.abs() / 16, least) * 1.0001).all()


@pytest.mark.parametrize("coding", CODINGS)
def test_zeros_stay_zeros(coding: Coding) -> None:
    cache = QuantizedCache(*SHAPE, torch.float32, "cpu", coding)
    out = torch.ones(1, 4 * 2 * 32)
    cache.layers()[0].store(torch.tensor([4]), torch.zeros(2, 1, 2, 32))
    cache.layers()[0].gather(torch.tensor([1]), out)
    assert not out.any()


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("contexts", [[16], [3, 9], [30]])
@pytest.mark.parametrize("queries", [1, 3])
def test_attention_is_that_over_the_same_numbers_in_full(contexts: list[int], queries: int, coding: Coding) -> None:
    quantised, plain, _ = filled(coding=coding)
    rows = len(contexts)
    tables = torch.stack([torch.randperm(SHAPE[1] - 1) + 1 for _ in contexts])
    positions = torch.cat([torch.arange(each - queries, each) for each in contexts])
    starts = tuple(range(0, queries * rows + 1, queries))
    batch = Batch(positions, positions, positions, starts, tuple(contexts), tables, positions[:1])
    query = torch.randn(queries * rows, 4, 32)
    found = [
        paged(query, cache.layers()[1], AttentionPlan(batch, cache, (None,), group_heads=2), window=None, scale=0.25)
        for cache in (quantised, plain)
    ]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("coding", CODINGS)
def test_blocks_are_copied_and_kept_as_bytes_whole(coding: Coding) -> None:
    cache, _, _ = filled(coding=coding)
    row = torch.empty(cache.block_nbytes, dtype=torch.uint8)
    cache.read_block(3, row)
    cache.copy_blocks([(5, 3), (3, 7)])
    cache.write_block(2, row)
    for layer in cache.layers():
        for part in (layer.codes, layer.scales):
            assert torch.equal(part[:, 2], part[:, 7])
            assert torch.equal(part[:, 3], part[:, 5]) and not torch.equal(part[:, 2], part[:, 3])


def test_a_block_takes_the_memory_that_is_told() -> None:
    layers, heads, width = SHAPE[0], SHAPE[3], SHAPE[4]
    spec = ModelSpec(*(9, 8, layers, heads, heads, width, 8, 99), windows=(None,) * layers, ropes=(None,) * layers)
    assert KVCache(*SHAPE, torch.float32, "cpu").block_nbytes == block_bytes(spec, SHAPE[2], torch.float32)
    for coding in CODINGS:
        cache = QuantizedCache(*SHAPE, torch.float32, "cpu", coding)
        assert cache.block_nbytes == block_bytes(spec, SHAPE[2], torch.float32, coding)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kv_dtype"),
    [
        *(("random_model", "int8"), ("random_model", "fp8"), ("wide_model", "int4")),
        *(("random_hybrid", "auto"), ("random_gemma4", "auto"), ("random_llama4", "auto")),
    ],
)
async def test_chunks_preemption_and_tiers_change_nothing_in_other_caches_either(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, kv_dtype: KvDType
) -> None:
    path = request.getfixturevalue(model)
    prompts = [prompt(text, length) for text in range(3) for length in (20, 45, 70)]
    numbers = INT4 if kv_dtype == "int4" else {}
    alone = config(path, kv_dtype=kv_dtype, kv_blocks=64, prefix_cache=False)
    async with await Engine.start(replace(alone, **numbers)) as fresh:
        answers = [await ask(fresh, tokens) for tokens in prompts]
    below = {"kv_host_bytes": 20_000, "kv_disk_bytes": 1 << 20, "kv_dir": str(tmp_path)}
    crowded = config(path, kv_dtype=kv_dtype, kv_blocks=24, max_batch_tokens=16, **below)
    async with await Engine.start(replace(crowded, **numbers)) as engine:
        assert engine._core._tiers is not None
        engine._core._tiers.rates = Eager()
        for _ in range(2):
            assert await asyncio.gather(*(ask(engine, tokens) for tokens in prompts)) == answers
        stats = await engine.stats()
        assert stats.tiers.host_hit_blocks + stats.tiers.disk_hit_blocks > 0


async def test_convolutions_are_refused_8_bits(random_hybrid: Path) -> None:
    with pytest.raises(InvalidParameter, match="kv_dtype is int8, but random-lfm2 has short convolutions"):
        await Engine.start(config(random_hybrid, kv_dtype="int8"))


def test_other_kinds_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="accepted: auto, int8, fp8, int4"):
        config(Path("none"), kv_dtype="int2")
