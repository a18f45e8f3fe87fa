"""A deterministic engine on the Triton kernels: a request's bits depend on nothing that runs beside it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig
from tests.engine import test_deterministic as on_a_cpu
from tests.engine.speculation import test_same_tokens as drafted

checkpoint = on_a_cpu.checkpoint  # the fixture


@pytest.mark.slow
def test_mixes_chunks_and_the_cache_change_no_bit(checkpoint: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = on_a_cpu.requests(40)
    if device == "cpu":  # interpreted: a few short ones
        short = [replace(each, prompt=each.prompt[-14:], span=replace(each.span, max_tokens=2)) for each in asked]
        asked = [each for each in short if len(each.prompt) > 10][:3]
    dtype = "bfloat16" if device == "cuda" else "float16"
    same: dict[str, Any] = {"dtype": dtype, "kernels": "triton", "device": device, "max_running": 8}

    async def run() -> tuple[list[object], list[object]]:
        alone = await on_a_cpu.answers(checkpoint, asked, at_once=1, prefix_cache=False, **same)
        chunk = 40 if device == "cuda" else 9
        return alone, await on_a_cpu.answers(checkpoint, asked[::-1], at_once=8, max_batch_tokens=chunk, **same)

    alone, mixed = asyncio.run(run())
    assert mixed[::-1] == alone


@pytest.mark.slow
def test_drafts_change_no_bit(checkpoint: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = drafted.requests(60 if device == "cuda" else 4, seed=2)
    asked = [replace(each, span=replace(each.span, max_tokens=9)) for each in asked]
    dtype: Any = "bfloat16" if device == "cuda" else "float16"
    same: dict[str, Any] = {
        "kernels": "triton",
        "device": device,
        "max_running": 8,
        "kv_blocks": 400,
        "deterministic": True,
    }
    found, _ = asyncio.run(drafted.assert_same_answers(EngineConfig(str(checkpoint), dtype=dtype, **same), asked, 0.2))
    assert found.accepted > 0
