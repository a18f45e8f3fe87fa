"""Trains Pebble's weights of 4 bits to give the distributions of the original (LLM-QAT, Liu et al. 2023).

The student begins with GPTQ's codes and scales and learns, on the texts that GPTQ was calibrated on, the original's
own distribution after every token: the loss is the KL divergence, in nats. Linears of the layers are rounded as they
are stored, with scales of groups that are learned too (as in EfficientQAT, Chen et al. 2024); embedding, logits'
matrix, norms and convolutions stay as they are. Activations, which the CPU kernels round to 8 bits, are not rounded
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.quantization.quantize import LayerDone, Recipe, quantize
from training import export
from training.distil.distillation import Distillation, DistilPlan, rows_of
from training.quantized import checkpoint
from training.quantized.fake_quantization import fake_quantized, quantize_linears
from training.quantized.texts import conversations
from training.torch_model import Model

CONVERSATIONS = 256
RECIPE = Recipe("int4", "gptq", 32, act_order=True)  # of the codes that it begins with
PLAN = DistilPlan(steps=80, batch=8, matrix_lr=1e-4, adam_lr=1e-3, fall=1.0, checkpoint_every_s=120.0, log_every=5)


class QuantizedStudent:
    """Learns the distributions of `teacher` after every token of `batch` texts a step."""

    def __init__(self, student: Model, teacher: Model, texts: Sequence[Sequence[int]], plan: DistilPlan) -> None:
        self.module = student
        self.plan = plan
        self._teacher = teacher
        self._texts = [torch.tensor(text)[None] for text in texts]
        self._states = dict[int, Tensor]()  # the teacher's last normed states of texts that came once

    def backward(self, step: int) -> float:
        taken = rows_of(range(len(self._texts)), step, self.plan.batch, self.plan.seed)
        wanted = torch.cat([self._wanted(at) for at in taken])
        loss = self._divergences(wanted, [self._texts[at] for at in taken]).mean()
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def divergence(self, texts: Sequence[Sequence[int]]) -> float:
        """Returns the mean KL divergence from the teacher after each token of `texts`, in nats."""
        lost = list[Tensor]()
        for text in texts:
            tokens = torch.tensor(text)[None]
            lost.append(self._divergences(self._teacher.guided([tokens])[0], [tokens]))
        return float(torch.cat(lost).mean())

    def _wanted(self, at: int) -> Tensor:
        """Returns the teacher's states of a text, (tokens, hidden_size) float32: each text passes by itself, so that
        they do not depend on the others of a step."""
        if at not in self._states:
            with torch.no_grad():
                self._states[at] = self._teacher.guided([self._texts[at]])[0]
        return self._states[at]

    def _divergences(self, wanted: Tensor, texts: Sequence[Tensor]) -> Tensor:
        """Returns the KL divergence after each token, (tokens,) float32."""
        embedding = self._teacher.model.embed_tokens.weight.detach()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.plan.bfloat16):
            hidden = self.module.guided(texts)[0]
        found = F.linear(hidden.float(), embedding).log_softmax(-1)
        with torch.no_grad():
            before = F.linear(wanted, embedding).log_softmax(-1)
        return (before.exp() * (before - found)).sum(-1)


def student_of(base: Path, start: Path, texts: Sequence[Sequence[int]], plan: DistilPlan) -> QuantizedStudent:
    """Returns the student of the model `base` with the codes and scales of `start`, a directory that `quantize` wrote.

    Raises:
        ValueError: the base is of another family than the bundled model's.
        CheckpointError: the start cannot be read.
    """
    export.model_config(base)  # refuses others
    teacher, student = export.load(base), export.load(base)
    quantize_linears(student, checkpoint.read_starts(start, student), checkpoint.SCALE_DTYPE)
    return QuantizedStudent(student, teacher.requires_grad_(False), texts, plan)


class QuantizedOptimizer:
    """Adam at `matrix_lr` for the weights that are rounded, and at `adam_lr` for the logarithms of their scales."""

    def __init__(self, student: Model, plan: DistilPlan) -> None:
        found = [linear for _, linear in fake_quantized(student)]
        weights, scales = [each.weight for each in found], [each.log_scale for each in found]
        self._peaks = (plan.matrix_lr, plan.adam_lr)
        groups = [{"params": weights}, {"params": scales}]
        self._adam = torch.optim.Adam(groups, lr=plan.matrix_lr, betas=(0.9, 0.95))

    def step(self, share: float) -> None:
        for group, peak in zip(self._adam.param_groups, self._peaks, strict=True):
            group["lr"] = peak * share
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, object]:
        return self._adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:  # Any: as torch has it
        self._adam.load_state_dict(state)


def distillation_of(student: QuantizedStudent, work: Path) -> Distillation[Model]:
    """Returns the run of a student, with its checkpoint and its log in `work`."""
    return Distillation(student.plan, student, work, QuantizedOptimizer(student.module, student.plan))


def make(base: Path, target: Path, work: Path, plan: DistilPlan, *, resume: bool) -> Distillation[Model]:
    """Writes the model `base` at 4 bits to `target`: GPTQ first, then training.

    With `resume` it goes on from what `work` has.

    Raises:
        ValueError, CheckpointError: see `student_of`, `quantize` and `checkpoint.write`.
    """
    texts = conversations(base, "train", CONVERSATIONS)
    quantize(base, work / "gptq", RECIPE, texts, resume=resume, overwrite=not resume, done=_report)
    run = distillation_of(student_of(base, work / "gptq", texts, plan), work)
    if resume:
        run.resume()
    run.run()
    checkpoint.write(run.student.module, base, target, RECIPE, record_of(plan, texts))
    return run


def record_of(plan: DistilPlan, texts: Sequence[Sequence[int]]) -> dict[str, Any]:  # Any: JSON
    """Returns how a run was made."""
    return {"tokens": sum(map(len, texts)), "plan": asdict(plan)}


def _report(layer: LayerDone) -> None:
    print(f"GPTQ: layer {layer.index + 1} of {layer.layers}, {layer.seconds_left:.0f} s left", flush=True)
