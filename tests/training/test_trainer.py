from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer

from tests.training.conftest import TINY
from training import mixture
from training.trainer import Plan, Trainer

PLAN = Plan(model=TINY, steps=6, batch_tokens=600, chunks=2)


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in trainer.model.parameters()]


def test_a_resumed_run_ends_with_the_same_bits(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    whole = Trainer(PLAN, tiny_tokenizer, tmp_path / "whole")
    whole.run()
    Trainer(PLAN, tiny_tokenizer, tmp_path / "parts").run(until=3)
    resumed = Trainer(PLAN, tiny_tokenizer, tmp_path / "parts")
    resumed.resume()
    assert resumed.done == 3
    resumed.run()
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
    assert whole.tokens == resumed.tokens


def test_steps_lower_the_loss(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    trainer = Trainer(Plan(model=TINY, steps=40, batch_tokens=600, chunks=2), tiny_tokenizer, tmp_path)
    losses = [trainer.step() for _ in range(20)]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_prompts_count_little_and_padding_nothing(tiny_tokenizer: Tokenizer) -> None:
    for batch in mixture.batch(1, 0, 0.9, tiny_tokenizer, tokens=2000):
        end = tiny_tokenizer.token_to_id("<|im_end|>")
        for tokens, learned in zip(batch.tokens, batch.weights, strict=True):
            last = int((tokens == end).nonzero()[-1])
            assert learned[last] == 1.0
            assert not learned[last + 1 :].any()
            assert set(learned[learned < 1].tolist()) <= {0.0, float(torch.tensor(mixture.PROMPT_WEIGHT))}


def test_the_same_step_has_the_same_data(tiny_tokenizer: Tokenizer) -> None:
    first, again, next_ = (mixture.batch(1, step, 0.5, tiny_tokenizer, tokens=500) for step in (4, 4, 5))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert first[0].tokens.tolist() != next_[0].tokens.tolist()
