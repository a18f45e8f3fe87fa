"""Trains the draft model on the base's answers, each with the base's distribution at every token of it.

The draft has the base's tokenizer and learns nothing but its answers: cross-entropy to the base's distribution, both
at `TEMPERATURE` (Hinton et al., 2015; Zhou et al., 2024, DistillSpec), and the targets of `training.alignment`, without
which so small a model does not learn to copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from training import export, mixture
from training.distil import answers
from training.distil.answers import Answer
from training.distil.distillation import Distillation, DistilPlan, rows_of
from training.torch_model import Model, TrainingBatch, guidance
from training.train_tokenizer import END_OF_TEXT, token_id

TEMPERATURE = 0.7
GUIDANCE = (0.05, 0.3, 0.3, 0.3, 0.3)  # weight in the loss of each role of `training.alignment`
SHORT = 64  # tokens: of a longer answer, a thought most often, each counts less
MAX_BATCH_TOKENS, SPREAD = 3072, 1.3  # tokens that go through the draft at once, and their lengths' spread
PLAN = DistilPlan(steps=2000, batch=12, matrix_lr=0.01, adam_lr=2e-3, fall=0.5)

REMARKS = """\
- **After that**: {steps:,} steps of {batch} of Pebble's own answers, greedy and at temperature 0.7, to prompts of the
  mixture (`training/distil`): the cross-entropy to Pebble's distribution at temperature {temperature}, and guided
  alignment. Muon at {matrix_lr} and AdamW at {adam_lr}, a linear fall over the last {fall:.0%}; {minutes} minutes.

## Acceptance

{acceptance}
"""


@dataclass(frozen=True, slots=True)
class Lesson:
    """An answer and the states that the base sampled it from, (answer, hidden_size)."""

    answer: Answer
    states: Tensor


def lessons(work: Path, tokenizer: Tokenizer) -> list[Lesson]:
    """Reads the answers, each once, of which the text has the tokens that were sampled, which is nearly all."""
    found, known = [], set()
    for each, states in answers.read(work):
        if (each.read, each.tokens) in known:
            continue
        known.add((each.read, each.tokens))
        text = tokenizer.decode(list(each.tokens), skip_special_tokens=False)
        if tuple(tokenizer.encode(text, add_special_tokens=False).ids) == each.tokens:
            found.append(Lesson(each, states))
    return found


def row_of(lesson: Lesson, tokenizer: Tokenizer) -> mixture.TrainingRow:
    """Returns an answer behind its prompt: its own tokens are learned, and where all are to look."""
    text = tokenizer.decode(list(lesson.answer.tokens), skip_special_tokens=False)
    row = mixture.row_of(Random(0), (*lesson.answer.read, (text, True)), tokenizer)
    size = len(lesson.answer.tokens)
    weights = [0.0] * (len(row.tokens) - size) + [min(1.0, (SHORT / size) ** 0.5)] * size
    return mixture.TrainingRow(row.tokens, weights, row.alignment)


class DraftStudent:
    """Learns from `batch` answers a step."""

    def __init__(
        self, draft: Model, embedding: Tensor, learned: Sequence[Lesson], tokenizer: Tokenizer, plan: DistilPlan
    ) -> None:
        self.module = draft
        self.plan = plan
        self._embedding = embedding.detach()
        self._lessons = learned
        self._tokenizer = tokenizer
        self._padding = token_id(tokenizer, END_OF_TEXT)

    def backward(self, step: int) -> float:
        taken = rows_of(self._lessons, step, self.plan.batch, self.plan.seed)
        rows = [(row_of(each, self._tokenizer), each.states) for each in taken]
        rows.sort(key=lambda each: -len(each[0].tokens))
        states = [each for _, each in rows]
        count = sum(sum(row.weights) for row, _ in rows)
        lost = 0.0
        for batch in mixture.batches([row for row, _ in rows], MAX_BATCH_TOKENS, self._padding, SPREAD):
            here, states = states[: len(batch.tokens)], states[len(batch.tokens) :]
            with torch.autocast("cpu", torch.bfloat16, enabled=self.plan.bfloat16):
                learned, roles = self._losses(batch, torch.cat(here))
            ((learned + torch.tensor(GUIDANCE) @ roles) / count).backward()
            lost += learned.item()
        return lost / count

    def _losses(self, batch: TrainingBatch, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of the cross-entropies to the base's distributions, (), and of each role's loss, (roles,)."""
        hidden, queries, keys = self.module.guided([batch.tokens])
        logits = F.linear(hidden[batch.learned], self.module.model.embed_tokens.weight)
        with torch.no_grad():
            wanted = (F.linear(states.float(), self._embedding).float() / TEMPERATURE).softmax(-1)
        losses = F.cross_entropy(logits.float() / TEMPERATURE, wanted, reduction="none")
        return losses @ batch.shares, guidance(queries, keys, [batch])


def train(base: Path, start: Path, learned: Path, work: Path, plan: DistilPlan, *, resume: bool) -> Distillation[Model]:
    """Goes on with the draft in `start` on the answers in the folder `learned`."""
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    embedding = export.load(base).model.embed_tokens.weight
    student = DraftStudent(export.load(start), embedding, lessons(learned, tokenizer), tokenizer, plan)
    run = Distillation(plan, student, work)
    if resume:
        run.resume()
    run.run()
    return run


def remarks(run: Distillation[Model], acceptance: str) -> str:
    """Writes what the card says of the distillation."""
    return REMARKS.format(
        steps=run.plan.steps,
        batch=run.plan.batch,
        temperature=TEMPERATURE,
        matrix_lr=run.plan.matrix_lr,
        adam_lr=run.plan.adam_lr,
        fall=run.plan.fall,
        minutes=max(1, round(run.seconds / 60)),
        acceptance=acceptance,
    )
