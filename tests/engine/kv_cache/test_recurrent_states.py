"""Recurrent states on a real model: prefixes, forks, truncation, tiers and restarts give the tokens of a fresh run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import GREEDY, Engine, EngineConfig, InvalidParameter, Sampling, Span
from engine.core.request import SequenceState
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.snapshot import HEADER_BYTES
from engine.kv_cache.state_checkpoints import StateCheckpoints
from engine.model.memory import spec_of
from engine.model.recurrent.states import state_bytes
from engine.outputs import SpanResult
from tests.engine.fake import FakeStates
from tests.engine.kv_below import Told, tiers_below
from tests.engine.kv_cache.test_kv_tiers import prompt

SPAN = Span(GREEDY, max_tokens=6, ignore_eos=True, logprobs=0)
BLOCK = 4


@pytest.fixture(
    scope="module",
    params=[
        "random_recurrent",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("random_mamba", "random_beside", "random_alone")),
    ],
)
def recurrent(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def config(model: Path, **changes: Any) -> EngineConfig:
    """Any: fields of EngineConfig."""
    settings = {"dtype": "float32", "block_size": BLOCK, "kv_blocks": 128, **changes}
    return EngineConfig(str(model), **settings)


async def assert_fresh(model: Path, found: list[SpanResult], prompts: list[list[int]]) -> None:
    """Asserts that each result has the tokens of an engine that shares nothing, and their log-probabilities: a wrong
    state moves these before another token is the likeliest."""
    async with await Engine.start(config(model, prefix_cache=False, max_running=1)) as engine:
        for result, tokens in zip(found, prompts, strict=True):
            async with await engine.open(tokens) as seq:
                expected = await seq.generate_all(SPAN)
            assert result.token_ids == expected.token_ids
            likely = [each.logprob for each in expected.logprobs]
            assert [each.logprob for each in result.logprobs] == pytest.approx(likely, abs=1e-4)


async def test_a_turn_goes_on_from_the_last_whole_block_of_the_answer(recurrent: Path) -> None:
    first = prompt(0, 41)
    async with await Engine.start(config(recurrent)) as engine:
        async with await engine.open(first) as seq:
            answer = await seq.generate_all(SPAN)
        second = [*first, *answer.token_ids, *prompt(1, 9)]
        async with await engine.open(second) as seq:
            result = await seq.generate_all(SPAN)
        assert (await engine.stats()).states.found == 1
    assert result.cached_tokens == (41 + 6 - 1) // BLOCK * BLOCK
    await assert_fresh(recurrent, [answer, result], [first, second])


async def test_a_second_branch_of_a_prompt_leaves_a_checkpoint_where_it_branched_off(recurrent: Path) -> None:
    texts = [[*prompt(0, 24), *prompt(branch, 13)] for branch in (1, 2, 3)]
    cached, found = [], []
    async with await Engine.start(config(recurrent)) as engine:
        for text in texts:
            async with await engine.open(text) as seq:
                result = await seq.generate_all(SPAN)
                cached.append(result.cached_tokens)
                found.append(result)
    assert cached == [0, 0, 24]
    await assert_fresh(recurrent, found, texts)


async def test_forks_and_their_parent_go_their_own_ways_from_one_state(recurrent: Path) -> None:
    async with await Engine.start(config(recurrent)) as engine, await engine.open(prompt(0, 28)) as seq:
        await seq.generate_all(SPAN)
        tokens = list(seq.tokens)
        computed = (await engine.stats()).prompt_tokens
        children = seq.fork(2)
        for child, text in zip(children, (1, 2), strict=True):
            child.append(prompt(text, 3))
        results = await asyncio.gather(*(each.generate_all(SPAN) for each in (seq, *children)))
        assert (await engine.stats()).prompt_tokens - computed == 2 * 3
        engine._core.check()
    prompts = [tokens, *([*tokens, *prompt(text, 3)] for text in (1, 2))]
    await assert_fresh(recurrent, results, prompts)


@pytest.mark.parametrize("length", [30, 33, 35])
async def test_truncation_recomputes_from_the_nearest_checkpoint(recurrent: Path, length: int) -> None:
    async with await Engine.start(config(recurrent)) as engine, await engine.open(prompt(0, 30)) as seq:
        await seq.generate_all(SPAN)
        seq.truncate(length)
        tokens, steps = list(seq.tokens), (await engine.stats()).step_tokens
        result = await seq.generate_all(SPAN)
        recomputed = (await engine.stats()).step_tokens - steps - len(result.token_ids)
    assert recomputed <= length - 28, "the prompt's last whole block ended at 28"
    await assert_fresh(recurrent, [result], [tokens])


async def test_tokens_appended_after_a_cut_do_not_meet_the_state_of_those_cut_off(recurrent: Path) -> None:
    async with await Engine.start(config(recurrent)) as engine, await engine.open(prompt(0, 30)) as seq:
        await seq.generate_all(SPAN)
        seq.truncate(29)
        seq.append(prompt(2, 12))
        tokens = list(seq.tokens)
        result = await seq.generate_all(SPAN)
    await assert_fresh(recurrent, [result], [tokens])


async def test_prompt_log_probabilities_read_a_cached_prompt_again(recurrent: Path) -> None:
    span = Span(GREEDY, max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    async with await Engine.start(config(recurrent)) as engine:
        found = []
        for _ in range(2):
            async with await engine.open(prompt(0, 30)) as seq:
                found.append(await seq.generate_all(span))
        scores = await seq_scores(engine)
    once, again = ([each.logprob for each in result.prompt_logprobs or () if each is not None] for result in found)
    assert len(once) == 29 and again == pytest.approx(once, abs=1e-4)
    assert found[0].token_ids == found[1].token_ids
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


async def seq_scores(engine: Engine) -> list[float]:
    """Returns the score of one candidate before and after its sequence has a state beyond it."""
    scores = []
    async with await engine.open(prompt(3, 21)) as seq:
        scores.append((await seq.score([[5, 6]]))[0][0])
        await seq.generate_all(SPAN)
        seq.truncate(21)
        scores.append((await seq.score([[5, 6]]))[0][0])
    return scores


async def test_a_sequence_goes_on_after_a_restart_from_a_checkpoint_on_the_disk(
    recurrent: Path, tmp_path: Path
) -> None:
    drawn = Span(Sampling(temperature=1.0, seed=5), max_tokens=6, ignore_eos=True)
    kept = config(recurrent, kv_disk_bytes=64 << 20, kv_dir=str(tmp_path))
    async with await Engine.start(kept) as engine, await engine.open(prompt(0, 37)) as seq:
        await seq.generate_all(SPAN)
        snapshot = await seq.snapshot()
        expected = (await seq.generate_all(drawn)).token_ids
    async with await Engine.start(kept) as engine:
        result = await (await engine.resume(snapshot)).generate_all(drawn)
        stats = await engine.stats()
    assert result.token_ids == expected
    assert result.cached_tokens == 40 and stats.states.tiers.disk_hit_blocks == 1


@pytest.mark.parametrize("length", [47, 42, 33])
async def test_a_restored_sequence_is_cut_and_forked_as_it_was_before(
    recurrent: Path, tmp_path: Path, length: int
) -> None:
    """Cut at the end, between the checkpoints, and before them."""
    kept = config(recurrent, kv_disk_bytes=64 << 20, kv_host_bytes=32 << 20, kv_dir=str(tmp_path))
    async with await Engine.start(kept) as engine, await engine.open(prompt(0, 41)) as seq:
        await seq.generate_all(SPAN)
        snapshot = await seq.snapshot()
    async with await Engine.start(kept) as engine:
        seq = await engine.resume(snapshot)
        seq.truncate(length)
        children = seq.fork(2)
        for child, text in zip(children, (1, 2), strict=True):
            child.append(prompt(text, 3))
        prompts = [list(each.tokens) for each in (seq, *children)]
        results = await asyncio.gather(*(each.generate_all(SPAN) for each in (seq, *children)))
        assert (await engine.stats()).states.tiers.disk_hit_blocks == (length > 40), "the first checkpoint is at 40"
        engine._core.check()
    await assert_fresh(recurrent, results, prompts)


async def test_a_state_of_another_layout_is_refused_and_read_again(
    recurrent: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = config(recurrent, kv_disk_bytes=64 << 20, kv_dir=str(tmp_path))
    async with await Engine.start(kept) as engine, await engine.open(prompt(0, 37)) as seq:
        await seq.generate_all(SPAN)
        snapshot, tokens = await seq.snapshot(), list(seq.tokens)
    nbytes = HEADER_BYTES + state_bytes(spec_of(recurrent), torch.float32)
    images = [path for path in tmp_path.glob("*/*/*") if path.is_file() and path.stat().st_size == nbytes]
    for path in images:
        image = path.read_bytes()
        path.write_bytes(image[:12] + bytes(16) + image[28:])
    async with await Engine.start(kept) as engine:
        result = await (await engine.resume(snapshot)).generate_all(SPAN)
        assert (await engine.stats()).states.tiers.bad_blocks == len(images) > 0
    assert "of another model, dtype or block size" in caplog.text
    await assert_fresh(recurrent, [result], [tokens])


def test_a_checkpoint_in_host_memory_alone_goes_to_the_disk_with_a_snapshot(tmp_path: Path) -> None:
    pool, worker = BlockPool(1), Told()
    tiers, disk = tiers_below(pool, FakeStates(pool), worker, rows=2, directory=tmp_path, files=4)
    states = StateCheckpoints(pool, BLOCK, publishes=True, tiers=tiers)
    seq = SequenceState(1, prompt(0, 9), b"root", 1)
    states.make_writable(seq)
    states.advance(seq, 8, decodes=False)
    states.release(seq)
    pool.release([pool.allocate()])  # evicts it
    states.save(states.saves())
    tiers.ran()
    assert pool.find(seq.digest(1, BLOCK)) is None
    assert disk is not None and not disk.files()
    states.keep(seq, 1)
    worker.work()
    assert not disk.files(), "the kept K/V ends before it"
    states.keep(seq, 3)
    worker.work()
    assert len(disk.files()) == 1


async def test_an_evicted_checkpoint_comes_back_from_host_memory(recurrent: Path) -> None:
    texts = [prompt(text, 26) for text in range(4)]
    small = config(recurrent, kv_host_bytes=32 << 20, state_bytes=3 * state_bytes(spec_of(recurrent), torch.float32))
    async with await Engine.start(small) as engine:
        found = []
        for text in [*texts, texts[0]]:
            async with await engine.open(text) as seq:
                found.append(await seq.generate_all(SPAN))
        tiers = (await engine.stats()).states.tiers
    assert tiers.host_hit_blocks == 1 and found[-1].cached_tokens == 24
    await assert_fresh(recurrent, found, [*texts, texts[0]])


async def test_memory_for_less_than_two_states_is_refused(recurrent: Path) -> None:
    with pytest.raises(InvalidParameter, match="state_bytes is 100; accepted: at least"):
        await Engine.start(config(recurrent, state_bytes=100))
    with pytest.raises(InvalidParameter, match="has recurrent layers; accepted: auto"):
        await Engine.start(config(recurrent, kv_dtype="int8"))


@pytest.mark.slow
async def test_a_deterministic_engine_gives_the_same_bits_however_it_is_cut(recurrent: Path) -> None:
    span = Span(GREEDY, max_tokens=5, logprobs=2, ignore_eos=True)
    texts = [[*prompt(0, 24), *prompt(each, 3 + 5 * each)] for each in range(4)]
    same = {"deterministic": True, "threads": 1}
    alone, mixed = list[Any](), list[Any]()
    async with await Engine.start(config(recurrent, prefix_cache=False, max_running=1, **same)) as engine:
        for text in texts:
            async with await engine.open(text) as seq:
                alone.append((await seq.generate_all(span)).logprobs)
    async with await Engine.start(config(recurrent, max_batch_tokens=11, kv_blocks=40, **same)) as engine:
        opened = [await engine.open(text) for text in texts]
        mixed = [each.logprobs for each in await asyncio.gather(*(seq.generate_all(span) for seq in opened))]
    assert mixed == alone
