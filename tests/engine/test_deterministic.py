"""A deterministic engine: a request's tokens and log-probabilities are the same bits in any batch."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from engine import Engine, EngineConfig, InvalidParameter, Sampling, Span
from engine.config import KvDType
from tests.engine.model import tiny

pytestmark = pytest.mark.slow

REQUESTS = 120


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    span: Span


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, model, overrides = tiny.MODELS["qwen3"]
    sizes = {**overrides, "hidden_size": 96, "head_dim": 32, "intermediate_size": 160}
    path = tiny.save(tiny.build(config, model, sizes), tmp_path_factory.mktemp("deterministic"))
    (path / "tokenizer.json").write_bytes(Path("models/pebble/tokenizer.json").read_bytes())
    return path


def requests(count: int) -> list[Request]:
    draw = random.Random(7)
    beginnings = [[draw.randrange(3, 380) for _ in range(90)] for _ in range(4)]
    made = []
    for index in range(count):
        tail = [draw.randrange(3, 380) for _ in range(draw.choice((1, 2, 15, 16, 40)))]
        sampling = draw.choice(
            (
                Sampling(temperature=0.0),
                Sampling(temperature=1.0),
                Sampling(temperature=0.8, top_p=0.9),
                Sampling(temperature=1.3, top_k=300, min_p=0.01),
                Sampling(temperature=1.0, top_p=0.999, repetition_penalty=1.2),
            )
        )
        prompt = draw.choice((*beginnings, []))[: draw.choice((30, 64, 90))] + tail
        seeded = replace(sampling, seed=index)
        made.append(Request(prompt, Span(seeded, max_tokens=6, logprobs=3, ignore_eos=True)))
    return made


async def answers(path: Path, asked: list[Request], *, at_once: int, **config: Any) -> list[object]:
    """Returns each request's results, down to the bits. Any: fields of EngineConfig."""
    settings = {"kv_blocks": 900, "threads": 2, "deterministic": True, **config}
    gate = asyncio.Semaphore(at_once)
    async with await Engine.start(EngineConfig(str(path), **settings)) as engine:

        async def one(request: Request) -> object:
            async with gate, await engine.open(request.prompt) as seq:
                result = await seq.generate_all(request.span)
                return result.token_ids, result.logprobs

        return await asyncio.gather(*(one(request) for request in asked))


@pytest.mark.parametrize("model", ["random_mixture", "random_latent", "random_gemma4", "random_llama4"])
async def test_mixes_change_no_bit_of_experts(model: str, request: pytest.FixtureRequest) -> None:
    path, asked = request.getfixturevalue(model), requests(REQUESTS // 6)
    alone = await answers(path, asked, at_once=1, prefix_cache=False, dtype="float32")
    assert await answers(path, asked[::-1], at_once=8, max_batch_tokens=64, dtype="float32") == alone[::-1]


@pytest.mark.parametrize("kv_dtype", ["auto", "int4"])
@pytest.mark.parametrize(
    ("dtype", "kernels"), [("bfloat16", "auto"), ("bfloat16", "torch"), ("float32", "torch")], ids=str
)
async def test_mixes_chunks_and_the_cache_change_no_bit(
    checkpoint: Path, dtype: Literal["bfloat16", "float32"], kernels: Literal["auto", "torch"], kv_dtype: KvDType
) -> None:
    asked = requests(REQUESTS if kernels == "auto" else REQUESTS // 4)
    same = {"dtype": dtype, "kernels": kernels, "kv_dtype": kv_dtype, "kv_max_kl": 1.0}
    alone = await answers(checkpoint, asked, at_once=1, prefix_cache=False, **same)
    shuffled = list(range(len(asked)))
    random.Random(1).shuffle(shuffled)
    mixed = await answers(checkpoint, [asked[i] for i in shuffled], at_once=40, max_batch_tokens=75, **same)
    assert [mixed[shuffled.index(i)] for i in range(len(asked))] == alone


async def test_on_batch_invariant_numerics_nothing_changes_a_bit_by_default(checkpoint: Path) -> None:
    asked = requests(REQUESTS // 4)
    same = {"dtype": "bfloat16", "deterministic": False}
    async with await Engine.start(EngineConfig(str(checkpoint), kv_blocks=64, dtype="bfloat16")) as engine:
        if not engine.numerics.batch_invariant:
            pytest.skip("no kernels in C++ here: bfloat16 on torch is the same with deterministic alone")
    alone = await answers(checkpoint, asked, at_once=1, prefix_cache=False, **same)
    assert await answers(checkpoint, asked, at_once=40, max_batch_tokens=75, **same) == alone


async def test_without_it_the_torch_kernels_do_depend_on_the_batch(checkpoint: Path) -> None:
    """So that the test above can fail."""
    asked = requests(REQUESTS // 4)
    same = {"dtype": "bfloat16", "kernels": "torch", "deterministic": False}
    alone = await answers(checkpoint, asked, at_once=1, prefix_cache=False, **same)
    assert await answers(checkpoint, asked, at_once=40, max_batch_tokens=75, **same) != alone


@pytest.mark.parametrize("kv_dtype", ["auto", "int4"])
async def test_preemption_changes_no_bit(checkpoint: Path, kv_dtype: KvDType) -> None:
    asked = requests(40)
    same = {"prefix_cache": False, "kv_dtype": kv_dtype, "kv_max_kl": 1.0}
    alone = await answers(checkpoint, asked, at_once=1, **same)
    assert await answers(checkpoint, asked, at_once=40, kv_blocks=24, **same) == alone


async def test_torch_on_a_gpu_refuses_it(checkpoint: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    with pytest.raises(InvalidParameter, match="accepted: with those"):
        await Engine.start(EngineConfig(str(checkpoint), device="cuda", kernels="torch", deterministic=True))


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="auto, torch"):
        EngineConfig("x", kernels="fast")  # type: ignore[arg-type]
