from __future__ import annotations

import os
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tokenizers import Tokenizer

from tests.training.conftest import TINY, read_little, reads_little
from training import card, evaluate, export, mixture, plans, team
from training.torch_model import Model, TrainingBatch
from training.train_tokenizer import END_OF_TEXT
from training.trainer import Plan, Trainer, train

pytestmark = pytest.mark.slow

PLAN = Plan(model=TINY, steps=6, ramp_steps=4, batch_tokens=600, largest_batch=400)


def learns(member: team.Team, *job: Any) -> None:  # Any: arguments of `train`
    """`train`, in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        read_little(patch)
        train(member, *job)


class LittleReader(mixture.Reader):
    """One whose workers read the prose that this process reads."""

    def at(self, step: int) -> list[TrainingBatch]:
        if not reads_little():  # a worker, which ends with its reader
            read_little(pytest.MonkeyPatch())
        return super().at(step)


def step_of(
    tokenizer: Tokenizer, tokens: int, largest: int, step: int = 3, progress: float = 0.5
) -> list[TrainingBatch]:
    rows = mixture.rows(1, step, progress, tokenizer, tokens)
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    return mixture.batches(rows, largest, end, 1.25)


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in trainer.model.parameters()]


def test_a_resumed_run_ends_with_the_same_bits(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    whole = Trainer(PLAN, tiny_tokenizer, tmp_path / "whole")
    whole.run()
    Trainer(PLAN, tiny_tokenizer, tmp_path / "parts").run(until=3)
    log = tmp_path / "parts" / "losses.jsonl"
    log.write_text('{"step": 2}\n{"step": 5}\n')  # the run was killed two steps after its checkpoint
    resumed = Trainer(PLAN, tiny_tokenizer, tmp_path / "parts")
    resumed.resume()
    assert resumed.done == 3
    resumed.run()
    assert log.read_text() == '{"step": 2}\n'
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
    assert whole.tokens == resumed.tokens


def test_a_run_can_begin_with_published_weights(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    first = Trainer(PLAN, tiny_tokenizer, tmp_path / "first")
    first.run(until=2)
    export.export(first.model, tiny_tokenizer, tmp_path)
    second = Trainer(replace(PLAN, start=str(tmp_path)), tiny_tokenizer, tmp_path / "second")
    assert second.done == 0
    assert all(torch.equal(a.bfloat16().float(), b) for a, b in zip(weights(first), weights(second), strict=True))
    plan = plans.plan("pebble", "cpu", start=tmp_path)
    assert (plan.start, plan.ramp_steps, plan.model) == (str(tmp_path), 1, TINY)
    assert plan.matrix_lr < plans.plan("pebble", "cpu").matrix_lr
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match="is a qwen3 model"):
        plans.plan("pebble", "cpu", start=tmp_path)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_the_precision_changes_the_loss_a_little(tiny_tokenizer: Tokenizer, tmp_path: Path, bfloat16: bool) -> None:
    trainer = Trainer(PLAN, tiny_tokenizer, tmp_path)
    exact = trainer.step(trainer.reader.at(0))
    other = Trainer(replace(PLAN, bfloat16=bfloat16), tiny_tokenizer, tmp_path)
    loss = other.step(other.reader.at(0))
    assert (loss != exact) == bfloat16
    assert loss == pytest.approx(exact, rel=0.01)


def test_steps_lower_the_loss(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    plan = Plan(model=TINY, steps=40, ramp_steps=4000, batch_tokens=600, largest_batch=400)
    trainer = Trainer(plan, tiny_tokenizer, tmp_path)
    losses = [trainer.step(batches) for batches in trainer.reader.read(0, 20)]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_prompts_count_little_and_padding_nothing(tiny_tokenizer: Tokenizer) -> None:
    conversations = 0
    for batch in step_of(tiny_tokenizer, tokens=2000, largest=700, progress=0.9):
        end = tiny_tokenizer.token_to_id("<|im_end|>")
        of_places = torch.zeros(batch.tokens.numel())
        of_places[batch.learned + 1] = batch.shares
        for tokens, learned in zip(batch.tokens, of_places.view(batch.tokens.shape), strict=True):
            if end not in tokens:  # a procedural sequence
                assert set(learned.tolist()) == {0.0, 1.0}
                continue
            conversations += 1
            last = int((tokens == end).nonzero()[-1])
            assert learned[last] == 1.0
            assert not learned[last + 2 :].any()  # a line end follows the last turn
            assert set(learned[learned < 1].tolist()) <= {0.0, float(torch.tensor(mixture.PROMPT_WEIGHT))}
    assert conversations


def test_the_same_step_has_the_same_data(tiny_tokenizer: Tokenizer) -> None:
    first, again, next_ = (step_of(tiny_tokenizer, 500, 300, step) for step in (4, 4, 5))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert first[0].tokens.tolist() != next_[0].tokens.tolist()


def test_batches_stay_small_and_hold_every_conversation_once(tiny_tokenizer: Tokenizer) -> None:
    large = step_of(tiny_tokenizer, tokens=3000, largest=10**6)
    small = step_of(tiny_tokenizer, tokens=3000, largest=800)
    assert all(batch.tokens.shape[0] == 1 or batch.tokens.numel() <= 800 for batch in small)
    assert sum(float(b.shares.sum()) for b in large) == pytest.approx(sum(float(b.shares.sum()) for b in small))


def test_batches_made_ahead_are_the_same_batches(tiny_tokenizer: Tokenizer) -> None:
    here = mixture.Reader(1, 300, 300, 10, tiny_tokenizer)
    ahead = LittleReader(1, 300, 300, 10, tiny_tokenizer, workers=1)
    for ours, theirs in zip(here.read(2, 5), ahead.read(2, 5), strict=True):
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(ours, theirs, strict=True))


def test_lengths_that_go_through_the_model_at_once_give_the_same_loss(tiny_tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    model = Model(TINY)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    batches = step_of(tiny_tokenizer, tokens=2000, largest=10**6)
    assert len(batches) >= 3
    apart = [model.loss([batch]) for batch in batches]
    together = model.loss(batches)
    for at in (0, 1):
        torch.testing.assert_close(together[at], torch.stack([each[at] for each in apart]).sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("workers", [0, 1])
def test_data_are_read_twice_after_some_steps(tiny_tokenizer: Tokenizer, workers: int) -> None:
    reader = LittleReader(1, 200, 300, 10, tiny_tokenizer, repeat_after=4, workers=workers)
    sources = [reader.source(step) for step in range(400)]
    assert sources[:10] == [0, 1, 2, 3, 4, 0, 6, 1, 8, 2]
    assert all(source <= step for step, source in enumerate(sources))
    assert max(map(sources.count, sources)) == 2
    assert all(sources.count(source) == 2 for source in sources[:200])
    read = list(reader.read(3, 10))
    for batches, source in zip(read, sources[3:10], strict=True):
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(batches, reader.at(source), strict=True))


def test_the_last_state_at_the_full_rate_is_kept(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    Trainer(PLAN, tiny_tokenizer, tmp_path).run()
    longer = Trainer(PLAN, tiny_tokenizer, tmp_path)
    longer.resume(longer.stable)
    assert longer.done == int(PLAN.steps * (1 - PLAN.fall))


def test_the_card_says_how_it_was_made(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    trainer = Trainer(PLAN, tiny_tokenizer, tmp_path / "work")
    trainer.run()
    results = [evaluate.EvaluationResult("sums", "right", 40, 30, 0.6, 0.86, None)]
    card.write(trainer, results, tmp_path, "pebble", "a machine", 900)
    text = (tmp_path / "README.md").read_text("utf-8")
    assert (
        "6 steps of about 600 tokens" in text
        and "**Time**: 1 minute on a machine" in text
        and "{" not in text.partition("## How")[2]
    )
    assert f"rope base 10,000.{card.COMPARED['pebble']}\n- **Recipe**" in text
    assert (card.duration(177), card.duration(5000)) == ("3 minutes", "1.4 hours")
    card.plot(tmp_path / "work" / "losses.jsonl", tmp_path / "loss.png", "pebble")
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_a_team_shares_the_rows_out_evenly(tiny_tokenizer: Tokenizer) -> None:
    rows = mixture.rows(1, 3, 0.5, tiny_tokenizer, tokens=3000)
    first, second = (mixture.share(rows, team.Team(rank, 2)) for rank in (0, 1))
    assert sorted(map(str, first + second)) == sorted(map(str, rows))
    tokens = [sum(len(row.tokens) for row in part) for part in (first, second)]
    assert abs(tokens[0] - tokens[1]) <= len(rows[0].tokens)


def stays(member: team.Team, started: Path) -> None:
    """Says its process's number, and goes on for ever."""
    (started / str(member.rank)).write_text(str(os.getpid()))
    while True:
        time.sleep(0.1)


def test_members_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    starter = get_context("spawn").Process(target=team.start, args=(2, stays, tmp_path))
    starter.start()
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    members = [psutil.Process(int(each.read_text())) for each in tmp_path.iterdir()]
    starter.kill()
    gone, alive = psutil.wait_procs(members, timeout=20)
    assert len(gone) == 2 and not alive


def test_a_team_of_two_learns_what_one_learns(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    tiny_tokenizer.save(str(tmp_path / "tokenizer.json"))
    alone = Trainer(PLAN, tiny_tokenizer, tmp_path / "alone")
    alone.run()
    team.start(2, learns, PLAN, tmp_path / "tokenizer.json", tmp_path / "two", "start")
    together = Trainer(PLAN, tiny_tokenizer, tmp_path / "two")
    together.resume()
    assert together.done == PLAN.steps
    for ours, theirs in zip(weights(alone), weights(together), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.002)
