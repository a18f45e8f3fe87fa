"""Families with parts of their own on the Triton kernels, on a GPU or a pretended one: graphs and mixes change no
answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig
from engine.model import memory
from engine.model.mlp.expert_offload import ExpertOffload, expert_bytes
from tests.engine.gpu.test_gpu_engine import PROMPTS, all_together, config, greedy
from tests.engine.gpu.test_gpu_experts import asked, offloads
from tests.engine.model import tiny
from tests.tiny import byte_tokenizer

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.slow]

FAMILIES: dict[str, dict[str, Any]] = {  # Any: arguments of untyped configuration classes
    "gpt_oss": {"num_hidden_layers": 2},
    "ministral3": {"num_hidden_layers": 2},
    "cohere": {"num_hidden_layers": 2},
    "llama4": {"num_hidden_layers": 4},
    "gemma4": {"global_head_dim": 32},
    "gemma4_moe": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 32,
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base, model, overrides = tiny.MODELS[request.param]
    sizes = {**overrides, "vocab_size": 384, "head_dim": 16, "hidden_size": 96, **FAMILIES[request.param]}
    path = tiny.save(tiny.build(base, model, sizes), tmp_path_factory.mktemp(request.param))
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("deterministic", [False, True])
def test_answers_are_those_of_torch(checkpoint: Path, deterministic: bool) -> None:
    """Of float32 on torch, one after the other; here all at once, in chunks, and decodes from graphs."""

    async def ask(settings: EngineConfig) -> list[tuple[int, ...]]:
        async with await Engine.start(settings) as engine:
            return [await greedy(engine, prompt) for prompt in PROMPTS]

    plain = asyncio.run(ask(replace(config(checkpoint), device="cpu", dtype="float32", kernels="torch")))
    settings = replace(config(checkpoint), deterministic=deterministic, max_batch_tokens=24)
    answers, replayed = asyncio.run(all_together(settings))
    assert answers == plain
    assert replayed > 0, "decodes came from a graph"


@pytest.mark.parametrize("checkpoint", ["gpt_oss", "llama4"], indirect=True)
def test_stacked_experts_in_host_memory_change_no_answer(checkpoint: Path) -> None:
    """Those of one tensor a layer: their weights lie in host memory, and take no memory of the device."""
    gib = offloads(checkpoint, 3)
    answers, places = asyncio.run(asked(replace(config(checkpoint), cpu_offload_gb=gib)))
    plain, before = asyncio.run(asked(config(checkpoint)))
    spec = memory.spec_of(checkpoint)
    offload = ExpertOffload.of(spec, expert_bytes(spec, torch.float16, "none"), gib)
    assert answers == plain and before["host"] == 0
    assert places["host"] == offload.host_bytes
    assert before["device"] - places["device"] - places["slots"] == offload.saved_bytes > 0


@pytest.mark.parametrize("checkpoint", ["gpt_oss", "llama4"], indirect=True)
def test_keys_are_kept_for_the_window_alone(checkpoint: Path) -> None:
    """Blocks that a window has passed are given to others; where drafts or transfers want one table, they are kept."""
    spec = memory.spec_of(checkpoint)
    # the same kernels, and the same bits whatever runs together: a router meets scores that rounding tells apart
    settings = replace(config(checkpoint), kv_blocks=30, max_running=2, deterministic=True)

    async def ask(chosen: EngineConfig) -> tuple[list[tuple[int, ...]], int]:
        async with await Engine.start(chosen) as engine:
            answers = await asyncio.gather(*(greedy(engine, prompt, 20) for prompt in PROMPTS[1:]))
            return list(answers), (await engine.stats()).kv_groups

    drafts = replace(settings, speculation="auto")
    plain, one = asyncio.run(ask(drafts))
    found, groups = asyncio.run(ask(settings))
    assert one == 1 and found == plain
    assert groups == 1 + sum(window is not None for window in spec.windows) // sum(
        window is None for window in spec.windows
    )
    assert memory.kv_groups(drafts, spec, torch.float16, torch.device("cuda"), 640) is None
