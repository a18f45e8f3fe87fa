"""An engine over several processes writes the tokens of one device, and says it when one of them dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import Engine, EngineConfig, InvalidParameter
from engine.errors import RankDied
from engine.ipc.supervisor import SupervisedLink
from tests.engine.parallel.engines import PROMPT, SPANS, answers, checkpoint, ranks_below


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(str(checkpoint(tmp_path)), dtype="float32", device="cpu", kv_blocks=40, max_batch_tokens=48)


@pytest.mark.parametrize(
    ("sizes", "name", "more"),
    [
        ({"tensor_parallel_size": 2}, "qwen3", {"speculation": "ngram"}),
        pytest.param(
            {"tensor_parallel_size": 2}, "gemma3", {"loop": "overlapped", "kv_blocks": 12}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"tensor_parallel_size": 2, "enable_expert_parallel": True}, "qwen3_moe", {}, marks=pytest.mark.slow
        ),
        pytest.param({"pipeline_parallel_size": 2}, "gemma3", {}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 3}, "qwen3", {"speculation": "suffix"}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "qwen3", {}, marks=pytest.mark.slow),
        ({"prefill_context_parallel_size": 2}, "qwen3", {}),
        pytest.param(
            {"prefill_context_parallel_size": 2},
            "gemma3",
            {"loop": "overlapped", "kv_blocks": 12},
            marks=pytest.mark.slow,
        ),
        pytest.param({"prefill_context_parallel_size": 4}, "qwen2", {"speculation": "ngram"}, marks=pytest.mark.slow),
        pytest.param(
            {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2}, "qwen3", {}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"prefill_context_parallel_size": 2, "pipeline_parallel_size": 2}, "qwen3", {}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)  # fmt: skip
async def test_ranks_write_the_tokens_of_one_device(
    sizes: Mapping[str, Any], name: str, more: Mapping[str, Any], tmp_path: Path
) -> None:
    """Any: fields of a configuration."""
    path = checkpoint(tmp_path, name)
    alone = EngineConfig(str(path), dtype="float32", device="cpu", kv_blocks=40, max_batch_tokens=48, kernels="torch")
    async with await Engine.start(alone) as engine:
        expected = await answers(engine)
    before = ranks_below(os.getpid())
    async with await Engine.start(replace(alone, **sizes, **more)) as engine:
        ranks = ranks_below(os.getpid())
        assert len(ranks) - len(before) == engine.config.ranks - 1
        assert engine.numerics.kernels == f"torch on {engine.config.ranks} ranks"
        assert await answers(engine) == expected
        stats = await engine.stats()
    assert stats.preemptions and stats.prefix_hit_tokens and not stats.blocks_used
    assert not any(each.is_running() for each in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"pipeline_parallel_size": 3}, {"prefill_context_parallel_size": 2}], ids=str)
async def test_a_dead_rank_ends_its_requests_with_an_error_that_says_so(
    sizes: Mapping[str, int], config: EngineConfig
) -> None:
    engine = await Engine.start(replace(config, **sizes))  # type: ignore[arg-type]  # fields by name
    ranks = ranks_below(os.getpid())
    async with await engine.open(PROMPT) as seq:
        stream = seq.generate(replace(SPANS[0], max_tokens=400))
        with stream, pytest.raises(RankDied, match="Rank [12] of .* ended by signal 9"):
            async for _ in stream:
                ranks[0].send_signal(signal.SIGKILL)
        assert engine.state == "stopped"
    await engine.stop()
    assert not any(each.is_running() for each in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor_parallel_size", "prefill_context_parallel_size"])
async def test_the_engines_process_starts_again_with_its_ranks(name: str, config: EngineConfig) -> None:
    span = replace(SPANS[1], max_tokens=300)
    async with await Engine.start(replace(config, kernels="torch")) as alone, await alone.open(PROMPT) as seq:
        expected = (await seq.generate_all(span)).token_ids
    async with await Engine.start(replace(config, runs_in="process", **{name: 2})) as engine:  # type: ignore[arg-type]  # a field by name
        link, tokens, dead = engine._link, list[int](), list[psutil.Process]()
        assert isinstance(link, SupervisedLink)
        async with await engine.open(PROMPT) as seq:
            with seq.generate(span) as stream:
                async for piece in stream:
                    tokens += piece.token_ids
                    if len(tokens) > 100 and not dead:
                        dead += [psutil.Process(link.pid), *ranks_below(link.pid)]
                        dead[1].send_signal(signal.SIGKILL)
        assert tuple(tokens) == expected
        alive = [psutil.Process(link.pid), *ranks_below(link.pid)]
        assert len(alive) == 2 and not set(alive) & set(dead)
    assert not any(each.is_running() for each in (*alive, *dead))


@pytest.mark.slow
async def test_a_rank_that_dies_while_nothing_runs_is_noticed(config: EngineConfig) -> None:
    async with await Engine.start(replace(config, tensor_parallel_size=2, runs_in="process")) as engine:
        assert isinstance(engine._link, SupervisedLink)
        before = engine._link.pid
        ranks_below(before)[0].send_signal(signal.SIGKILL)
        while engine.state != "restarting":
            await asyncio.sleep(0.01)
        async with await engine.open(PROMPT) as seq:
            assert len((await seq.generate_all(SPANS[0])).token_ids) == 24
        assert engine._link.pid != before and len(ranks_below(engine._link.pid)) == 1


@pytest.mark.slow
async def test_a_killed_engine_leaves_no_rank_behind(config: EngineConfig) -> None:
    async with await Engine.start(replace(config, tensor_parallel_size=2, runs_in="process")) as engine:
        assert isinstance(engine._link, SupervisedLink)
        ranks = ranks_below(engine._link.pid)
        os.kill(engine._link.pid, signal.SIGKILL)
        gone, alive = psutil.wait_procs(ranks, timeout=20)
        assert len(gone) == 1 and not alive


async def test_a_start_that_fails_leaves_no_rank_behind(config: EngineConfig) -> None:
    before = ranks_below(os.getpid())
    with pytest.raises(InvalidParameter, match="kv_bytes is 100; accepted: at least"):
        await Engine.start(replace(config, kv_blocks=None, kv_bytes=100, tensor_parallel_size=2))
    assert ranks_below(os.getpid()) == before


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; accepted: a positive integer"),
        ({"tensor_parallel_size": 2, "quantization": "int8"}, "quantization is int8, .* 2 ranks; accepted: none"),
        ({"tensor_parallel_size": 2, "kv_dtype": "int8"}, "kv_dtype is int8, .*; accepted: auto"),
        ({"pipeline_parallel_size": 2, "kv_host_bytes": 1 << 20}, "kv_host_bytes is 1048576, .*; accepted: 0"),
        ({"tensor_parallel_size": 2, "adapters": (("a", "b"),)}, "adapters is .*; accepted: none"),
        ({"tensor_parallel_size": 2, "draft_model": "x"}, "draft_model is x, .*; accepted: none"),
        ({"tensor_parallel_size": 2, "speculation": "mtp"}, "speculation is mtp, .*; accepted: auto, off, suffix"),
        ({"tensor_parallel_size": 2, "kernels": "triton"}, "kernels is triton, .*; accepted: auto, torch"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel is set and tensor_parallel_size is 1; accepted: 2"),
        ({"tensor_parallel_size": 2, "device": "cuda"}, "device is cuda, .*; accepted: auto, cpu"),
        ({"prefill_context_parallel_size": 0}, "prefill_context_parallel_size is 0; accepted: a positive integer"),
        ({"prefill_context_parallel_size": 3}, "block_size is 16, .* 3 divides each block; accepted: a multiple of 3"),
        ({"prefill_context_parallel_size": 2, "kv_dtype": "int8"}, "kv_dtype is int8, .* 2 ranks; accepted: auto"),
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_that_ranks_do_not_support_is_refused(changed: Mapping[str, Any], fault: str) -> None:
    """Any: fields of a configuration."""
    with pytest.raises(InvalidParameter, match=fault):
        EngineConfig("somewhere", **changed)


@pytest.mark.parametrize(
    ("name", "sizes", "fault"),
    [
        ("qwen3", {"tensor_parallel_size": 4}, "but .* 6 heads, 2 K/V heads and an MLP of 112; accepted: 1, 2\\."),
        ("qwen3", {"pipeline_parallel_size": 4}, "pipeline_parallel_size is 4; accepted: 1 to 3, the layers"),
        ("qwen3_moe", {"tensor_parallel_size": 4}, "K/V heads and an MLP of 112, experts of 32; accepted: 1, 2\\."),
        ("qwen3", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, "enable_expert_parallel .* no experts"),
        ("gpt_oss", {"tensor_parallel_size": 2}, "is 2, but .* has experts that lie in one tensor"),
        ("deepseek_v2", {"tensor_parallel_size": 2}, "tensor_parallel_size is 2, but .* has latent attention"),
        ("lfm2", {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, but .* has short convolutions"),
        ("deepseek_v2", {"prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2, but .* has latent"),
    ],
)  # fmt: skip
async def test_a_model_that_does_not_divide_is_refused(
    name: str, sizes: Mapping[str, Any], fault: str, tmp_path: Path
) -> None:
    """Any: fields of a configuration."""
    with pytest.raises(InvalidParameter, match=fault):
        await Engine.start(EngineConfig(str(checkpoint(tmp_path, name)), device="cpu", kernels="torch", **sizes))
