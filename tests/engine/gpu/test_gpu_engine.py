"""The engine on the Triton kernels, on a GPU or interpreted: graphs, forks and mixes change nothing of an answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import GREEDY, Engine, EngineConfig, Sampling, Span, SpanResult
from engine.config import KernelName, KvDType
from engine.gpu.runner import GpuRunner
from tests.engine.models import tiny
from tests.tiny import byte_tokenizer

pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [
    [(text * 131 + i * i * 7 + i) % 300 + 3 for i in range(length)] for text, length in ((0, 5), (1, 40), (2, 21))
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, model, overrides = tiny.MODELS["qwen3"]
    sizes = {"num_hidden_layers": 2, "tie_word_embeddings": False}
    path = tiny.save(tiny.build(config, model, {**overrides, **sizes}), tmp_path_factory.mktemp("gpu"))
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


def config(path: Path) -> EngineConfig:
    return EngineConfig(str(path), device=DEVICE, dtype="float16", kernels="triton", kv_blocks=40, max_running=6)


async def greedy(engine: Engine, tokens: list[int], count: int = 5) -> tuple[int, ...]:
    async with await engine.open(tokens) as seq:
        return (await seq.generate_all(Span(GREEDY, max_tokens=count, ignore_eos=True))).token_ids


def runner_of(engine: Engine) -> GpuRunner:
    runner = engine._core._runner
    assert isinstance(runner, GpuRunner)
    return runner


@pytest.fixture(scope="module")
def plain_answers(checkpoint: Path) -> list[tuple[int, ...]]:
    """In float32 on torch, one after the other."""

    async def ask() -> list[tuple[int, ...]]:
        settings = replace(config(checkpoint), dtype="float32", kernels="torch")
        async with await Engine.start(settings) as engine:
            return [await greedy(engine, prompt) for prompt in PROMPTS]

    return asyncio.run(ask())


def test_answers_are_those_of_torch(checkpoint: Path, plain_answers: list[tuple[int, ...]]) -> None:
    settings = replace(config(checkpoint), max_batch_tokens=24)
    answers, replayed = asyncio.run(all_together(settings))
    assert answers == plain_answers
    assert replayed > 0, "decodes came from a graph"


def test_without_graphs_it_is_the_same(checkpoint: Path, plain_answers: list[tuple[int, ...]]) -> None:
    settings = replace(config(checkpoint), graphs=False, loop="overlapped")
    assert asyncio.run(all_together(settings)) == (plain_answers, 0)


def test_a_deterministic_engine_decodes_from_graphs_too(checkpoint: Path, plain_answers: list[tuple[int, ...]]) -> None:
    answers, replayed = asyncio.run(all_together(replace(config(checkpoint), deterministic=True)))
    assert answers == plain_answers and replayed > 0


async def all_together(settings: EngineConfig) -> tuple[list[tuple[int, ...]], int]:
    """Answers to all prompts at once, and how many steps came from a graph."""
    async with await Engine.start(settings) as engine:
        answers = await asyncio.gather(*(greedy(engine, prompt) for prompt in PROMPTS))
        return answers, runner_of(engine).replayed


def test_forks_of_a_long_prefix_say_what_the_sequence_would(checkpoint: Path) -> None:
    """Of 150 tokens, so that the prefix is read once for all of them."""
    prompt = [i * 7 % 300 + 3 for i in range(150)]
    span = Span(GREEDY, max_tokens=3, ignore_eos=True)

    async def ask() -> None:
        async with await Engine.start(config(checkpoint)) as engine:
            alone = await greedy(engine, prompt, 3)
            async with await engine.open(prompt) as seq:
                kids = seq.fork(3)
                found = await asyncio.gather(*(kid.generate_all(span) for kid in kids))
        assert [each.token_ids for each in found] == [alone] * 3

    asyncio.run(ask())


@pytest.mark.parametrize("coding", ["int8", "fp8"])
def test_caches_of_eight_bits_are_those_of_torch(checkpoint: Path, coding: KvDType) -> None:
    async def ask(kernels: KernelName) -> tuple[int, ...]:
        eight_bits = replace(config(checkpoint), kv_dtype=coding, kernels=kernels)
        async with await Engine.start(eight_bits) as engine:
            answer = await greedy(engine, PROMPTS[2], 4)
            assert kernels == "torch" or runner_of(engine).replayed > 0, "the kernels ran it"
            return answer

    assert asyncio.run(ask("triton")) == asyncio.run(ask("torch"))


def test_draws_with_logprobs_work(checkpoint: Path) -> None:
    span = Span(Sampling(temperature=0.8, top_p=0.9, seed=1), max_tokens=4, logprobs=2, ignore_eos=True)

    async def ask() -> SpanResult:
        async with await Engine.start(config(checkpoint)) as engine, await engine.open(PROMPTS[0]) as seq:
            return await seq.generate_all(span)

    result = asyncio.run(ask())
    assert len(result.token_ids) == 4 and result.logprobs is not None
