"""A tokenizer and a model small enough to train within a test, on prose that is read in a moment."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from training import mixture, train_tokenizer
from training.text import prose, quotable
from training.torch_model import ModelConfig

TINY = ModelConfig(
    vocab_size=400,
    hidden_size=32,
    intermediate_size=48,
    layer_types=("conv", "full_attention"),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=2048,
)


FILES = 90


def reads_little() -> bool:
    return len(prose._files()) == FILES


def read_little(patch: pytest.MonkeyPatch) -> None:
    """A few modules of the standard library are prose enough: all of it is read for some seconds, in each process."""
    files = prose._files()[:FILES]
    patch.setattr(prose, "_files", lambda: files)
    patch.setattr(prose, "vocabulary", lambda: ("apples", "carrying", "closely", "painted", "window", "harbour"))
    _forget()


def _forget() -> None:
    for cached in (prose.paragraphs, quotable._modules, quotable._by_ending):
        cached.cache_clear()
    mixture._lengths.clear()


@pytest.fixture(scope="package", autouse=True)
def little_prose() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        read_little(patch)
        yield
    _forget()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    rng = Random(0)
    texts = [text for _ in range(200) for text, _ in train_tokenizer.segments(mixture.conversation(rng, 0.5))]
    return train_tokenizer.train(texts, TINY.vocab_size)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Sums in one order, so that two runs can be compared bit for bit."""
    torch.set_num_threads(1)
