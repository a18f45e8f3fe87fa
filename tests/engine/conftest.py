"""Small random models with a byte tokenizer on disk, and engines that run them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.model import tiny
from tests.tiny import byte_tokenizer


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "random-qwen3"
    # Untied: with tied random embeddings, greedy decoding would repeat one token and hide mistakes.
    tiny.build("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that our own CPU kernels run."""
    path = tmp_path_factory.mktemp("models") / "random-wide"
    sizes = {"hidden_size": 96, "head_dim": 32, "intermediate_size": 160}
    tiny.build("Qwen3Config", "Qwen3ForCausalLM", sizes).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def random_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts in the place of MLPs."""
    path = tmp_path_factory.mktemp("models") / "random-qwen3-moe"
    tiny.build("Qwen3MoeConfig", "Qwen3MoeForCausalLM", tiny.EXPERTS).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def random_latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latent attention, and experts of group-limited routing."""
    path = tmp_path_factory.mktemp("models") / "random-deepseek-v3"
    tiny.build(*tiny.MODELS["deepseek_v3"]).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def random_recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gated DeltaNet in most layers, attention in one."""
    path = tmp_path_factory.mktemp("models") / "random-qwen3-5"
    tiny.build("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", tiny.DELTA).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def random_mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mamba-2 in most layers, attention in one."""
    path = tmp_path_factory.mktemp("models") / "random-granite-4"
    changed = {**tiny.SPACE, "num_local_experts": 0}
    tiny.build("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", changed).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def random_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short convolutions in most layers, attention in the others.

    Of this seed no two best tokens are nearer than 3e-4 in the texts of `test_same_answer`: of tiny's own, 2e-6.
    """
    path = tmp_path_factory.mktemp("models") / "random-lfm2"
    changed = {"num_hidden_layers": 5, "layer_types": tiny.LFM2_LAYERS, "tie_word_embeddings": False}
    tiny.build("Lfm2Config", "Lfm2ForCausalLM", changed, seed=8).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def random_hybrid_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short convolutions, attention, and experts in all layers but two."""
    return _untied("lfm2_moe", tmp_path_factory)


@pytest.fixture(scope="session")
def random_gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of two sizes, layers that share keys and values, inputs of each layer, and experts beside MLPs."""
    return _untied("gemma4", tmp_path_factory, tiny.MODELS["gemma4_moe"][2])


@pytest.fixture(scope="session")
def random_llama4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention within chunks, and experts in every other layer."""
    return _untied("llama4", tmp_path_factory)


@pytest.fixture(scope="session")
def random_windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows of 24 tokens in five layers of six, whose K/V is in groups of its own."""
    return _untied("gemma3", tmp_path_factory)


@pytest.fixture(scope="session")
def random_beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mamba-2 and attention side by side in each layer."""
    return _untied("falcon_h1", tmp_path_factory)


@pytest.fixture(scope="session")
def random_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mamba-2, attention, an MLP or experts, each in layers of its own."""
    return _untied("nemotron_h_moe", tmp_path_factory)


def _untied(name: str, tmp_path_factory: pytest.TempPathFactory, more: Mapping[str, Any] | None = None) -> Path:
    """`more` are fields that the named configuration has not. Any: arguments of untyped configuration classes."""
    path = tmp_path_factory.mktemp("models") / f"random-{name.replace('_', '-')}"
    config_class, model_class, changed = tiny.MODELS[name]
    tiny.build(config_class, model_class, {**(more or {}), **changed, "tie_word_embeddings": False}).save_pretrained(
        path
    )
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path
