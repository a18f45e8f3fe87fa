"""The ablation of shapes: the same data for all, runs that go on where they were stopped, and the tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from bench import report
from bench.shapes import __main__ as command
from bench.shapes import ablation, shapes_page
from bench.shapes.ablation import ASKED, BASELINE, SHAPES, Ablation, run_all, token_loss
from bench.shapes.shapes_page import EXACT, LIKELIEST, LOSS
from tests.training.conftest import read_little
from training import card, mixture
from training.alignment import ROLES
from training.conversation import Case
from training.evaluate import judged, wilson
from training.torch_model import Model, ModelConfig, TrainingBatch
from training.train_tokenizer import segments
from training.trainer import Plan, Trainer

TOKENIZER = Path(__file__).parents[2] / "models" / "pebble" / "tokenizer.json"
WIDE = ModelConfig(
    hidden_size=32,
    intermediate_size=48,
    layer_types=("full_attention",) * 2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=2048,
)
LITTLE = {BASELINE: WIDE, "lfm2": replace(WIDE, layer_types=("conv", "full_attention"), intermediate_size=40)}
PLAN = Plan(model=WIDE, steps=4, ramp_steps=4, batch_tokens=600, largest_batch=500, tasks=ablation.TASKS)


@pytest.fixture(scope="module", autouse=True)
def little_prose() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        read_little(patch)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def little(work: Path, asked: int = 1) -> Ablation:
    return Ablation(work, TOKENIZER, LITTLE, PLAN, ASKED[:asked], 2)


def trained_weights(made: Ablation, shape: str) -> dict[str, torch.Tensor]:
    return dict(torch.load(made.folder(shape, 1) / "checkpoint.pt", weights_only=True)["model"])


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = little(tmp_path / "whole"), little(tmp_path / "parts")
    said: list[str] = []
    (row,) = run_all(whole, ["lfm2"], [1], said.append)
    assert said == [f"lfm2, seed 1: {row['tokens']} tokens, {row['seconds']} s"]
    assert parts.run("lfm2", 1, until=2) is None and parts.kept("lfm2", 1) is None
    begun = Trainer(parts.plan_of("lfm2", 1), Tokenizer.from_file(str(TOKENIZER)), parts.folder("lfm2", 1))
    begun.resume()
    assert begun.done == 2
    steps: list[int] = []
    step = Trainer.step

    def counted(self: Trainer, batches: list[TrainingBatch]) -> float:
        steps.append(self.done)
        return step(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", counted)
        resumed = parts.run("lfm2", 1)
    assert resumed is not None and steps == [2, 3]
    for key in ("tokens", "parameters", "abilities"):
        assert resumed[key] == row[key], key
    ours, theirs = trained_weights(whole, "lfm2"), trained_weights(parts, "lfm2")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    monkeypatch.setattr(ablation, "Trainer", None)  # a result that is there is not made again
    assert parts.run("lfm2", 1) == resumed == parts.kept("lfm2", 1)
    with pytest.raises(ValueError, match="begun by another plan"):
        replace(parts, plan=replace(PLAN, steps=5)).run("lfm2", 1)
    with pytest.raises(ValueError, match="asked other cases"):
        replace(parts, n=3).kept("lfm2", 1)


@pytest.mark.slow
def test_all_shapes_of_a_seed_read_the_same_data_of_their_tasks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tokenizer = little(tmp_path), Tokenizer.from_file(str(TOKENIZER))
    monkeypatch.setattr(mixture, "TASKS", {name: mixture.TASKS[name] for name in ablation.TASKS})  # no other is asked

    def read(shape: str, seed: int) -> list[torch.Tensor]:
        reader = Trainer(made.plan_of(shape, seed), tokenizer, tmp_path).reader
        return [batch.tokens for step in reader.read(0, 4) for batch in step]

    ours, theirs = read(BASELINE, 1), read("lfm2", 1)
    assert len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert [each.tolist() for each in read("lfm2", 2)] != [each.tolist() for each in theirs]
    texts = [tokenizer.decode(row.tolist(), skip_special_tokens=False) for batch in ours for row in batch]
    assert all(text.startswith("<|im_start|>") for text in texts)  # no procedural sequence
    assert any("<tools>" in text for text in texts) and not all("<tools>" in text for text in texts)


def test_the_shapes_have_about_as_many_parameters() -> None:
    counts = {name: sum(weight.numel() for weight in Model(shape).parameters()) for name, shape in SHAPES.items()}
    assert all(abs(count / counts[BASELINE] - 1) < 0.01 for count in counts.values()), counts
    assert 2e6 < counts[BASELINE] < 3e6


def test_the_loss_is_that_of_the_answers_tokens_alone() -> None:
    tokenizer, case = Tokenizer.from_file(str(TOKENIZER)), ASKED[0].cases(Random(3), 1)[0]
    torch.manual_seed(0)
    model = Model(WIDE)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    found = token_loss(model, tokenizer, case)
    wanted = case.wanted[0]
    assert not wanted.thinking
    text = f"<think>\n\n</think>\n\n{wanted.content}<|im_end|>"
    answer = tokenizer.encode(text, add_special_tokens=False).ids
    assert found.tokens == len(answer)
    read = "".join(text for text, learned in segments(ablation.answered(case)) if not learned)
    prompt = tokenizer.encode(read.removesuffix("\n"), add_special_tokens=False).ids
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = -logits.gather(1, torch.tensor(answer)[:, None]).mean()
    assert found.loss == pytest.approx(float(expected), rel=1e-4)
    assert found.right == int((logits.argmax(-1) == torch.tensor(answer)).sum())


def test_every_case_can_be_passed_by_the_answer_whose_loss_is_measured() -> None:
    for ability in ASKED:
        for case in ability.cases(Random(5), 10):
            assert isinstance(case, Case)
            verdict = judged(case, case.wanted)
            assert all(verdict.values()), (ability.name, verdict)
            last = ablation.answered(case).messages[-1]
            assert (last.role, last.content, last.calls) == ("assistant", case.wanted[0].content, case.wanted[0].calls)


def run_of(shape: str, seed: int, losses: list[float], right: list[int], tokens: int = 1000) -> dict[str, Any]:
    cases = [{"loss": loss, "tokens": 4, "right": count} for loss, count in zip(losses, right, strict=True)]
    verdicts = [{"right tool": count > 2} for count in right]
    return {
        "shape": shape, "seed": seed, "parameters": 2_450_000, "embedding": 790_000, "tokens": tokens, "seconds": 60,
        "tokens_per_cpu_second": 2000, "missed": {}, "abilities": {"tools": {"cases": cases, "verdicts": verdicts}},
    }  # fmt: skip


def test_differences_are_paired_by_case_and_seed() -> None:
    rows = [
        run_of(BASELINE, 1, [1.0, 9.0, 2.0], [4, 0, 1]),
        run_of("lfm2", 1, [0.9, 8.9, 1.9], [4, 4, 3]),
        run_of(BASELINE, 2, [5.0, 1.0, 1.0], [0, 0, 0]),
        run_of("lfm2", 2, [4.7, 0.7, 0.7], [4, 0, 0]),
        run_of("lfm2", 3, [7.0, 7.0, 7.0], [0, 0, 0]),  # nothing to be compared with
    ]
    measures = shapes_page.summed_up(rows, SHAPES)["abilities"]["tools"]
    loss = measures[LOSS]["lfm2"]
    assert [row.get("difference") for row in loss["seeds"].values()] == [pytest.approx(-0.1), pytest.approx(-0.3), None]
    assert loss["seeds"]["1"]["difference_interval"] == (pytest.approx(-0.1), pytest.approx(-0.1))
    assert loss["difference"] == pytest.approx(-0.2)
    half = 12.706 * 0.1  # Student's, of two seeds that differ by 0.2
    assert loss["difference_interval"] == (pytest.approx(-0.2 - half), pytest.approx(-0.2 + half))
    assert "difference" not in measures[LOSS][BASELINE]
    exact, tool = measures[EXACT]["lfm2"]["seeds"]["1"], measures["right tool"]["lfm2"]["seeds"]["1"]
    assert (exact["right"], tool["right"], tool["n"]) == (2, 3, 3)
    likeliest = measures[LIKELIEST]["lfm2"]["seeds"]["1"]
    assert likeliest["mean"] == pytest.approx((4 + 4 + 3) / 12) and likeliest["difference"] == pytest.approx(6 / 12)
    assert exact["interval"] == wilson(2, 3) and exact["difference"] == pytest.approx(1 / 3)


def test_without_attention_alone_differences_are_from_the_first_shape() -> None:
    rows = [
        run_of("lfm2", 1, [1.0, 2.0], [0, 1]),
        run_of("lfm2, deep", 1, [0.5, 1.5], [0, 1]),
    ]
    loss = shapes_page.summed_up(rows, SHAPES)["abilities"]["tools"][LOSS]
    assert "difference" not in loss["lfm2"] and loss["lfm2, deep"]["difference"] == pytest.approx(-0.5)
    with pytest.raises(ValueError, match="From seed 1 lfm2, deep read 999 tokens and lfm2 1,000"):
        shapes_page.summed_up([rows[0], rows[1] | {"tokens": 999}], SHAPES)


def test_runs_on_other_data_are_not_compared() -> None:
    rows = [run_of(BASELINE, 1, [1.0, 2.0], [0, 1]), run_of("lfm2", 1, [1.0, 2.0], [0, 1], tokens=999)]
    with pytest.raises(ValueError, match="From seed 1 lfm2 read 999 tokens and qwen3 1,000"):
        shapes_page.summed_up(rows, SHAPES)
    with pytest.raises(ValueError, match="No run is kept"):
        shapes_page.summed_up([], SHAPES)


def keep(made: Ablation, row: dict[str, Any]) -> None:
    """Writes a run's files as `Ablation.run` does."""
    place = made.folder(row["shape"], row["seed"])
    place.mkdir()
    (place / "plan.json").write_text(json.dumps(made._described(row["shape"], row["seed"])))
    (place / "result.json").write_text(json.dumps(row))
    looks = dict.fromkeys(ROLES, 0.5 if row["shape"] == "lfm2" else 1.5)
    (place / "losses.jsonl").write_text("".join(json.dumps({"step": step, **looks}) + "\n" for step in (10, 20)))


def test_kept_runs_are_written_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{shapes_page.BEGIN}\nold\n{shapes_page.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(report, "PAGE", page)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    made = command.ablation_of(tmp_path, 8, 2)
    for shape, losses in ((BASELINE, [1.0, 2.0]), ("lfm2", [0.75, 1.75])):
        for seed in (1, 2):
            keep(made, run_of(shape, seed, losses, [4, 0]))
    rows = run_all(made, (BASELINE, "lfm2"), (1, 2), lambda _: None)
    assert [(row["seed"], row["shape"]) for row in rows] == [(1, BASELINE), (1, "lfm2"), (2, BASELINE), (2, "lfm2")]
    command.main(["--kept", "--write", "--work", str(tmp_path), "--steps", "8", "-n", "2"])
    text = page.read_text("utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| qwen3 | 10, 0 | 128 | 304 | 2.45M, 0.79M | 0.00 | 2000 |" in text
    assert "| lfm2 | 1.250 (-0.250: -0.250 … -0.250) | 1.250 (-0.250: -0.250 … -0.250) | **-0.250** (-0.250 … " in text
    assert "| lfm2 | 0.50, 0.50 | 0.50, 0.50 | 0.50" in text and "| qwen3 | 1.50, 1.50 |" in text
    assert "| tools | tokens that are the likeliest | lfm2 | 50% (" in text
    assert "| tools | right tool | lfm2 | 1 (9% – 91%) | 1 (9% – 91%) | +0.0 (+0.0 … +0.0) |" in text
    (kept,) = (tmp_path / "results").iterdir()
    assert json.loads(kept.read_text("utf-8"))["abilities"]["tools"][LOSS]["lfm2"]["difference"] == -0.25
    with pytest.raises(SystemExit, match="begun by another plan"):
        command.main(["--kept", "--work", str(tmp_path), "--steps", "9", "-n", "2"])
    with pytest.raises(SystemExit):
        command.main(["--steps", "0"])
    assert "--steps takes 1 or more" in capsys.readouterr().err


def test_the_mixture_has_the_tasks_that_are_trained_on() -> None:
    assert set(ablation.TASKS) <= mixture.TASKS.keys()
    with pytest.raises(ValueError, match="has no task tool selection"):
        mixture.shares(1.0, ("tool selection",))


def test_the_bundled_models_card_names_the_comparison() -> None:
    text = (report.ROOT / "models" / "pebble" / "README.md").read_text("utf-8")
    assert f"rope base 10,000.{card.COMPARED['pebble']}\n" in text and "no shapes" not in text
    assert "\n## Shapes of the bundled model\n" in report.PAGE.read_text("utf-8")
