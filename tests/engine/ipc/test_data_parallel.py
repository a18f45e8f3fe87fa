"""Replicas behind one engine: a sequence stays on one, prompts go where they are cached, and a death is one's own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, InvalidParameter
from engine.config import Fallback, KVEventsConfig, KVTransferConfig
from engine.errors import RankDied
from engine.ipc.data_parallel_link import DataParallelLink, SentPrefixes, block_digests, choose_replica
from engine.ipc.supervisor import SupervisedLink
from engine.outputs import AdapterStats, SpeculationStats, Stats
from tests.engine.parallel.engines import PROMPT, SPANS, answers, checkpoint, ranks_below


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        str(checkpoint(tmp_path)), dtype="float32", device="cpu", kv_blocks=80, max_batch_tokens=48, kernels="torch",
        threads=1, data_parallel_size=2,
    )  # fmt: skip


def link_of(engine: Engine) -> DataParallelLink:
    assert isinstance(engine._link, DataParallelLink)
    return engine._link


def loads(link: DataParallelLink) -> list[int]:
    return [len(each.requests) for each in link._replicas]


# -- choice


@pytest.mark.parametrize(
    ("loads", "matched", "held", "chosen"),
    [
        ((0, 0), (0, 3), (9, 9), 1),  # most of the prompt
        ((2, 0), (3, 0), (9, 9), 0),  # still below the cap of 3
        ((4, 0), (3, 0), (9, 9), 1),  # at the cap
        ((1, 0), (2, 2), (0, 9), 1),  # of equals the less loaded
        ((1, 1), (0, 0), (5, 4), 1),  # then the emptier one
        ((1, 1), (0, 0), (4, 4), 0),
    ],
)
def test_a_prompt_goes_where_most_of_it_is_cached(
    loads: tuple[int, int], matched: tuple[int, int], held: tuple[int, int], chosen: int
) -> None:
    assert choose_replica(*(dict(enumerate(each)) for each in (loads, matched, held))) == chosen


def test_prefixes_are_whole_blocks_of_one_tenant() -> None:
    tokens = list(range(40))
    known = SentPrefixes(10)
    known.add(block_digests(tokens, 16, "a"))
    assert len(known) == 2
    assert known.matched(block_digests([*tokens[:31], 9, 9], 16, "a")) == 1
    assert known.matched(block_digests(tokens, 16, "b")) == 0
    assert known.matched(block_digests([1, *tokens[1:]], 16, "a")) == 0


def test_the_ends_of_old_prompts_are_forgotten_first() -> None:
    old, new = block_digests(range(64), 16, ""), block_digests(range(100, 164), 16, "")
    known = SentPrefixes(6)
    known.add(old)
    known.add(new)
    assert (known.matched(old), known.matched(new)) == (2, 4)


def test_statistics_of_replicas_add_up() -> None:
    one = Stats(
        running=1, block_size=16, blocks_total=9, step_seconds=0.5, decodes=((1, 1, 0.25),),
        adapters=(AdapterStats("a", opened=2, resident=True),), speculation=SpeculationStats(drafted_at=(4, 2)),
    )  # fmt: skip
    other = Stats(
        running=2, block_size=16, blocks_total=9, step_seconds=1.5, decodes=((2, 2, 0.5), (1, 2, 0.5)),
        adapters=(AdapterStats("b"), AdapterStats("a", opened=3)), speculation=SpeculationStats(drafted_at=(1,)),
    )  # fmt: skip
    assert Stats.total([one]) == one
    assert Stats.total([one, other]) == Stats(
        running=3, block_size=16, blocks_total=18, step_seconds=2.0, decodes=((3, 3, 0.75), (1, 2, 0.5)),
        adapters=(AdapterStats("a", opened=5, resident=True), AdapterStats("b")),
        speculation=SpeculationStats(drafted_at=(5, 2)),
    )  # fmt: skip


# -- engines


async def test_replicas_write_the_tokens_of_one_device(config: EngineConfig) -> None:
    async with await Engine.start(replace(config, data_parallel_size=1, kv_blocks=40)) as engine:
        expected = await answers(engine)
    async with await Engine.start(replace(config, kv_blocks=40)) as engine:
        assert await answers(engine) == expected
        both = await engine.stats()
    assert both.blocks_total == 40 and not both.blocks_used and both.preemptions


async def test_prompts_are_shared_out_and_equal_ones_meet(config: EngineConfig) -> None:
    async with await Engine.start(config) as engine:
        link = link_of(engine)
        prompts = [[at] * 40 for at in (20, 21, 22, 23)]
        seqs = [await engine.open(each) for each in prompts]
        spans = [asyncio.create_task(seq.generate_all(SPANS[0])) for seq in seqs]
        await asyncio.sleep(0)
        assert loads(link) == [2, 2]
        await asyncio.gather(*spans)
        homes = [link._of[seq._id] for seq in seqs]
        for prompt, home in zip(prompts, homes, strict=True):
            async with await engine.open([*prompt, 9]) as again:
                (kid,) = again.fork(1)
                result = await kid.generate_all(SPANS[0])
                assert link._of[again._id] is link._of[kid._id] is home
                assert result.cached_tokens >= 32
        for seq in seqs:
            seq.close()
        assert (await engine.stats()).prefix_hit_tokens >= 4 * 32


async def test_sequences_count_from_their_opening_on(config: EngineConfig) -> None:
    """Their prompts have no whole block, so nothing else tells the replicas apart."""
    async with await Engine.start(config) as engine:
        link = link_of(engine)
        seqs = [await engine.open([at] * 5) for at in (20, 21, 22, 23)]
        assert [link._of[seq._id].number for seq in seqs] == [0, 1, 0, 1]
        seqs[0].close()
        seqs[2].close()
        assert link._of[(await engine.open([24] * 5))._id].number == 0


async def test_a_mixture_meets_on_one_replica(config: EngineConfig) -> None:
    async def mixed(engine: Engine) -> tuple[tuple[int, ...], ...]:
        one, other = await engine.open(PROMPT), await engine.open([*PROMPT[3:], 9])
        homes = engine._link._of if isinstance(engine._link, DataParallelLink) else {}
        assert not homes or homes[one._id] is not homes[other._id]
        with one.generate_mixed([other], [0.5, 0.5], SPANS[1]) as stream:
            tokens = [token async for piece in stream for token in piece.token_ids]
        assert not homes or homes[one._id] is homes[other._id]
        alone = await other.generate_all(SPANS[0])
        one.close()
        other.close()
        return tuple(tokens), alone.token_ids

    async with await Engine.start(replace(config, data_parallel_size=1)) as engine:
        expected = await mixed(engine)
    async with await Engine.start(config) as engine:
        assert await mixed(engine) == expected


@pytest.mark.slow
async def test_a_replica_that_ends_fails_its_requests_and_no_others(config: EngineConfig) -> None:
    """One of two replicas of two ranks each loses a rank."""
    span = replace(SPANS[0], max_tokens=200)
    async with await Engine.start(replace(config, tensor_parallel_size=2)) as engine:
        link = link_of(engine)
        first, second = await engine.open(PROMPT), await engine.open([9] * 40)
        assert link._of[first._id] is not link._of[second._id]
        other = asyncio.create_task(second.generate_all(span))
        (rank, *_) = sorted(ranks_below(os.getpid()), key=lambda each: each.create_time())
        with first.generate(span) as stream, pytest.raises(RankDied, match="Rank 1 of .* ended by signal 9"):
            async for _ in stream:
                rank.send_signal(signal.SIGKILL)
        assert len((await other).token_ids) == 200
        assert engine.state == "running"
        with pytest.raises(RankDied):
            await first.generate_all(span)
        async with await engine.open(PROMPT) as again:
            assert len((await again.generate_all(SPANS[0])).token_ids) == 24
            assert link._of[again._id] is link._of[second._id]
        assert (await engine.stats()).blocks_total == 40


@pytest.mark.slow
async def test_a_replicas_process_starts_again_and_its_answers_go_on(config: EngineConfig) -> None:
    span = replace(SPANS[1], max_tokens=300)
    async with await Engine.start(replace(config, data_parallel_size=1)) as alone, await alone.open(PROMPT) as seq:
        expected = (await seq.generate_all(span)).token_ids
    async with await Engine.start(replace(config, runs_in="process")) as engine:
        link, tokens, killed = link_of(engine), list[int](), False
        one, other = await engine.open(PROMPT), await engine.open([9] * 40)
        beside = asyncio.create_task(other.generate_all(replace(span, max_tokens=400)))
        with one.generate(span) as stream:
            async for piece in stream:
                tokens += piece.token_ids
                if len(tokens) > 100 and not killed:
                    killed, home = True, link._of[one._id].link
                    assert isinstance(home, SupervisedLink)
                    home._process.kill()
                    while home.state != "restarting":
                        await asyncio.sleep(0.01)
                    assert engine.state == "running"
                    assert (await engine.stats()).blocks_total == 40
        assert tuple(tokens) == expected
        assert len((await beside).token_ids) == 400


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size is 0; accepted: a positive integer"),
        ({"kv_events": KVEventsConfig()}, "kv_events is set and data_parallel_size is 2; accepted: 1"),
        (
            {"kv_transfer": KVTransferConfig("kv_producer", "secret")},
            "kv_transfer is set and data_parallel_size is 2; accepted: 1",
        ),
    ],
    ids=str,
)
def test_a_setting_that_replicas_do_not_support_is_refused(
    config: EngineConfig, changed: Mapping[str, Any], fault: str
) -> None:
    """Any: fields of a configuration."""
    with pytest.raises(InvalidParameter, match=fault):
        replace(config, **changed)


async def test_replicas_have_no_fallback_weights(config: EngineConfig) -> None:
    with pytest.raises(InvalidParameter, match="data_parallel_size is 2, .*; accepted: 1"):
        await Engine.start(config, fallback=Fallback(replace(config, quantization="int8"), 0.5))
