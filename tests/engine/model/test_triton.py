"""A decoder on the Triton kernels, on a GPU or interpreted, against the same decoder on torch and in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig, InvalidParameter
from engine.config import KernelName
from engine.model.decoder import Decoder, load_decoder
from tests.engine.model import tiny
from tests.engine.model.stepping import Stepper, apart
from tests.engine.speculation.token_trees import TreeSteps, assert_paths_alike

pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = {"hidden_size": 96, "head_dim": 32, "intermediate_size": 160, "vocab_size": 389, "num_hidden_layers": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # Any: arguments of untyped configuration classes
    "qwen3": ("qwen3", {}),
    "llama_biased": ("llama_biased", {}),
    "many_heads_on_one": ("llama", {"num_attention_heads": 20, "num_key_value_heads": 1, "hidden_size": 160}),
    "odd_head": ("llama", {"head_dim": 20, "hidden_size": 60}),
    "windows": ("mistral", {"sliding_window": 9}),
    "partial_rotation": ("phi3_partial", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": None}),
    "softcaps": ("gemma2", {"sliding_window": 7}),
    "post_norms": ("gemma3", {"sliding_window": 7, "num_hidden_layers": 6}),
    "projection_norms": ("olmo2", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None}),
    "qwen2_moe": ("qwen2_moe", {"num_hidden_layers": 3}),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 3}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None}),
    "ernie4_5_moe": ("ernie4_5_moe", {"num_hidden_layers": 3}),
    "glm4_moe": ("glm4_moe", {"num_hidden_layers": 3}),
    "sinks": ("gpt_oss", {"sliding_window": 9}),
    "growing_queries": ("ministral3", {}),
    "head_norms_less_the_mean": ("cohere", {}),
    "parallel": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 9}),
    "chunks": ("llama4", {"num_hidden_layers": 4, "attention_chunk_size": 9}),
    "kinds_of_layers": ("gemma4", {"num_hidden_layers": 6, "global_head_dim": 64}),
    "experts_beside_an_mlp": ("gemma4_moe", {"num_hidden_layers": 6, "global_head_dim": 48}),
    "multipliers": ("granite", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": None}),
}
LENGTHS = (1, 9, 16)
CHUNK = 10
# Triton's interpreter cuts off where it should round to bfloat16, so there they are compared in float16
DTYPES = (torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float16,)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base, changed = FAMILIES[request.param]
    config, model, overrides = tiny.MODELS[base]
    sizes = {key: value for key, value in {**overrides, **WIDE, **changed}.items() if value is not None}
    made = tiny.build(config, model, sizes)
    return tiny.save(made.to(torch.float16), tmp_path_factory.mktemp(request.param))


def load(path: Path, dtype: torch.dtype, kernels: KernelName = "triton") -> Decoder:
    return load_decoder(path, dtype=dtype, device=DEVICE, kernels=kernels)


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, 380) for _ in range(length)] for length in LENGTHS]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["qwen3", "windows"], indirect=True)
@pytest.mark.parametrize("length", [5, 63])
def test_a_tree_has_the_logits_of_its_paths(checkpoint: Path, length: int) -> None:
    """Five branches of one token would share the longer prompt's last block, had they no slots of their own there. With
    the same bits where steps are cut alike."""
    assert_paths_alike(TreeSteps(load(checkpoint, DTYPES[-1]), length, 16), tolerance=3 * torch.finfo(DTYPES[-1]).eps)
    made = load_decoder(checkpoint, dtype=DTYPES[-1], device=DEVICE, kernels="triton", deterministic=True)
    assert_paths_alike(TreeSteps(made, length, 16))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_those_of_torch(checkpoint: Path, dtype: torch.dtype) -> None:
    exact = Stepper(load(checkpoint, torch.float32, "torch"), prompts(), seed=1).run(CHUNK)
    rounded = Stepper(load(checkpoint, dtype, "torch"), prompts(), seed=1).run(CHUNK)
    decoder = load(checkpoint, dtype)
    assert decoder.on_gpu
    found = Stepper(decoder, prompts(), seed=1).run(CHUNK)
    for ours, plain, expected in zip(found, rounded, exact, strict=True):
        assert apart(ours, expected) < max(2 * apart(plain, expected), 2 * torch.finfo(dtype).eps)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is what they are for")
def test_they_are_refused_where_they_cannot_run(checkpoint: Path) -> None:
    with pytest.raises(InvalidParameter, match="float32, and they compute in bfloat16 and float16; accepted: auto"):
        load(checkpoint, torch.float32)
    with pytest.raises(InvalidParameter, match="kernels is 'cuda'; accepted: auto, torch, triton"):
        EngineConfig(model="none", kernels="cuda")  # type: ignore[arg-type]  # refused
