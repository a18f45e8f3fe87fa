"""Mixtures of experts on the Triton kernels, on a GPU or a pretended one: graphs and mixes change no answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from engine import GREEDY, Engine, EngineConfig, Span, SpanResult
from engine.config import QuantizationName
from tests.engine.gpu.test_gpu_engine import PROMPTS, all_together, config, greedy
from tests.engine.model import tiny
from tests.tiny import byte_tokenizer

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.slow]

SIZES = {"num_hidden_layers": 2, "vocab_size": 300 + 84}


@pytest.fixture(scope="module", params=["qwen2_moe", "glm4_moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a gated shared expert and layers without any, one with sigmoids, groups and a bias of the selection."""
    base, model, overrides = tiny.MODELS[request.param]
    sizes = {**overrides, **SIZES, "head_dim": 16, "hidden_size": 96}
    path = tiny.save(tiny.build(base, model, sizes), tmp_path_factory.mktemp(request.param))
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def plain_answers(checkpoint: Path) -> list[tuple[int, ...]]:
    """In float32 on torch, one after the other."""

    async def ask() -> list[tuple[int, ...]]:
        settings = replace(config(checkpoint), device="cpu", dtype="float32", kernels="torch")
        async with await Engine.start(settings) as engine:
            return [await greedy(engine, prompt) for prompt in PROMPTS]

    return asyncio.run(ask())


@pytest.mark.parametrize("deterministic", [False, True])
def test_answers_are_those_of_torch(
    checkpoint: Path, plain_answers: list[tuple[int, ...]], deterministic: bool
) -> None:
    """Decodes are replayed from graphs whatever experts their tokens choose."""
    settings = replace(config(checkpoint), deterministic=deterministic)
    answers, replayed = asyncio.run(all_together(settings))
    assert answers == plain_answers
    assert replayed > 0, "decodes came from a graph"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_of_few_bits_say_nearly_the_same(checkpoint: Path, quantization: QuantizationName) -> None:
    span = Span(GREEDY, max_tokens=2, logprobs=0, ignore_eos=True)

    async def ask(settings: EngineConfig) -> SpanResult:
        async with await Engine.start(settings) as engine, await engine.open(PROMPTS[2]) as seq:
            return await seq.generate_all(span)

    found, exact = (
        asyncio.run(ask(replace(config(checkpoint), graphs=False, **options)))
        for options in ({"quantization": quantization}, {"device": "cpu", "dtype": "float32", "kernels": "torch"})
    )
    assert found.logprobs is not None and exact.logprobs is not None
    assert abs(found.logprobs[0].logprob - exact.logprobs[0].logprob) < {"int8": 0.2, "int4": 1.0}[quantization]
