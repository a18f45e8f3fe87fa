"""The pair: questions with one right answer, rows that show no answer, and training that goes on after a stop."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.diffusion import BlockDiffusion, Unmasking, load_masked_diffusion
from training.diffusion import pair, questions, rows, students
from training.diffusion.byte_tokenizer import END, byte_tokenizer
from training.diffusion.masked_model import MaskedModel
from training.diffusion.questions import ANSWER, MASK, TASKS, PairQuestion, Task, question
from training.distil.distillation import Distillation
from training.torch_model import Model, ModelConfig

MODELS = Path(__file__).parents[3] / "models"
TINY = ModelConfig(
    vocab_size=257, hidden_size=32, intermediate_size=48, layer_types=("full_attention",) * 2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
)  # fmt: skip
PLAN = replace(students.PLAN, steps=6, batch=6)


def asked(task: Task, n: int, *, held_out: bool = False) -> list[PairQuestion]:
    rng = Random(task)
    return [question(rng, task, held_out=held_out) for _ in range(n)]


def test_sums_are_right() -> None:
    for each in asked("sums", 200):
        parts = each.prompt.removesuffix(" =").split(" ")
        assert each.answer.split(" ") == [str(eval(part)) for part in parts]  # digits and signs of our own
        assert all(re.fullmatch(r"\d\d[+-]\d", part) for part in parts) and re.fullmatch(r"\d\d( \d\d)*", each.answer)


def test_chains_are_right() -> None:
    for each in asked("chain", 200):
        first, *rest = re.findall(r"\d\d|[+-]\d", each.prompt)
        results, value = [], int(first)
        for operation in rest:
            value += int(operation)
            results.append(f"{value:02}")
        assert each.answer == " ".join(results) and len(results) >= questions.MIN_PARTS


def test_a_gap_has_one_answer() -> None:
    for each in asked("gap", 200):
        assert re.fullmatch(rf"[^{MASK}]{{3,}}{MASK}{{3,12}}[^{MASK}]{{3,}}", each.prompt)
        before, after = re.split(f"{MASK}+", each.prompt)
        assert len(each.answer) == each.prompt.count(MASK)
        assert questions.fits(each.prompt) == [before + each.answer + after]


def test_training_never_sees_a_question_of_the_evaluation() -> None:
    for task in TASKS:
        assert not {q.prompt for q in asked(task, 300)} & {q.prompt for q in asked(task, 300, held_out=True)}
    learned = [each for step in range(5) for each in rows.questions_of(1, step, 30)]
    assert not any(each.held_out for each in learned)
    assert [sum(each.task == task for each in learned) for task in TASKS] == [50, 50, 50]


def test_the_tokenizer_has_a_token_a_byte() -> None:
    tokenizer = byte_tokenizer()
    text = "12+3 = _é"
    tokens = tokenizer.encode(text).ids
    assert len(tokens) == len(text.encode()) and tokenizer.decode(tokens) == text
    assert (tokenizer.token_to_id(END), tokenizer.token_to_id(MASK), tokenizer.get_vocab_size()) == (0, 1, 257)


def masked_batch(block_size: int, n: int = 12) -> rows.PairRows:
    made = [question(Random(at), TASKS[at % 3], held_out=False) for at in range(n)]
    return rows.masked_rows(made, byte_tokenizer(), block_size, torch.Generator().manual_seed(5))


@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_a_masked_place_does_not_see_its_answer(block_size: int) -> None:
    made = [question(Random(at), TASKS[at % 3], held_out=False) for at in range(12)]
    tokenizer = byte_tokenizer()
    batch = rows.masked_rows(made, tokenizer, block_size, torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    model = MaskedModel(TINY)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.4 * torch.randn_like(weight))
    length, begin = batch.tokens.shape[1], batch.tokens.shape[1] - questions.ANSWER
    states = model.states(batch.tokens, batch.positions, batch.visible)
    block = 4 // block_size if block_size > 4 else 1
    start = block * block_size
    changed = batch.tokens.clone()
    clean = begin - questions.ANSWER
    changed[:, clean + start : begin] = 9  # the answer as it is, from this block on
    again = model.states(changed, batch.positions, batch.visible)
    stop = min(length, begin + start + block_size)
    assert torch.equal(states[:, begin:stop], again[:, begin:stop])
    if start:
        changed[:, clean : clean + start] = 9  # what is before the block, it does see
        again = model.states(changed, batch.positions, batch.visible)
        assert not torch.allclose(states[:, begin + start : stop], again[:, begin + start : stop], atol=1e-3)


def test_rows_learn_masked_places_alone_and_weigh_them_by_their_ratio() -> None:
    tokenizer, total, count = byte_tokenizer(), 0.0, 60
    made = [question(Random(at), TASKS[at % 3], held_out=False) for at in range(12)]
    for seed in range(count):
        batch = rows.masked_rows(made, tokenizer, 8, torch.Generator().manual_seed(seed))
        assert set(batch.tokens.flatten()[batch.learned].tolist()) == {tokenizer.token_to_id(MASK)}
        total += float(batch.weights.sum())
    assert total / count == pytest.approx(1.0, abs=0.05)  # the mean is that of no mask at all, whatever the ratio
    of_gaps = [rows.split(each, tokenizer) for each in made if each.task == "gap"]
    for each, asked_gap in zip(of_gaps, [q for q in made if q.task == "gap"], strict=True):
        whole = dict(each.known) | dict(each.answer)
        text = tokenizer.decode([whole[at] for at in range(len(whole))])
        assert questions.fits(asked_gap.prompt) == [text]


def test_the_twin_learns_the_answer_and_its_end() -> None:
    tokenizer = byte_tokenizer()
    made = [question(Random(at), TASKS[at % 3], held_out=False) for at in range(6)]
    batch = rows.causal_rows(made, tokenizer)
    length = batch.tokens.shape[1]
    for at, each in enumerate(made):
        here = batch.learned // length == at
        assert tokenizer.decode(batch.targets[here].tolist(), skip_special_tokens=False) == each.answer + END
        asked_text = each.prompt + (" =" if each.task == "gap" else "")
        assert int(batch.learned[here][0]) % length == len(asked_text) - 1
    assert float(batch.weights.sum()) == pytest.approx(1.0)
    assert torch.equal(batch.visible[0], torch.ones(length, length, dtype=torch.bool).tril())


@pytest.mark.parametrize("name", list(pair.STUDENTS))
def test_a_stopped_run_ends_with_the_same_weights(name: str, tmp_path: Path) -> None:
    whole = pair.train_one(name, PLAN, tmp_path / "whole", tmp_path / "a", resume=False, shape=TINY)
    student = pair.STUDENTS[name](PLAN, byte_tokenizer(), TINY)
    Distillation[Model](PLAN, student, tmp_path / "parts").run(until=3)
    parts = pair.train_one(name, PLAN, tmp_path / "parts", tmp_path / "b", resume=True, shape=TINY)
    for one, other in zip(whole.student.module.parameters(), parts.student.module.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


@pytest.mark.parametrize("name", list(pair.STUDENTS))
def test_training_lowers_the_loss(name: str, tmp_path: Path) -> None:
    plan = replace(PLAN, steps=40, batch=24)
    student = pair.STUDENTS[name](plan, byte_tokenizer(), TINY)
    first = sum(student.backward(1000 + at) for at in range(3)) / 3
    student.module.zero_grad()
    Distillation[Model](plan, student, tmp_path).run()
    assert sum(student.backward(1000 + at) for at in range(3)) / 3 < 0.6 * first


def test_the_exported_twin_is_what_transformers_computes(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = MaskedModel(TINY)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = 1 + 0.3 * torch.randn_like(weight) if weight.ndim == 1 else 0.4 * torch.randn_like(weight)
            weight.copy_(drawn.bfloat16())
    pair.export_pair(model, byte_tokenizer(), tmp_path, diffuses=False)
    assert {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    batch = rows.causal_rows(asked("sums", 2), byte_tokenizer())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        states = model.states(batch.tokens, batch.positions, batch.visible)
        ours = states @ model.model.embed_tokens.weight.T
        assert torch.allclose(ours, theirs(batch.tokens).logits, atol=1e-4)


def test_the_card_says_how_it_was_made(tmp_path: Path) -> None:
    run = pair.train_one(pair.DIFFUSION, PLAN, tmp_path, tmp_path, resume=False, shape=TINY)
    pair.write_card(run, "1 thread of a test", tmp_path)
    count = sum(each.numel() for each in run.student.module.parameters())
    card = (tmp_path / "README.md").read_text("utf-8")
    assert f"A model of {count:,} parameters" in card
    assert f"{PLAN.steps:,} steps of {PLAN.batch} questions" in card and "1 thread of a test" in card


@pytest.mark.parametrize("task", ["sums", "gap"])
def test_the_bundled_model_answers_most_questions_in_few_passes(task: Task) -> None:
    """Asked are questions that training left out; a right answer of 16 tokens takes fewer passes than tokens."""
    loaded = load_masked_diffusion(str(MODELS / pair.DIFFUSION), device="cpu", dtype=torch.float32)
    diffusion, tokenizer, rng = BlockDiffusion(loaded), loaded.tokenizer, Random(7)
    asked, right, passes = [question(rng, task, held_out=True) for _ in range(40)], 0, 0
    for each in asked:
        prompt, way = tokenizer.encode(each.prompt), Unmasking(ANSWER, threshold=0.9)
        run = diffusion.infill(prompt, way) if task == "gap" else diffusion.generate(prompt, ANSWER, way)
        passes += sum(1 for _ in run)
        right += tokenizer.decode(run.answer) == each.answer
    assert right >= 30
    assert passes < sum(len(each.answer) for each in asked) / 2
