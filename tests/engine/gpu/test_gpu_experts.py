"""Mixtures of experts on the Triton kernels, on a GPU or a pretended one: graphs and mixes change no answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import GREEDY, Engine, EngineConfig, InvalidParameter, Span, SpanResult
from engine.config import QuantizationName
from engine.model import memory
from engine.model.mlp.expert_offload import GIB, ExpertOffload, expert_bytes
from tests.engine.gpu.test_gpu_engine import PROMPTS, all_together, config, greedy, runner_of
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


def offloads(path: Path, number: int) -> float:
    """GiB of host memory for `number` experts of each layer in 16 bits."""
    spec = memory.spec_of(path)
    assert spec.experts is not None
    return number * len(spec.experts.layers) * expert_bytes(spec, torch.float16, "none") / GIB


@pytest.mark.parametrize("number", [2, 5])
def test_experts_in_host_memory_change_no_answer(
    checkpoint: Path, plain_answers: list[tuple[int, ...]], number: int
) -> None:
    """They take no memory of the device but their slots', and no more of the host's than was given."""
    gib = offloads(checkpoint, number)
    answers, places = asyncio.run(asked(replace(config(checkpoint), cpu_offload_gb=gib)))
    assert answers == plain_answers
    _, before = asyncio.run(asked(config(checkpoint)))
    spec = memory.spec_of(checkpoint)
    offload = ExpertOffload.of(spec, expert_bytes(spec, torch.float16, "none"), gib)
    assert before["host"] == 0 and before["slots"] == 0
    assert places["host"] == offload.host_bytes <= gib * GIB
    assert before["device"] - places["device"] - places["slots"] == offload.saved_bytes > 0


async def asked(settings: EngineConfig) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    """Answers to all prompts at once, from graphs; and the bytes of experts, by where they lie."""
    async with await Engine.start(settings) as engine:
        answers = await asyncio.gather(*(greedy(engine, prompt) for prompt in PROMPTS))
        assert runner_of(engine).replayed > 0
        layers = runner_of(engine)._decoder._gpu
        assert layers is not None
        places = dict.fromkeys(("host", "device", "slots"), 0)
        for mixed in filter(None, layers._experts):
            places["slots"] += 0 if mixed._slots is None else mixed._slots.nbytes
            for part in (*mixed._gate_up.weights, *mixed._down.weights):
                assert isinstance(part, torch.Tensor)
                places["device" if part.is_cuda else "host"] += part.nbytes
        return answers, places


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_of_few_bits_in_host_memory_say_the_same(checkpoint: Path, quantization: QuantizationName) -> None:
    spec = memory.spec_of(checkpoint)
    assert spec.experts is not None
    gib = 4 * len(spec.experts.layers) * expert_bytes(spec, torch.float16, quantization) / GIB
    settings = replace(config(checkpoint), quantization=quantization, graphs=False, max_running=1)

    async def ask(chosen: EngineConfig) -> tuple[int, ...]:
        async with await Engine.start(chosen) as engine:
            return await greedy(engine, PROMPTS[2], 3)

    assert asyncio.run(ask(replace(settings, cpu_offload_gb=gib))) == asyncio.run(ask(settings))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"kernels": "torch"}, "the Triton kernels do not run"),
        ({"device": "cpu", "kernels": "triton"}, "the device is cpu"),
        ({"device": "cpu", "kernels": "auto", "tensor_parallel_size": 2}, "divided among 2 ranks; accepted: 0"),
        ({"cpu_offload_gb": 1e-9}, "is 1e-09; accepted: 0, or .* GiB, which hold 2 to"),
        ({"cpu_offload_gb": 1.0}, "is 1.0; accepted: 0, or .* GiB, which hold 2 to"),
        ({"cpu_offload_gb": -1.0}, "is -1.0; accepted: 0 for none"),
        ({"cpu_offload_gb": float("nan")}, "is nan; accepted: 0 for none"),
    ],
)
def test_host_memory_that_cannot_be_used_is_refused(checkpoint: Path, changed: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidParameter, match=why):
        settings = replace(config(checkpoint), **{"cpu_offload_gb": offloads(checkpoint, 3), **changed})  # type: ignore[arg-type]  # of many fields
        path, spec = checkpoint, memory.spec_of(checkpoint)
        memory.offload_of(settings, path, spec, memory.find_device(settings.device), torch.float16)


def test_a_model_without_experts_has_none_in_host_memory(tmp_path: Path) -> None:
    path = tiny.save(tiny.build(*tiny.MODELS["llama"]), tmp_path / "dense")
    with pytest.raises(InvalidParameter, match="but dense has no experts; accepted: 0, or mixtures"):
        asyncio.run(Engine.start(replace(config(path), cpu_offload_gb=1.0)))


def test_the_check_of_memory_says_how_much_host_memory_would_do(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that much does."""
    spec, settings = memory.spec_of(checkpoint), config(checkpoint)
    assert spec.experts is not None
    layer = len(spec.experts.layers) * expert_bytes(spec, torch.float16, "none")
    free = memory.loaded_bytes(checkpoint, spec, torch.float16, "none") - layer  # too little by an expert a layer
    host = memory.free_bytes(torch.device("cpu"))
    monkeypatch.setattr(memory, "free_bytes", lambda device: free if device.type == "cuda" else host)

    def check(chosen: EngineConfig) -> None:
        memory.check_fit(chosen, checkpoint, spec, torch.device("cuda"), torch.float16)

    with pytest.raises(InvalidParameter, match="of the GPU are free; accepted: .*cpu_offload_gb") as refused:
        check(settings)
    found = float(str(refused.value).split("cpu_offload_gb ")[1].split()[0])
    check(replace(settings, cpu_offload_gb=found))
    with pytest.raises(InvalidParameter):
        check(replace(settings, cpu_offload_gb=found * 0.7))
    host = 0
    with pytest.raises(InvalidParameter, match="accepted: less"):
        check(replace(settings, cpu_offload_gb=found))
