"""The two students of a pair, which the loop of `training.distil` trains: one learns masked places, one the next token.

Both see the same questions in each step. Weights are drawn from the plan's seed, so both begin alike.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
from tokenizers import Tokenizer

from training.diffusion.masked_model import MaskedModel
from training.diffusion.rows import PairRows, causal_rows, masked_rows, questions_of
from training.distil.distillation import DistilPlan
from training.torch_model import ModelConfig

BLOCK_SIZES = (4, 8, 16)  # one of them in each step, so that the model serves all
SHAPE = ModelConfig(
    vocab_size=257,
    hidden_size=128,
    intermediate_size=384,
    layer_types=("full_attention",) * 6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
)
PLAN = DistilPlan(steps=4000, batch=64, matrix_lr=0.02, adam_lr=3e-3, fall=0.4)


class PairStudent:
    """A model of the pair. `rows_of` makes the rows of a step."""

    def __init__(self, plan: DistilPlan, shape: ModelConfig, rows_of: Callable[[int], PairRows]) -> None:
        torch.manual_seed(plan.seed)
        self.module = MaskedModel(shape)
        self.plan, self._rows_of = plan, rows_of

    def backward(self, step: int) -> float:
        """Adds the gradients of a step. Returns its mean loss."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.plan.bfloat16):
            loss = self.module.row_loss(self._rows_of(step))
        loss.backward()
        return loss.item()


def masked_student(plan: DistilPlan, tokenizer: Tokenizer, shape: ModelConfig = SHAPE) -> PairStudent:
    """Returns the student that fills masks (Nie et al. 2025)."""

    def rows_of(step: int) -> PairRows:
        generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
        block_size = Random(f"{plan.seed}-{step}-block").choice(BLOCK_SIZES)
        return masked_rows(questions_of(plan.seed, step, plan.batch), tokenizer, block_size, generator)

    return PairStudent(plan, shape, rows_of)


def causal_student(plan: DistilPlan, tokenizer: Tokenizer, shape: ModelConfig = SHAPE) -> PairStudent:
    """Returns its twin, which writes from left to right."""
    return PairStudent(plan, shape, lambda step: causal_rows(questions_of(plan.seed, step, plan.batch), tokenizer))
