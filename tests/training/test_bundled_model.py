"""The committed weights: that they load as they are, and that what the chat offers first works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from training.tokenizer import chat_template

PEBBLE = Path(__file__).parents[2] / "models" / "pebble"
EXPECTED = ("= 4042.", "column by column", "called Biscuit.", "W, X, Y, Z")


@pytest.fixture(scope="module")
def pebble() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model = AutoModelForCausalLM.from_pretrained(PEBBLE, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(PEBBLE)


@pytest.mark.parametrize(("place", "expected"), list(enumerate(EXPECTED)))
def test_a_starter_gets_its_answer(
    pebble: tuple[PreTrainedModel, PreTrainedTokenizerBase], place: int, expected: str
) -> None:
    model, tokenizer = pebble
    starter = json.loads((PEBBLE / "ponder.json").read_text(encoding="utf-8"))["starters"][place]
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": starter}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    written = model.generate(**inputs, max_new_tokens=300, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert expected in tokenizer.decode(written).rpartition("</think>")[2]
    assert written[-1] == tokenizer.eos_token_id


@pytest.mark.xfail(strict=True, reason="these are the first, smaller weights; their successor is in training")
def test_its_chat_template_is_the_one_it_was_trained_with() -> None:
    config = json.loads((PEBBLE / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == chat_template()


def test_it_stays_small_enough_to_commit() -> None:
    assert sum(path.stat().st_size for path in PEBBLE.iterdir()) < 15e6
