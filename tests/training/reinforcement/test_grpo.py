"""Reinforcement learning: advantages, the policy gradient, what is rewarded, and whole runs with our own engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from tests.training.conftest import TINY
from training import card, export, phrases
from training.conversation import ModelReply, Phrasing
from training.evaluate import EvaluationResult
from training.reinforcement import grpo, questions
from training.reinforcement.grpo import Learner, ReinforcementPlan, advantages, batches, policy_rows
from training.reinforcement.rollouts import Rollout, RolloutGroup, RolloutRequest, RolloutWorker
from training.torch_model import Model

PEBBLE = Path("models/pebble")
PLAN = ReinforcementPlan(
    steps=2, groups=2, answers=2, lr=1e-3, warmup=0, mixture_tokens=200, largest_batch=4000, checkpoint_every_s=0.0
)


def group(*answers: tuple[list[int], float], prompt: list[int] | None = None) -> RolloutGroup:
    prompt = [5, 6, 7] if prompt is None else prompt
    return RolloutGroup("a task", tuple(Rollout(((prompt, answer),), reward) for answer, reward in answers))


def test_advantages_are_rewards_against_their_group() -> None:
    found = advantages([1.0, 0.0, 0.5, 0.5])
    assert sum(found) == pytest.approx(0) and sum(x * x for x in found) / 4 == pytest.approx(1)
    assert found[0] == -found[1] and found[2] == found[3] == 0
    assert advantages([0.7, 0.7, 0.7]) == [0, 0, 0], "where all are alike there is nothing to learn"


def test_a_group_of_equal_rewards_is_left_out() -> None:
    rows = policy_rows(group(([1], 1.0), ([2, 3], 0.0)))
    assert [(row.answer, row.advantage) for row in rows] == [([2, 3], -1.0), ([1], 1.0)], "the longest first"
    assert policy_rows(group(([4], 1.0), ([5], 1.0))) == []


TOLD = RolloutGroup(  # answers of two turns: the second's prompts have the first, or part of it, in them
    "a task",
    (
        Rollout((([5, 6, 7, 8], [9, 10]), ([5, 6, 7, 8, 9, 10, 11, 12], [13])), 1.0),
        Rollout((([5, 6, 7, 8], [14]), ([5, 6, 7, 15], [16, 17, 18])), 0.0),
        Rollout((([5, 6, 7, 8], [19, 20, 21]),), 0.7),
    ),
)


def test_what_the_prompts_of_a_group_share_is_computed_once() -> None:
    (whole,) = batches(policy_rows(TOLD), 100, 0, 9.0)
    assert whole.prefix.tolist() == [5, 6, 7] and whole.tokens.shape == (5, 6)
    assert whole.tokens[0].tolist() == [8, 9, 10, 11, 12, 13]
    (first, *_, last) = several = [*batches(policy_rows(TOLD), 14, 0, 1.2)]
    assert all(batch.prefix.tolist() == [5, 6, 7] for batch in several) and first.tokens.shape == (1, 6)
    assert last.tokens.tolist() == [[8, 14]] and sum(len(batch.tokens) for batch in several) == 5
    (alone,) = batches(policy_rows(group(([1], 1.0), ([2], 0.0), prompt=[5])), 100, 0, 1.5)
    assert len(alone.prefix) == 0 and alone.tokens.tolist() == [[5, 1], [5, 2]]
    assert [len(each) for each in grpo.gathered([*several, whole], 40)] == [len(several), 1]


@pytest.mark.parametrize("largest", [20, 60, 1000])
def test_the_gradient_is_that_of_the_policy(tiny_tokenizer: Tokenizer, largest: int) -> None:
    """The loss's gradient is that of −Σ A log π / tokens, written out."""
    torch.manual_seed(3)
    model = Model(TINY)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, std=0.3 if weight.ndim > 1 else 0.1)
        assert weight.requires_grad, name
    groups = [
        group(([8, 9, 10], 1.0), ([11], 0.0)), group(([12, 13], 0.2), ([14, 15], 0.9), prompt=[3] * 9), TOLD,
        group(([4], 0.2), ([2], 0.9), prompt=[1]), group(([4, 2], 0.2), ([2], 0.9), prompt=[1, 2]),
    ]  # fmt: skip
    of_groups = [policy_rows(each) for each in groups]
    rows = [row for of_group in of_groups for row in of_group]
    for together in grpo.gathered((made for each in of_groups for made in batches(each, largest, 0, 1.5)), largest):
        model.loss(together)[0].backward()
    ours = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    for row in rows:
        logprobs = model(torch.tensor([row.prompt + row.answer])).log_softmax(-1)[0]
        places = range(len(row.prompt) - 1, len(row.prompt) + len(row.answer) - 1)
        said = torch.stack([logprobs[at, token] for at, token in zip(places, row.answer, strict=True)])
        (-row.advantage * said.sum()).backward()
    theirs = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert len(ours) == len(theirs) > 10 and any(bool(each.any()) for each in ours)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_a_step_makes_what_was_rewarded_likelier(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    export.export(Model(TINY), tiny_tokenizer, tmp_path / "model")
    learner = Learner(replace(PLAN, mixture=0.0), tmp_path / "model", tmp_path / "work", device="cpu", bfloat16=False)
    good, bad, prompt = [20, 21, 22], [30, 31], [5, 6, 7]

    def likelihood(answer: list[int]) -> float:
        with torch.no_grad():
            logprobs = learner.model(torch.tensor([prompt + answer])).log_softmax(-1)[0, len(prompt) - 1 : -1]
        return float(logprobs.gather(1, torch.tensor(answer)[:, None]).sum())

    before = likelihood(good), likelihood(bad)
    learner.step([group((good, 1.0), (bad, 0.0))], [])
    assert likelihood(good) > before[0] and likelihood(bad) < before[1]
    assert learner.done == 1


@pytest.mark.parametrize("task", questions.TASKS)
def test_the_right_replies_earn_all_and_none_earn_less(task: str) -> None:
    rng = Random(f"earns-{task}")
    for _ in range(15):
        case = questions.TASKS[task].make(rng)
        assert questions.reward(case, case.wanted) == 1.0, case.prompt.messages[-1].content
        assert questions.reward(case, [ModelReply("", "", (), broken=True)]) < 1.0


def test_questions_are_in_the_words_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    read, asked = phrases.Kind.ask, list[str]()

    def ask(kind: phrases.Kind, rng: Random, phrasing: Phrasing) -> str:
        asked.append(phrasing)
        return read(kind, rng, phrasing)

    monkeypatch.setattr(phrases.Kind, "ask", ask)
    for task in questions.TASKS.values():
        for seed in range(5):
            task.make(Random(seed))
    assert set(asked) == {"train"}


@pytest.mark.slow
def test_rollouts_follow_from_their_seed() -> None:
    asked = RolloutRequest(PEBBLE, "a-seed", 3, 2, 3)
    workers = RolloutWorker(), RolloutWorker(), RolloutWorker()
    first, again = workers[0].answer(asked), workers[1].answer(asked)
    assert first == again, "the same weights and seed give the same answers"
    assert [len(made.rollouts) for made in first] == [3, 3]
    for made in first:
        for rollout in made.rollouts:
            assert 0.0 <= rollout.reward <= 1.0 and all(prompt and answer for prompt, answer in rollout.turns)
    alone = workers[2].answer(replace(asked, first=4, questions=1))
    assert alone == first[1:], "nor do they depend on what is asked beside them"
    for worker in workers:
        worker.close()


@pytest.mark.slow
def test_a_resumed_run_goes_on(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    long = replace(TINY, max_position_embeddings=8192)  # the small vocabulary takes many tokens for a prompt
    export.export(Model(long), tiny_tokenizer, tmp_path / "model")

    def learner(name: str) -> Learner:
        return Learner(PLAN, tmp_path / "model", tmp_path / name, device="cpu", bfloat16=False)

    whole = learner("whole")
    grpo.train(whole, workers=1)
    stopped = learner("parts")
    grpo.train(stopped, workers=1, until_s=0.0)
    assert stopped.done == 1, "it stops after the step that it is in"
    resumed = learner("parts")
    resumed.resume()
    grpo.train(resumed, workers=1)
    assert resumed.done == whole.done == PLAN.steps
    for (name, mine), other in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other), name
    lines = [json.loads(line) for line in (tmp_path / "parts" / grpo.LOG).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(0 <= line["reward"] <= 1 and line["tokens"] > 0 and line["tasks"] for line in lines)


def test_the_rate_rises_stays_and_falls() -> None:
    plan = ReinforcementPlan(steps=100, warmup=4, fall=0.3)
    shares = [grpo.share_of_rate(step, plan) for step in range(100)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]) and shares[60] == 1.0
    assert shares[70:] == sorted(shares[70:], reverse=True) and 0 < shares[-1] < 0.05


def test_the_card_says_it_once(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    out = tmp_path / "model"
    export.export(Model(TINY), tiny_tokenizer, out)
    (out / "README.md").write_text(
        "# A\n\n| ability |\n|---|\n| old |\n\n## How it was made\n\nSo.\n\n## Limits\n\nMany.\n"
    )
    learner = Learner(PLAN, out, tmp_path / "work", device="cpu", bfloat16=False)
    learner.work.mkdir()
    (learner.work / grpo.LOG).write_text(
        "".join(json.dumps({"step": at, "reward": at / 10}) + "\n" for at in range(20))
    )
    learner.done, learner.seconds = 20, 600.0
    for right in (40, 60):
        results = [EvaluationResult("sums", "right", 100, right, 0.1, 0.9, 0.9)]
        card.add_reinforcement(out, learner, results, "a machine")
    text = (out / "README.md").read_text()
    assert text.count("## Its reinforcement") == 1 and "| old |" not in text and "60.0%" in text and "40.0%" not in text
    assert "first\nsteps was 0.45, of its last 1.45. 10 minutes on a machine." in text
    assert text.index("So.") < text.index("## Its reinforcement") < text.index("## Limits\n\nMany.")
    card.plot_rewards(learner.work / grpo.LOG, tmp_path / "img" / "reward.png")
    assert (tmp_path / "img" / "reward.png").stat().st_size > 5000
