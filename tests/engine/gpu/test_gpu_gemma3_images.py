"""Images whose tokens attend to each other, on the Triton kernels, on a GPU or a pretended one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine import GREEDY, Engine, EngineConfig, Span
from tests.engine.multimodal import seeing_gemma3
from tests.engine.multimodal.seeing import asked

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.slow]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return seeing_gemma3.write(tmp_path_factory.mktemp("gpu"), seeing_gemma3.build(text=sizes))


@pytest.mark.parametrize("changed", [{}, {"max_batch_tokens": 9}, {"deterministic": True}], ids=str)
def test_tokens_of_an_image_attend_in_both_directions(checkpoint: Path, changed: dict[str, object]) -> None:
    common = {"model": str(checkpoint), "kv_blocks": 40, "max_running": 2}
    on_cpu = EngineConfig(**common, device="cpu", dtype="float32", kernels="torch")  # type: ignore[arg-type]  # fields
    on_gpu = EngineConfig(**common, device="cuda", dtype="float16", **changed)  # type: ignore[arg-type]  # fields
    found = asyncio.run(likeliest(on_cpu)), asyncio.run(likeliest(on_gpu))
    for one, other in zip(*found, strict=True):
        shared = sorted(one.keys() & other.keys(), key=lambda token: -one[token])[:5]
        assert len(shared) == 5 and max(abs(one[token] - other[token]) for token in shared) < 0.05


async def likeliest(config: EngineConfig) -> list[dict[int, float]]:
    """Returns the most probable tokens of two positions after two pictures, and their log-probabilities."""
    async with await Engine.start(config) as engine, await engine.open(await asked(engine, "What?", 21, 22)) as seq:
        out = await seq.generate_all(Span(GREEDY, max_tokens=2, logprobs=20, ignore_eos=True))
    return [dict(each.top) for each in out.logprobs]
