"""Quantisation-aware training: its loss, runs that were stopped, and directories that the engine serves."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from engine.model.batch import KVCache
from engine.model.decoder import load_decoder
from engine.model.quantization.checkpoint import open_weights
from engine.model.quantization.gptq import nearest
from engine.model.quantization.layerwise import LayerwiseModel, projections, whole_text
from engine.model.quantization.quantize import Recipe, quantize
from tests.training.conftest import TINY
from training import __main__ as command
from training import export
from training.distil.distillation import Distillation, DistilPlan
from training.quantized import checkpoint, qat
from training.quantized.fake_quantization import FakeQuantizedLinear, fake_quantized, linears, quantize_linears
from training.quantized.texts import LENGTH, conversations
from training.torch_model import Model

SHAPE = replace(TINY, intermediate_size=64)  # whose widths groups of 32 divide
PLAN = DistilPlan(steps=6, batch=3, matrix_lr=0.01, adam_lr=0.02, fall=1.0, log_every=1)
RTN = Recipe("int4", "rtn", 32)


def random_model(seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model(SHAPE)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


def random_texts(count: int = 8, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, SHAPE.vocab_size, (9 + at,), generator=generator).tolist() for at in range(count)]


def copy_of(model: Model) -> Model:
    made = Model(SHAPE)
    made.load_state_dict(model.state_dict())
    return made


def student_of(teacher: Model, plan: DistilPlan = PLAN) -> qat.QuantizedStudent:
    """Returns a student that begins with rounding to nearest."""
    student = copy_of(teacher)
    starts = {name: nearest(linear.weight.detach(), 4, 32, torch.bfloat16) for name, linear in linears(student)}
    quantize_linears(student, starts, torch.bfloat16)
    return qat.QuantizedStudent(student, teacher.requires_grad_(False), random_texts(), plan)


def stored(student: qat.QuantizedStudent) -> dict[str, Tensor]:
    return {name: linear.affine().dequantize() for name, linear in fake_quantized(student.module)}


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.fixture
def base(tiny_tokenizer: Tokenizer, tmp_path: Path) -> Path:
    export.export(random_model(3), tiny_tokenizer, tmp_path / "pebble")
    return tmp_path / "pebble"


def test_the_loss_is_the_divergence_from_the_teacher_after_every_token() -> None:
    teacher = random_model(1)
    student = student_of(teacher)
    rounded = copy_of(teacher)
    for name, linear in list(linears(rounded)):
        linear.weight.data = stored(student)[name]
    lost = []
    for text in random_texts():
        tokens = torch.tensor([text])
        before, after = (each(tokens)[0].double().log_softmax(-1) for each in (teacher, rounded))
        lost += (before.exp() * (before - after)).sum(-1).tolist()
    assert student.divergence(random_texts()) == pytest.approx(sum(lost) / len(lost), rel=1e-4)
    whole = qat.QuantizedStudent(student.module, teacher, random_texts(), replace(PLAN, batch=8))
    assert whole.backward(0) == pytest.approx(sum(lost) / len(lost), rel=1e-4)
    assert sum(lost) / len(lost) > 1e-3


def test_weights_and_scales_alone_learn() -> None:
    student = student_of(random_model(2))
    student.backward(0)
    learned = {name for name, weight in student.module.named_parameters() if weight.grad is not None}
    wanted = {f"{name}.{part}" for name, _ in fake_quantized(student.module) for part in ("weight", "log_scale")}
    assert learned == wanted and len(wanted) == 2 * 12


@pytest.mark.parametrize("rate", ["matrix_lr", "adam_lr"])
def test_each_rate_is_of_its_own_kind(rate: str, tmp_path: Path) -> None:
    matrix_lr, adam_lr = (0.01, 0.0) if rate == "matrix_lr" else (0.0, 0.01)
    student = student_of(random_model(2), replace(PLAN, matrix_lr=matrix_lr, adam_lr=adam_lr))
    before = state(student.module)
    qat.distillation_of(student, tmp_path).run()
    changed = {
        name.rpartition(".")[2] for name, tensor in state(student.module).items() if not tensor.equal(before[name])
    }
    assert changed == {"weight" if rate == "matrix_lr" else "log_scale"}


def test_the_divergence_falls(tmp_path: Path) -> None:
    student = student_of(random_model(4), replace(PLAN, steps=40, matrix_lr=0.005, adam_lr=0.005, batch=8))
    before = student.divergence(random_texts())
    qat.distillation_of(student, tmp_path).run()
    assert student.divergence(random_texts()) < 0.5 * before
    curve = [json.loads(line)["loss"] for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert len(curve) == 40 and curve[-1] < 0.5 * curve[0]


def test_weights_that_are_on_the_grid_stay(tmp_path: Path) -> None:
    teacher = random_model(5)
    for _, linear in linears(teacher):
        linear.weight.data = nearest(linear.weight.detach(), 4, 32, torch.bfloat16).dequantize()
    student = student_of(teacher, replace(PLAN, matrix_lr=1e-4, adam_lr=1e-4))
    before = stored(student)
    assert all(torch.equal(linear.weight, before[name]) for name, linear in linears(teacher))
    assert student.divergence(random_texts()) < 1e-6
    qat.distillation_of(student, tmp_path).run()
    assert all(torch.equal(tensor, before[name]) for name, tensor in stored(student).items())


def test_a_resumed_run_ends_with_the_same_bits_and_logs_each_step_once(tmp_path: Path) -> None:
    def run(work: Path) -> Distillation[Model]:
        return qat.distillation_of(student_of(random_model(6)), work)

    whole = run(tmp_path / "whole")
    before = state(whole.student.module)
    whole.run()
    first = run(tmp_path / "parts")
    first.run(until=3)
    later = first.checkpoint.read_bytes()
    first.run(until=5)  # as one that was killed before its next checkpoint
    first.checkpoint.write_bytes(later)
    resumed = run(tmp_path / "parts")
    resumed.resume()
    assert resumed.done == 3
    resumed.run()
    ends = [state(each.student.module) for each in (whole, resumed)]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    assert not all(torch.equal(tensor, before[name]) for name, tensor in ends[0].items())
    logs = [(tmp_path / name / "losses.jsonl").read_text() for name in ("whole", "parts")]
    assert logs[0] == logs[1]


def test_the_engine_serves_what_was_trained(base: Path, tmp_path: Path) -> None:
    quantize(base, tmp_path / "start", RTN, [])
    student = qat.student_of(base, tmp_path / "start", random_texts(), PLAN)
    assert (
        open_weights(tmp_path / "start")
        .take("model.layers.0.conv.in_proj.weight", (96, 32))
        .equal(stored(student)["model.layers.0.conv.in_proj"])
    )
    before = stored(student)
    qat.distillation_of(student, tmp_path / "work").run()
    target = tmp_path / "int4"
    checkpoint.write(student.module, base, target, RTN, {"plan": "a test's"})
    assert not any(tensor.equal(before[name]) for name, tensor in stored(student).items())

    model, weights = LayerwiseModel(target), open_weights(target)
    parts = [part for at in range(2) for each in projections(model.spec, model.names, at).values() for part in each]
    assert {part.name for part in parts} == stored(student).keys()
    for part in parts:
        name, shape = f"{part.name}.weight", (part.rows, part.columns)
        assert weights.take_quantized(name, shape) is not None
        assert weights.take(name, shape).equal(stored(student)[part.name])
    written = {name: each for file in target.glob("*.safetensors") for name, each in load_file(file).items()}
    rest = {name: each for name, each in load_file(base / "model.safetensors").items() if name in written}
    assert len(rest) == len(load_file(base / "model.safetensors")) - len(parts)
    assert all(torch.equal(tensor, written[name]) for name, tensor in rest.items())

    decoder, text = load_decoder(target, dtype=torch.float32, kernels="torch"), random_texts()[0]
    found = decoder.forward(whole_text(text), KVCache.of(decoder.spec, 3, 16, torch.float32, "cpu"))
    with torch.no_grad():
        wanted = student.module(torch.tensor([text]))[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_the_command_trains_from_gptq_and_resumes(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(qat, "CONVERSATIONS", 12)
    plan = replace(PLAN, steps=2)
    run = qat.make(base, tmp_path / "int4", tmp_path / "work", plan, resume=False)
    first = {file.name: file.read_bytes() for file in (tmp_path / "int4").iterdir()}
    assert "GPTQ: layer 2 of 2" in capsys.readouterr().out
    record = json.loads(first["quantization.json"])
    assert (record["method"], record["plan"]["steps"]) == ("qat", 2)
    gptq = checkpoint.read_starts(tmp_path / "work" / "gptq", export.load(base))
    of_gptq = [(gptq[name], linear) for name, linear in fake_quantized(run.student.module)]
    assert all(torch.equal(each.scales, linear.start) for each, linear in of_gptq)
    qat.make(base, tmp_path / "int4", tmp_path / "work", plan, resume=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "int4").iterdir()} == first
    assert load_decoder(tmp_path / "int4", dtype=torch.float32, kernels="torch").spec.layers == 2


def test_texts_depend_on_phrasing_and_count_alone(base: Path) -> None:
    found = conversations(base, "train", 4)
    assert found == conversations(base, "train", 6)[:4] != conversations(base, "held_out", 4)
    assert all(1 < len(text) <= LENGTH for text in found)


@pytest.mark.parametrize("options", [{"device": "cuda", "begin": "start"}, {"device": "cpu", "begin": "extend"}])
def test_options_without_effect_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(SystemExit, match="leave out --device, --extend"):
        command.make_quantized(argparse.Namespace(**options))


def test_a_start_without_a_linear_is_refused() -> None:
    with pytest.raises(KeyError):
        quantize_linears(random_model(0), {}, torch.bfloat16)
    assert not any(isinstance(each, FakeQuantizedLinear) for each in random_model(0).modules())
