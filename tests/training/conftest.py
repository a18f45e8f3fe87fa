"""A tokenizer and a model small enough to train within a test."""

from __future__ import annotations

from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from training import mixture, tokenizer
from training.model import ModelConfig

TINY = ModelConfig(
    vocab_size=400,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=2048,
)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    rng = Random(0)
    texts = [text for _ in range(200) for text, _ in tokenizer.segments(mixture.conversation(rng, 0.5))]
    return tokenizer.train(texts, TINY.vocab_size)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Sums in one order, so that two runs can be compared bit for bit."""
    torch.set_num_threads(1)
