"""A small random Qwen3 with a byte tokenizer on disk, and engines that run it."""

from __future__ import annotations

from pathlib import Path

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
