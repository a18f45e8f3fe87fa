"""The training loop: a resumed run has the bits of one that never stopped, it learns, and refuses what cannot work."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import CheckpointError, InvalidParameter, TrainingDiverged
from engine.model.finetuning.chat_examples import ChatExample, chat_examples
from engine.model.finetuning.lora_model import LoraModel
from engine.model.finetuning.lora_trainer import (
    STATE,
    LoraRecipe,
    LoraTrainer,
    TrainingProgress,
    batches_of,
    identity_of,
    plan_memory,
    training_bytes,
)
from engine.model.memory import free_bytes, spec_of
from engine.model.tokenizer import Tokenizer
from tests.tiny import write_checkpoint

PEBBLE = Path(__file__).parents[4] / "models/pebble"
RECIPE = LoraRecipe(rank=4, alpha=8, learning_rate=0.02, epochs=3, batch_tokens=150)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def examples(model: Path) -> list[ChatExample]:
    tokenizer, words = Tokenizer.load(model), ("hi", "so", "well", "who are you", "ok")
    chats = [
        [{"role": "user", "content": f"{word} {at}"}, {"role": "assistant", "content": "xyzzy"}]
        for word in words
        for at in range(4)
    ]
    return [each for chat in chats for each in chat_examples(tokenizer, chat)]


def trainer(model: Path, examples: list[ChatExample], out: Path, recipe: LoraRecipe = RECIPE) -> LoraTrainer:
    lora = LoraModel(model, rank=recipe.rank, alpha=recipe.alpha, targets=recipe.targets, seed=recipe.seed)
    return LoraTrainer(lora, recipe, examples[4:], examples[:4], out, identity_of(b"tiny", examples[4:], examples[:4]))


def after(run: LoraTrainer, step: int) -> bool:
    return run.done == step


def test_it_learns_what_the_assistant_writes(model: Path, examples: list[ChatExample], tmp_path: Path) -> None:
    run = trainer(model, examples, tmp_path, replace(RECIPE, epochs=12, learning_rate=0.005))
    seen = list[TrainingProgress]()
    run.run(seen.append)
    held_out = [point.loss for point in run.losses if point.held_out]
    assert len(held_out) == 13 and held_out[0] > 3 and held_out[-1] < 0.5
    assert [each.step for each in seen] == list(range(1, len(run.batches) + 1)) and seen[-1].seconds_left == 0
    assert [each.epoch for each in seen if each.held_out is not None] == list(range(1, 13))


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    model: Path, examples: list[ChatExample], tmp_path: Path
) -> None:
    whole = trainer(model, examples, tmp_path / "whole")
    whole.run()
    for stop_after in (1, len(whole.batches) // 3, len(whole.batches) - 1):
        out = tmp_path / str(stop_after)
        stopped = trainer(model, examples, out)
        stopped.run(stop=partial(after, stopped, stop_after))
        assert stopped.done == stop_after and not stopped.finished
        resumed = trainer(model, examples, out)
        resumed.resume()
        resumed.run()
        assert resumed.losses == whole.losses and resumed.tokens == whole.tokens
        for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_another_seed_is_another_run(model: Path, examples: list[ChatExample], tmp_path: Path) -> None:
    one, other = (trainer(model, examples, tmp_path, replace(RECIPE, seed=seed)) for seed in (0, 1))
    assert one.batches != other.batches
    assert not torch.equal(one.model.parameters()[0], other.model.parameters()[0])


def test_an_epoch_has_each_example_once_in_batches_that_fit(examples: list[ChatExample]) -> None:
    for batches in batches_of(examples, RECIPE):
        assert sorted(at for batch in batches for at in batch) == list(range(len(examples)))
        assert all(sum(len(examples[at].token_ids) for at in batch) <= RECIPE.batch_tokens for batch in batches)
    alone = batches_of(examples, replace(RECIPE, batch_tokens=1))
    assert all(len(batch) == 1 for batches in alone for batch in batches)


def test_the_rate_rises_and_falls_to_zero() -> None:
    shares = [replace(RECIPE, warmup=0.1).share_of_rate(step, 100) for step in range(100)]
    assert shares[:10] == [pytest.approx((step + 1) / 10) for step in range(10)] and shares[10] == 1
    assert all(a > b for a, b in pairwise(shares[10:])) and shares[-1] < 1e-3


def test_a_loss_that_is_no_number_stops_the_run_and_saves_nothing(
    model: Path, examples: list[ChatExample], tmp_path: Path
) -> None:
    run = trainer(model, examples, tmp_path)
    with torch.no_grad():
        run.model.parameters()[1].fill_(float("inf"))
    with pytest.raises(TrainingDiverged, match=r"step 1 is nan.*below 0.02"):
        run.run()
    assert not (tmp_path / STATE).exists() and run.done == 0


def test_a_state_of_another_run_is_refused(model: Path, examples: list[ChatExample], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run to go on with"):
        trainer(model, examples, tmp_path).resume()
    stopped = trainer(model, examples, tmp_path)
    stopped.run(stop=lambda: True)
    with pytest.raises(CheckpointError, match=r"learning_rate 0.02 \(now 0.1\)"):
        trainer(model, examples, tmp_path, replace(RECIPE, learning_rate=0.1)).resume()
    with pytest.raises(CheckpointError, match="examples"):
        trainer(model, examples[::-1], tmp_path).resume()
    (tmp_path / STATE).write_bytes((tmp_path / STATE).read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="damaged"):
        trainer(model, examples, tmp_path).resume()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 0), ("rank", 257), ("alpha", 0.0), ("alpha", float("nan")), ("learning_rate", 0.0), ("epochs", 0),
        ("learning_rate", float("inf")), ("batch_tokens", 0), ("warmup", 1.5), ("seed", -1), ("dtype", "float16"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(field: str, value: Any) -> None:  # Any: one of each field's type
    with pytest.raises(InvalidParameter, match=f"{field} is .*accepted"):
        replace(RECIPE, **{field: value})


def test_what_does_not_fit_is_recomputed_and_then_refused() -> None:
    spec, free = spec_of(PEBBLE), free_bytes(CPU)
    assert not plan_memory(PEBBLE, spec, RECIPE, 100, CPU)
    tokens = next(1 << at for at in range(21) if training_bytes(
        PEBBLE, spec, replace(RECIPE, batch_tokens=1 << at), 1, recompute=False) > free)  # fmt: skip
    if training_bytes(PEBBLE, spec, replace(RECIPE, batch_tokens=tokens), 1, recompute=True) < free // 2:
        assert plan_memory(PEBBLE, spec, replace(RECIPE, batch_tokens=tokens), 1, CPU)
    with pytest.raises(InvalidParameter, match=r"takes about .* GB, and .* GB are free; accepted: fewer batch_tokens"):
        plan_memory(PEBBLE, spec, RECIPE, 1 << 26, CPU)
