"""Training of the draft and of the heads: losses against plain references, and runs that were stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn

from tests.training.conftest import TINY
from tests.training.distil.test_acceptance import random_model
from training import export, mixture
from training.distil import answers, draft, heads
from training.distil.distillation import Distillation, DistilPlan, rows_of
from training.torch_model import Model
from training.train_tokenizer import segments

PLAN = DistilPlan(steps=6, batch=2, matrix_lr=0.02, adam_lr=2e-3)
ATTENDING = replace(TINY, layer_types=("full_attention",) * 2)


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in module.parameters()]


def lessons(tokenizer: Tokenizer, base: Model, count: int = 4) -> list[draft.Lesson]:
    """Answers as the base might have given them, with its states."""
    rng, found = Random(0), list[draft.Lesson]()
    while len(found) < count:
        parts = segments(mixture.TASKS["chat"](rng, "train", 0.2))
        at = next(at for at, (_, written) in enumerate(parts) if written)
        ids = tokenizer.encode(parts[at][0], add_special_tokens=False).ids
        answer = answers.Answer(tuple(parts[:at]), tuple(ids), 0.0)
        (states,) = answers.states(base, [(answer.prompt(tokenizer), ids)], bfloat16=False)
        found.append(draft.Lesson(answer, states))
    return found


# -- heads


def test_heads_compute_what_the_paper_says() -> None:
    made = heads.HeadStack(8)
    states = torch.randn(5, 8)
    assert torch.equal(made(states), states[:, None].expand(5, 3, 8)), "untrained, a head is the base's own"
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    found, h = made(states).detach().numpy(), states.numpy()
    for at in range(3):
        weight, bias = (made.get_parameter(f"linears.{at}.{name}").detach().numpy() for name in ("weight", "bias"))
        inner = h @ weight.T + bias
        np.testing.assert_allclose(found[:, at], h + inner / (1 + np.exp(-inner)), rtol=1e-5, atol=1e-5)


def test_a_head_learns_the_token_that_is_its_number_further() -> None:
    states, targets = heads.examples([(1, 2, 3, 4), (7, 8)], [torch.zeros(4, 2), torch.ones(2, 2)], 3)
    assert states[:, 0].tolist() == [0, 0, 0, 0, 1, 1]
    assert targets.tolist() == [[2, 3, 4], [3, 4, -1], [4, -1, -1], [-1, -1, -1], [8, -1, -1], [-1, -1, -1]]


def test_heads_are_stored_under_the_names_of_published_ones(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    base = random_model(4)
    export.export(base, tiny_tokenizer, tmp_path / "pebble")
    made = heads.HeadStack(TINY.hidden_size)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    heads.save(made, tmp_path / "pebble", tmp_path / "heads")
    stored = load_file(tmp_path / "heads" / "model.safetensors")
    assert {name: tuple(weight.shape) for name, weight in stored.items()} == {
        name: shape
        for at in range(3)
        for name, shape in ((f"{at}.0.linear.weight", (32, 32)), (f"{at}.0.linear.bias", (32,)))
    }
    config = json.loads((tmp_path / "heads" / "config.json").read_text("utf-8"))
    assert config["base_model"] == "pebble" and config["medusa_num_heads"] == 3 and config["vocab_size"] == 400
    read = heads.load(tmp_path / "heads")
    assert all(torch.equal(a.bfloat16().float(), b) for a, b in zip(weights(made), weights(read), strict=True))


# -- the draft


def test_the_drafts_loss_is_the_cross_entropy_to_the_bases_distribution(tiny_tokenizer: Tokenizer) -> None:
    base, made = random_model(5), Model(ATTENDING)
    learned = lessons(tiny_tokenizer, base, 2)
    plan = replace(PLAN, batch=2)
    student = draft.DraftStudent(made, base.model.embed_tokens.weight, learned, tiny_tokenizer, plan)
    found = student.backward(0)
    lost = weight = 0.0
    with torch.inference_mode():
        for lesson in learned:
            prompt, size = lesson.answer.prompt(tiny_tokenizer), len(lesson.answer.tokens)
            tokens = torch.tensor([[*prompt, *lesson.answer.tokens]])
            wanted = (base(tokens)[0, len(prompt) - 1 : -1] / draft.TEMPERATURE).softmax(-1)
            guessed = (made(tokens)[0, len(prompt) - 1 : -1] / draft.TEMPERATURE).log_softmax(-1)
            share = min(1.0, (draft.SHORT / size) ** 0.5)
            lost -= share * float((wanted * guessed).sum())
            weight += share * size
    assert found == pytest.approx(lost / weight, rel=0.02)  # the states are kept in bfloat16
    assert all(each.grad is not None for each in made.parameters())


def test_only_the_answer_is_learned(tiny_tokenizer: Tokenizer) -> None:
    for lesson in lessons(tiny_tokenizer, random_model(6)):
        row = draft.row_of(lesson, tiny_tokenizer)
        prompt = lesson.answer.prompt(tiny_tokenizer)
        assert row.tokens == [*prompt, *lesson.answer.tokens]
        assert [weight > 0 for weight in row.weights] == [False] * len(prompt) + [True] * len(lesson.answer.tokens)


# -- runs


def test_rows_all_come_once_before_any_comes_again() -> None:
    rows = list(range(7))
    taken = [row for step in range(7) for row in rows_of(rows, step, 3, seed=1)]
    assert all(sorted(taken[at : at + 7]) == rows for at in (0, 7, 14))
    assert taken[:7] != taken[7:14]


@pytest.mark.parametrize("student", ["heads", "draft"])
def test_a_resumed_run_ends_with_the_same_bits(student: str, tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    base = random_model(7)
    learned = lessons(tiny_tokenizer, base)

    def run(work: Path) -> Distillation[Any]:  # Any: a draft or heads
        torch.manual_seed(0)
        embedding = base.model.embed_tokens.weight
        if student == "draft":
            made = draft.DraftStudent(Model(ATTENDING), embedding, learned, tiny_tokenizer, PLAN)
            return Distillation(PLAN, made, work)
        found = heads.examples([each.answer.tokens for each in learned], [each.states for each in learned], 3)
        return Distillation(PLAN, heads.HeadsStudent(heads.HeadStack(32), embedding, *found, PLAN), work)

    whole = run(tmp_path / "whole")
    before = weights(whole.student.module)
    whole.run()
    run(tmp_path / "parts").run(until=3)
    resumed = run(tmp_path / "parts")
    resumed.resume()
    assert resumed.done == 3
    resumed.run()
    after = weights(resumed.student.module)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole.student.module), after, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
