from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.training.conftest import TINY
from training.export import export, load
from training.torch_model import Model, ModelConfig
from training.train_tokenizer import MARKS, SPECIAL

ATTENDING = replace(TINY, layer_types=("full_attention",) * 2)


def far(config: ModelConfig) -> Model:
    """Weights far from their initial values, so that a part left out would show."""
    torch.manual_seed(0)
    model = Model(config)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


@pytest.fixture
def model() -> Model:
    return far(TINY)


@pytest.mark.parametrize(("config", "kind"), [(TINY, "lfm2"), (ATTENDING, "qwen3")])
def test_transformers_computes_the_same_logits(
    config: ModelConfig, kind: str, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = far(config)
    export(model, tiny_tokenizer, tmp_path, dtype=torch.float32)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    theirs, loading = loaded  # a pair, which its annotation does not say
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert theirs.config.model_type == kind
    tokens = torch.randint(0, TINY.vocab_size, (3, 40))
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("config", [TINY, ATTENDING])
def test_a_model_is_read_back(config: ModelConfig, tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    export(far(config), tiny_tokenizer, tmp_path, dtype=torch.float32)
    read = load(tmp_path)
    assert read.config == config
    assert all(torch.equal(a, b) for a, b in zip(far(config).parameters(), read.parameters(), strict=True))


def test_tokenizer_loads_with_single_digits_and_without_unknowns(
    model: Model, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    export(model, tiny_tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.tokenize("1234") == ["1", "2", "3", "4"]
    for text in ("What's 12 × 7?", " two  spaces\n\n", "naïve 你好 🙂", "<think>\nso 5\n</think>"):
        assert theirs.decode(theirs(text, add_special_tokens=False).input_ids) == text
    assert theirs.eos_token == "<|im_end|>"


def test_marks_are_kept_in_decoded_text_and_turn_tokens_are_not(
    model: Model, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    export(model, tiny_tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs("".join((*SPECIAL, *MARKS)), add_special_tokens=False).input_ids
    assert len(ids) == len(SPECIAL) + len(MARKS)
    assert theirs.decode(ids, skip_special_tokens=True) == "".join(MARKS)


def test_folder_says_what_the_chat_may_offer(model: Model, tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    export(model, tiny_tokenizer, tmp_path)
    offer = json.loads((tmp_path / "ponder.json").read_text())
    assert "--model" in offer["about"] and len(offer["starters"]) == 3
