"""Gemma 4's images, whose tokens attend to each other in the layers that slide alone, on the Triton kernels, on a GPU
or a pretended one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine import EngineConfig
from tests.engine.gpu.test_gpu_gemma3_images import likeliest
from tests.engine.multimodal import seeing_gemma4

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.slow]
TEXT = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32}


@pytest.fixture(scope="module", params=[False, True], ids=["small", "large"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_gemma4.write(tmp_path_factory.mktemp("gpu"), seeing_gemma4.build(large=request.param, text=TEXT))


def test_tokens_after_images_are_those_of_torch(checkpoint: Path) -> None:
    """As near to float32 as torch is in 16 bits. The small models' images have inputs of each layer, the large ones'
    attend in both directions."""
    common = {"model": str(checkpoint), "kv_blocks": 40, "max_running": 2}
    exact, rounded = (
        asyncio.run(likeliest(EngineConfig(**common, device="cpu", dtype=dtype, kernels="torch")))  # type: ignore[arg-type]  # fields
        for dtype in ("float32", "float16")
    )
    on_gpu = EngineConfig(**common, device="cuda", dtype="float16", kernels="triton")  # type: ignore[arg-type]  # fields
    found = asyncio.run(likeliest(on_gpu))
    assert apart(found, exact) < 2 * apart(rounded, exact)


def apart(found: list[dict[int, float]], exact: list[dict[int, float]]) -> float:
    """Returns how far the likeliest tokens' log-probabilities are apart."""
    furthest = 0.0
    for one, other in zip(found, exact, strict=True):
        shared = sorted(one.keys() & other.keys(), key=lambda token: -other[token])[:8]
        assert len(shared) == 8
        furthest = max(furthest, *(abs(one[token] - other[token]) for token in shared))
    return furthest
