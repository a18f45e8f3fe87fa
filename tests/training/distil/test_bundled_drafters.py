"""The committed drafters: their files, and that they guess ahead on prompts that training never used."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from training import export
from training.distil import acceptance, heads
from training.distil.acceptance import HeldOutAnswer, by_case, total

MODELS = Path(__file__).parents[3] / "models"
BASE, DRAFT, HEADS = MODELS / "pebble", MODELS / "pebble-draft", MODELS / "pebble-medusa"
CASES = 3  # of each ability


@pytest.fixture(scope="module")
def held_out() -> list[HeldOutAnswer]:
    asked = asyncio.run(acceptance.held_out(BASE, CASES, [0.0]))
    return [each for each in asked if len(each.tokens) > 1]


def test_the_heads_fit_the_bundled_model() -> None:
    config = json.loads((HEADS / "config.json").read_text("utf-8"))
    base = json.loads((BASE / "config.json").read_text("utf-8"))
    assert config["base_sha256"] == sha256((BASE / "model.safetensors").read_bytes()).hexdigest()
    assert (config["base_model"], config["architectures"]) == (BASE.name, ["MedusaHeads"])
    assert all(config[name] == base[name] for name in ("hidden_size", "vocab_size"))
    weights = load_file(HEADS / "model.safetensors")
    size = base["hidden_size"]
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {
        f"{at}.0.linear.{name}": shape
        for at in range(config["medusa_num_heads"])
        for name, shape in (("weight", (size, size)), ("bias", (size,)))
    }
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert (HEADS / "model.safetensors").stat().st_size <= 1e6


def test_the_draft_stays_a_small_qwen3() -> None:
    config = json.loads((DRAFT / "config.json").read_text("utf-8"))
    assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == ("qwen3", 128, 4)
    assert (DRAFT / "model.safetensors").stat().st_size <= 3.5e6


@pytest.mark.slow
def test_most_of_what_the_draft_guesses_is_kept(held_out: list[HeldOutAnswer]) -> None:
    rights = acceptance.draft_guesses(export.load(DRAFT), held_out)
    assert total(by_case(held_out, rights, 4)).share > 0.5


@pytest.mark.slow
def test_the_heads_give_more_than_a_token_a_step(held_out: list[HeldOutAnswer]) -> None:
    rights = acceptance.head_guesses(export.load(BASE), heads.load(HEADS), held_out)
    found = total(by_case(held_out, rights, 3))
    assert found.tokens_per_step > 1.5
    assert found.kept[0] > found.kept[1] > found.kept[2] > 0
