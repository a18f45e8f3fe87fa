"""Token trees on torch's layers: each token of a tree has the logits that its path has by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.kv_cache.quantized_cache import Coding
from engine.model.attention import reference
from engine.model.decoder import Decoder, load_decoder
from tests.engine.model import tiny
from tests.engine.speculation.token_trees import TreeSteps, assert_paths_alike

MODELS = ("qwen3", "mistral", "gemma2", "gemma3", "gemma4", "llama4", "gpt_oss", "qwen3_moe", "deepseek_v3", "lfm2")
LENGTHS = [(1, 16), (30, 16), (70, 5)]


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build(*tiny.MODELS[request.param]), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> Decoder:
    return load_decoder(checkpoint, dtype=torch.float32, kernels="torch")


@pytest.mark.slow
@pytest.mark.parametrize(("length", "block_size"), LENGTHS)
def test_a_deterministic_tree_has_the_bits_of_its_paths(checkpoint: Path, length: int, block_size: int) -> None:
    made = load_decoder(checkpoint, dtype=torch.float32, kernels="torch", deterministic=True)
    assert_paths_alike(TreeSteps(made, length, block_size, deterministic=True))


@pytest.mark.parametrize(("length", "block_size"), LENGTHS)
def test_a_tree_has_the_logits_of_its_paths(decoder: Decoder, length: int, block_size: int) -> None:
    assert_paths_alike(TreeSteps(decoder, length, block_size), tolerance=1e-4)


@pytest.mark.parametrize("coding", ["int8", "fp8", "int4"])
def test_so_it_has_with_quantized_kv(tmp_path: Path, coding: Coding) -> None:
    config, model, changed = tiny.MODELS["qwen3"]
    path = tiny.save(tiny.build(config, model, {**changed, "head_dim": 32}), tmp_path / "model")
    made = load_decoder(path, dtype=torch.float32, kernels="torch", deterministic=True)
    assert_paths_alike(TreeSteps(made, 30, 16, coding=coding, deterministic=True))
    assert_paths_alike(TreeSteps(made, 30, 16, coding=coding), tolerance=1e-4)


def test_the_reference_reads_branches_too(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    for length, block_size in LENGTHS:
        found = TreeSteps(decoder, length, block_size).tree()[1]
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "_attend", reference)
            expected = TreeSteps(decoder, length, block_size).tree()[1]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
