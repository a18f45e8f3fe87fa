"""Families with parts of their own on the Triton kernels, on a GPU or a pretended one: graphs and mixes change no
answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig
from tests.engine.gpu.test_gpu_engine import PROMPTS, all_together, config, greedy
from tests.engine.model import tiny
from tests.tiny import byte_tokenizer

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.slow]

FAMILIES: dict[str, dict[str, Any]] = {  # Any: arguments of untyped configuration classes
    "gpt_oss": {"num_hidden_layers": 2},
    "ministral3": {"num_hidden_layers": 2},
    "cohere": {"num_hidden_layers": 2},
    "llama4": {"num_hidden_layers": 4},
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
