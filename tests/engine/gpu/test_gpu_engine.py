"""The engine on the Triton kernels, on a GPU or a pretended one: graphs, forks and mixes change no answer."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from engine import GREEDY, Engine, EngineConfig, Sampling, Span, SpanResult
from engine.config import KernelName, KvDType, QuantizationName
from engine.core.step import Step
from engine.model.gpu_runner import GpuRunner
from engine.structured_output.layout import Constrained
from engine.structured_output.spec import Regex
from tests.engine.kv_below import Eager
from tests.engine.model import tiny
from tests.pretended import Machine
from tests.tiny import byte_tokenizer

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.slow]

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
    return EngineConfig(str(path), device="cuda", dtype="float16", kernels="triton", kv_blocks=40, max_running=3)


async def greedy(engine: Engine, tokens: list[int], count: int = 5) -> tuple[int, ...]:
    async with await engine.open(tokens) as seq:
        return (await seq.generate_all(Span(GREEDY, max_tokens=count, ignore_eos=True))).token_ids


def runner_of(engine: Engine) -> GpuRunner:
    runner = engine._core._steps.runner
    assert isinstance(runner, GpuRunner)
    return runner


@pytest.fixture(scope="module")
def plain_answers(checkpoint: Path) -> list[tuple[int, ...]]:
    """In float32 on torch, one after the other."""

    async def ask() -> list[tuple[int, ...]]:
        settings = replace(config(checkpoint), device="cpu", dtype="float32", kernels="torch")
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
        eight_bits = replace(config(checkpoint), kv_dtype=coding, kernels=kernels, max_running=1)
        async with await Engine.start(eight_bits) as engine:
            answer = await greedy(engine, PROMPTS[2], 4)
            assert kernels == "torch" or runner_of(engine).replayed > 0, "the kernels ran it"
            return answer

    assert asyncio.run(ask("triton")) == asyncio.run(ask("torch"))


@pytest.mark.parametrize("starts_whole", [True])
def test_draws_with_logprobs_work(checkpoint: Path, machine: Machine | None) -> None:
    """In a pool that the engine sizes by itself. What a step costs besides the model: it is sent, what its rows ask for
    is sent while it is computed, and what was drawn is waited for (as is the buffer of the step before the last)."""
    settings = replace(config(checkpoint), kv_blocks=None, max_running=1, max_batch_tokens=32)
    told = Sampling(temperature=0.8, top_p=0.9, seed=1)

    async def ask() -> tuple[SpanResult, list[Counter[str]]]:
        async with await Engine.start(settings) as engine:
            counts = []
            for tokens in (3, 2, 5):
                counts.append(Counter() if machine is None else machine.counts())
                async with await engine.open(PROMPTS[0]) as seq:
                    found = await seq.generate_all(Span(told, max_tokens=tokens, logprobs=2, ignore_eos=True))
            return found, [*counts, Counter() if machine is None else machine.counts()]

    result, counts = asyncio.run(ask())
    assert len(result.token_ids) == 5 and result.logprobs is not None
    two, five = counts[2] - counts[1], counts[3] - counts[2]
    assert machine is None or five - two == Counter(sent=3 * 2, fetched=3, waited=3 * 2, replayed=3)


def test_masks_and_penalties_are_applied_there(checkpoint: Path) -> None:
    pytest.importorskip("llguidance", reason="nothing compiles constraints here")
    told = Sampling(temperature=0.7, top_k=5, repetition_penalty=1.3, presence_penalty=0.4, logit_bias={5: 1.0}, seed=2)
    spans = [
        Span(told, max_tokens=8, constraint=Constrained(Regex("[a-c]{4}(x|y)"))),
        Span(GREEDY, max_tokens=3, ignore_eos=True),
    ]

    async def ask() -> list[SpanResult]:
        async with await Engine.start(replace(config(checkpoint), graphs=False)) as engine:
            opened = [await engine.open(prompt) for prompt in PROMPTS[:2]]
            return list(await asyncio.gather(*(s.generate_all(span) for s, span in zip(opened, spans, strict=True))))

    held, free = asyncio.run(ask())
    assert re.fullmatch("[a-c]{4}[xy]", held.text), held.text
    assert len(free.token_ids) == 3, "a neighbour is not held to it"


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step that was told before the tokens of the one before were known."""
    rows: list[int] = []
    run = GpuRunner.run

    def watched(runner: GpuRunner, step: Step) -> Tensor:
        if step.sampled is not None:
            rows.append(len(step.rows))
        return run(runner, step)

    monkeypatch.setattr(GpuRunner, "run", watched)
    return rows


def answers(settings: EngineConfig, spans: Sequence[Span]) -> list[SpanResult]:
    """One span on each prompt, all at once."""

    async def ask() -> list[SpanResult]:
        async with await Engine.start(settings) as engine:
            opened = [await engine.open(prompt) for prompt, _ in zip(PROMPTS, spans, strict=False)]
            return list(await asyncio.gather(*(s.generate_all(span) for s, span in zip(opened, spans, strict=True))))

    return asyncio.run(ask())


def test_steps_told_ahead_draw_what_others_draw(checkpoint: Path, followed: list[int], machine: Machine | None) -> None:
    """Seeds, log-probabilities, tokens that may not come early, and one that ends a span while the next is computed."""
    told = Sampling(temperature=0.9, top_p=0.95, seed=1)
    spans = [
        Span(told, max_tokens=6, logprobs=1, ignore_eos=True),
        Span(told, max_tokens=6, stop_token_ids=tuple(range(100, 300)), min_tokens=3, ignore_eos=True),
        Span(GREEDY, max_tokens=5, ignore_eos=True),
    ]
    plain = answers(replace(config(checkpoint), loop="plain"), spans)
    assert not followed
    whole = plain[0].token_ids
    assert len(set(whole)) == 6
    ahead = answers(config(checkpoint), [replace(spans[0], stop_token_ids=whole[3:4]), *spans[1:]])
    assert [each.token_ids for each in ahead] == [whole[:3], *(each.token_ids for each in plain[1:])]
    found, wanted = ([each.logprob for each in result.logprobs or ()] for result in (ahead[0], plain[0]))
    assert found == pytest.approx(wanted[:3], abs=0.02) and found
    assert 3 in followed and len(followed) >= 3
    if machine is not None:  # a device that is there is so quick that sequences need not begin in one step
        assert followed[:3] == [3, 3, 3], "one row of the third of them is thrown away"


def test_what_depends_on_the_token_before_is_told_after_it(checkpoint: Path, followed: list[int]) -> None:
    pytest.importorskip("llguidance", reason="nothing compiles constraints here")
    spans = [
        Span(Sampling(temperature=0.0, presence_penalty=2.0), max_tokens=2, ignore_eos=True),
        Span(GREEDY, max_tokens=4, constraint=Constrained(Regex("[a-c]{2}[xyz]"))),
        Span(GREEDY, max_tokens=8, ignore_eos=True),
    ]
    settings = replace(config(checkpoint), graphs=False)
    plain = answers(replace(settings, loop="plain"), spans)
    assert [each.token_ids for each in answers(settings, spans)] == [each.token_ids for each in plain]
    assert followed and set(followed) == {1}, "once the others have ended"


def test_what_went_to_the_host_comes_back(checkpoint: Path) -> None:
    texts = [[i * step % 300 + 3 for i in range(38)] for step in (1, 5)]
    small = replace(config(checkpoint), kv_blocks=4, kv_host_bytes=1 << 22, graphs=False)

    async def ask() -> None:
        async with await Engine.start(small) as engine:
            assert engine._core._tiers is not None
            engine._core._tiers.rates = Eager()  # a model so small would rather compute
            first = [await greedy(engine, text, 2) for text in texts]
            assert [await greedy(engine, text, 2) for text in texts] == first
            assert (await engine.stats()).tiers.host_hit_blocks > 0

    asyncio.run(ask())


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
    assert abs(found.logprobs[0].logprob - exact.logprobs[0].logprob) < {"int8": 0.1, "int4": 1.0}[quantization]
