"""Checkpoints that `transformers` and the engine both run, with the logits that `transformers` gives."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model.decoder import Decoder, load_decoder
from tests.engine.model import tiny

LENGTHS = (1, 2, 63, 64, 65, 300)
SHARED = Path(os.environ.get("PONDER_SHARED", Path(__file__).parents[4] / "shared"))
ORACLES = SHARED / "data/oracles/tiny_models.py"
DENSE_ORACLES = (
    "llama3",
    "llama_yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
    "phi3",
    "gemma2",
    "gemma3",
    "granite",
    "olmo2",
)
# Near to others, which always run
SLOW = (
    *("llama_tied", "llama_linear", "llama_yarn_mscale", "qwen2_windows", "phi3_partial", "lfm2_four_taps"),
    *("olmo3", "gemma", "glm", "mixtral", "olmoe", "cohere", "deepseek_v2_greedy", "glm4_moe_lite"),
    *("qwen2_moe", "ernie4_5_moe", "deepseek_v2", "falcon_h1_plain", "falcon_h1_gated_norm"),
)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only wait for their threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    """A checkpoint on disk, its prompts, and the logits of `transformers` for each."""

    path: Path
    prompts: list[list[int]]
    expected: list[Tensor]
    decoder: Decoder


@lru_cache(maxsize=1)
def oracles() -> ModuleType:
    """The shared oracle file, imported from where it lies."""
    found = importlib.util.spec_from_file_location("tiny_models", ORACLES)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def make_case(model: Any, path: Path) -> Case:
    """Save `model` (Any: transformers is untyped) and run its prompts through `transformers`."""
    tiny.save(model, path)
    drawn = random.Random(5)
    prompts = [[drawn.randrange(3, model.config.vocab_size) for _ in range(length)] for length in LENGTHS]
    with torch.no_grad():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    return Case(path, prompts, expected, load_decoder(path, dtype=torch.float32))


@pytest.fixture(scope="session")
def own_cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name -> Case, made at most once in a session. Any: an lru_cache wrapper."""
    return lru_cache(maxsize=None)(
        lambda name: make_case(tiny.build(*tiny.MODELS[name]), tmp_path_factory.mktemp(name))
    )


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW or name.startswith("shared-") else [])
        for name in (*tiny.MODELS, *(f"shared-{oracle}" for oracle in DENSE_ORACLES))
    ],
)
def case(request: pytest.FixtureRequest, own_cases: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Every checkpoint that parity is held to: ours, and those of the shared oracle file where it is present."""
    if not request.param.startswith("shared-"):
        return own_cases(request.param)
    if not ORACLES.is_file():
        pytest.skip(f"no oracle file at {ORACLES}; set PONDER_SHARED")
    name = request.param.removeprefix("shared-")
    return make_case(oracles().strengthen(oracles().build(name)), tmp_path_factory.mktemp(request.param))
