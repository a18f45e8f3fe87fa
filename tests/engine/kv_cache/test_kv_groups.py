"""Layers with windows free the K/V outside of them: the tokens of one table for all layers, and less memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import GREEDY, Engine, EngineConfig, InvalidParameter, Sampling, Span
from engine.core.request import SequenceState
from engine.core.step import Step
from engine.families import family_of
from engine.kv_cache.allocation import advance_kv, allocate, match_prefix
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.kv_groups import KVGroups
from engine.model.memory import needs_of
from engine.model.runner import ModelRunner
from tests.engine.kv_below import Eager
from tests.engine.kv_cache.test_kv_tiers import prompt
from tests.engine.model import tiny
from tests.tiny import byte_tokenizer

WINDOW, BLOCK = 24, 4
SPAN = Span(GREEDY, max_tokens=8, ignore_eos=True, logprobs=2)
WIDE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}  # that the kernels in C++ run, in bfloat16


def written(name: str, path: Path, **more: Any) -> Path:
    """Any: arguments of untyped configuration classes."""
    config_class, model_class, changed = tiny.MODELS[name]
    tiny.build(config_class, model_class, {**changed, "tie_word_embeddings": False, **more}).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


def config(model: Path, **changes: Any) -> EngineConfig:
    """Any: fields of EngineConfig."""
    return EngineConfig(str(model), **{"dtype": "float32", "block_size": BLOCK, "kv_blocks": 60, **changes})


async def conversation(engine: Engine) -> list[Any]:
    """Returns what a chat of two turns, forks, a cut, a second reading and prompt log-probabilities give.

    Any: fields of results.
    """
    found = list[Any]()
    async with await engine.open(prompt(0, 70)) as seq, await engine.open(prompt(1, 33)) as other:
        found += await asyncio.gather(seq.generate_all(SPAN), other.generate_all(SPAN))
        seq.append(prompt(2, 21))
        children = seq.fork(2)
        children[1].append([9])
        found += await asyncio.gather(*(each.generate_all(SPAN) for each in (seq, *children)))
        found.append(await seq.score([[5, 6], [7]]))
        seq.truncate(40)
        found.append(await seq.generate_all(SPAN))
        span = Span(Sampling(temperature=1.0, seed=3), max_tokens=4, ignore_eos=True, prompt_logprobs=0)
        found.append(await seq.generate_all(span))
    async with await engine.open(prompt(0, 66)) as seq:
        found.append(await seq.generate_all(SPAN))
    engine._core.check()
    return [getattr(each, "logprobs", each) for each in found]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma3", {}),
        ("gpt_oss", {}),
        ("gemma3", {"dtype": "bfloat16"}),
        pytest.param("gemma3", {"kv_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("gemma3", {"dtype": "bfloat16", "kv_dtype": "int4"}, marks=pytest.mark.slow),
        *(
            pytest.param(name, {"dtype": dtype}, marks=pytest.mark.slow)
            for name in ("gemma2", "llama4", "olmo3", "cohere2", "gpt_oss", "qwen2_windows")
            for dtype in ("float32", "bfloat16")
        ),
    ],
)
async def test_a_windowed_model_gives_the_bits_of_one_table_for_all_layers(
    name: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.builder.check_int4", lambda *_: None)  # random weights pass no gate
    model = written(name, tmp_path, **(WIDE if changes.get("dtype") == "bfloat16" else {}))
    same = config(model, deterministic=True, threads=1, **changes)
    async with await Engine.start(same) as engine:
        assert (await engine.stats()).kv_groups > 1
        grouped = await conversation(engine)
    one_table(monkeypatch)
    async with await Engine.start(same) as engine:
        assert (await engine.stats()).kv_groups == 1
        assert grouped == await conversation(engine)


def one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives all layers one table, as models without windows have."""
    monkeypatch.setattr(KVGroups, "of", classmethod(lambda *_: None))


async def test_more_long_sequences_run_at_once_in_the_same_memory(
    random_windows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of 300 tokens, 75 blocks each; 100 of all layers are there."""
    rows, run = list[int](), ModelRunner.run

    def noted(self: ModelRunner, step: Step) -> torch.Tensor:
        rows.append(len(step.rows))
        return run(self, step)

    monkeypatch.setattr(ModelRunner, "run", noted)
    most = []
    for _ in range(2):
        async with await Engine.start(config(random_windows, kv_blocks=100, max_batch_tokens=64)) as engine:
            opened = [await engine.open(prompt(text, 240)) for text in range(4)]
            await asyncio.gather(*(seq.generate_all(replace(SPAN, max_tokens=60)) for seq in opened))
            stats = await engine.stats()
        if stats.kv_groups > 1:
            assert stats.blocks_used <= 4 * (75 + 5 * 9), "each keeps the blocks of its window, and two more"
            assert stats.preemptions == 0
        most.append(max(rows))
        rows.clear()
        one_table(monkeypatch)
    assert most == [4, 1]


async def test_prompts_shorter_than_the_window_are_found_as_with_one_table(
    random_windows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = []
    for _ in range(2):
        async with await Engine.start(config(random_windows, kv_blocks=24, max_running=1)) as engine:
            for text in (0, 1, 2, 0, 1, 3, 0, 2, 4, 1, 0):
                async with await engine.open([*prompt(text, 12), *prompt(5, 3 + text)]) as seq:
                    await seq.generate_all(SPAN)
            hits.append((await engine.stats()).prefix_hit_tokens)
        one_table(monkeypatch)
    assert hits[0] >= hits[1] > 0


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
async def test_a_turn_that_follows_reads_only_what_is_new(name: str, tmp_path: Path) -> None:
    first = prompt(0, 201)
    async with await Engine.start(config(written(name, tmp_path), kv_blocks=100)) as engine:
        async with await engine.open(first) as seq:
            answer = await seq.generate_all(SPAN)
        second = [*first, *answer.token_ids, *prompt(1, 4)]
        async with await engine.open(second) as seq:
            again = await seq.generate_all(SPAN)
        async with await engine.open(prompt(0, 100)) as seq:  # it branches off where windows were freed, and cached
            branched = await seq.generate_all(SPAN)
    assert again.cached_tokens == 208 and 208 / len(second) > 0.95
    assert branched.cached_tokens == 99


@pytest.mark.parametrize("tier", ["kv_host_bytes", "kv_disk_bytes"])
async def test_windows_come_back_from_a_tier_with_their_prefix(random_windows: Path, tmp_path: Path, tier: str) -> None:
    small = config(random_windows, kv_blocks=24, max_batch_tokens=16, kv_dir=str(tmp_path), **{tier: 4 << 20})
    async with await Engine.start(small) as engine:
        assert engine._core._tiers is not None
        engine._core._tiers.rates = Eager()  # a model so small would rather compute
        found = []
        for text in (0, 1, 2, 1, 2, 0):
            async with await engine.open(prompt(text, 90)) as seq:
                found.append(await seq.generate_all(SPAN))
            engine._core.check()
        tiers = (await engine.stats()).tiers
    assert found[-1].token_ids == found[0].token_ids and found[-1].cached_tokens == 88
    assert tiers.host_hit_blocks + tiers.disk_hit_blocks >= 90 // BLOCK
    assert tiers.passed_over_blocks == 0


GROUPS = KVGroups(
    window=8, chunked=False, layers=1, count=2, tables=(0, 1, 2), places=(0, 0, 0), size=BLOCK, step_tokens=16
)


def computed(pool: BlockPool, length: int) -> SequenceState:
    """Returns a sequence whose tokens all have K/V, computed in one step."""
    seq = SequenceState(1, [], b"root", 1)
    seq.append(prompt(0, length), generated=False)
    allocate(seq, length, pool, BLOCK, GROUPS)
    advance_kv(seq, length, pool, BLOCK, GROUPS)
    return seq


def test_blocks_outside_of_the_window_are_freed_and_one_more_is_kept() -> None:
    pool = BlockPool(60)
    seq = computed(pool, 40)
    assert seq.window_from == (39 - 7) // BLOCK - 1 == 7
    assert [len(each) for each in seq.windowed] == [0] * 7 + [2] * 3
    assert pool.used == 10 + 2 * 3 and pool.cached == 2 * 7, "what is freed can still be found"
    pool.check([seq.blocks])


def test_a_prefix_is_found_up_to_where_its_windows_are() -> None:
    pool = BlockPool(60)
    seq = computed(pool, 40)
    digests = [GROUPS.digests(seq.digest(index, BLOCK)) for index in range(10)]
    pool.release(seq.drop_kv())
    found = []
    for lost in (9, 5, 3, 0):
        pool.discard(digests[lost][1])
        other = SequenceState(2, prompt(0, 41), b"root", 2)
        match_prefix(other, BLOCK, pool, GROUPS, reuses=False)
        found.append(other.kv_len)
        assert other.window_from == GROUPS.first_block(other.kv_len)
        pool.check([other.blocks])
        pool.release(other.drop_kv())
    assert found == [36, 36, 36, 36], "blocks before the window are not asked for"
    for lost in (8, 6, 4, 2):
        pool.discard(digests[lost][0])
    match_prefix(other, BLOCK, pool, GROUPS)
    assert other.kv_len == 0, "of 8 tokens the first are in the window"
    pool.check([other.blocks])


def test_a_cut_into_a_block_whose_window_has_passed_goes_back_to_whole_blocks() -> None:
    pool = BlockPool(60)
    seq = computed(pool, 40)
    pool.release(seq.truncate(18, BLOCK))
    assert GROUPS.cover(seq, 17, pool) == seq.kv_len == 16
    assert seq.window_from == GROUPS.first_block(16) and len(seq.table) == len(seq.windowed) == 4
    pool.check([seq.blocks])
    seq.append([5] * 10, generated=False)
    assert seq.digest(5, BLOCK) == SequenceState(2, seq.tokens, b"root", 2).digest(5, BLOCK)


def test_a_window_is_taken_back_for_one_step_and_not_for_a_whole_sequence() -> None:
    """All of a long prompt's would be more blocks than its pool is asked for."""
    pool = BlockPool(60)
    seq = computed(pool, 40)
    assert GROUPS.cover(seq, 30, pool) == 30 and seq.kv_len == 40
    assert seq.window_from == GROUPS.first_block(30)
    pool.check([seq.blocks])
    assert GROUPS.cover(seq, 0, pool) == seq.kv_len == 0 and pool.cached == 3 * 10
    pool.check([seq.blocks])


@pytest.mark.parametrize(
    ("name", "count"),
    [("gemma3", 5), ("gemma2", 2), ("gpt_oss", 2), ("llama4", 3), ("olmo3", 3), ("cohere2", 3), ("qwen2_windows", 2)]
    + [(name, None) for name in ("mistral", "phi3", "gemma4", "qwen2_moe", "qwen3")],
)
def test_groups_are_of_models_with_windows_in_some_layers(name: str, count: int | None) -> None:
    config_class, model_class, changed = tiny.MODELS[name]
    json = tiny.build(config_class, model_class, changed).config.to_dict()
    spec = family_of({**json, "architectures": [model_class]}).spec(json)
    groups = KVGroups.of(spec, BLOCK, 640, 16)
    assert (None if groups is None else groups.count) == count
    assert KVGroups.of(spec, BLOCK, WINDOW, 16) is None, "no window is shorter than the context"


async def test_the_memory_of_groups_is_estimated_and_told(
    random_windows: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer = 2 * BLOCK * 2 * 12 * 4  # keys and values, tokens, heads, width, float32
    needs = needs_of(config(random_windows, max_running=3))
    assert (needs.block, needs.groups, needs.blocks) == (6 * layer, 6, 3 * 160)
    with caplog.at_level("INFO", "engine.builder"):
        given = config(random_windows, kv_blocks=None, kv_bytes=601 * layer, max_batch_tokens=16)
        async with await Engine.start(given) as engine:
            assert (await engine.stats()).blocks_total == 601
    told = layer // BLOCK
    assert f"601 blocks of K/V, {told} bytes a token and {5 * told} more for each of the last 24" in caplog.text
    at_once = 601 / (160 + 5 * ((24 + 16) // BLOCK + 3))
    assert f"{at_once:.1f} sequences of 640 tokens at once" in caplog.text and at_once > 2.6 > 601 / (6 * 160)
    with pytest.raises(InvalidParameter, match=f"at least {6 * layer}, one block"):
        await Engine.start(config(random_windows, kv_blocks=None, kv_bytes=5 * layer))
