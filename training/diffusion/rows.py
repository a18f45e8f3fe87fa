"""Rows of both models from the same questions: tokens, positions, and which token sees which.

A row of the diffusion model is what is known, then the answer twice: as it is, and masked in part. A place of the
masked copy sees what is known, the whole blocks before its own as they are, and its own block as it is masked (Block
Diffusion, Arriola et al. 2025, section 3.2), so one pass learns all blocks as decoding with kept K/V computes them.
The twin's row is the question and its answer, seen from left to right. Rows of a batch are padded on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.diffusion.byte_tokenizer import END
from training.diffusion.questions import ANSWER, MASK, TASKS, PairQuestion, question
from training.train_tokenizer import token_id

KEY = "{seed}-{step}"  # of a step's questions


@dataclass(frozen=True, slots=True)
class PairRows:
    """A batch: `tokens` and `positions` (rows, length) int64, `visible` (rows, length, length) whether a token sees
    another. `targets` (n,) are the tokens learned at the places `learned` (n,) of rows · length, with `weights` (n,).
    """

    tokens: Tensor
    positions: Tensor
    visible: Tensor
    learned: Tensor
    targets: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class SplitQuestion:
    """Known tokens of a question, and its answer, by position; the answer of no gap is filled up with ends."""

    known: tuple[tuple[int, int], ...]
    answer: tuple[tuple[int, int], ...]


def questions_of(seed: int, step: int, count: int) -> list[PairQuestion]:
    """Returns a step's questions, the same for both models: as many of each task, as far as it goes."""
    rng = Random(KEY.format(seed=seed, step=step))
    return [question(rng, TASKS[at % len(TASKS)], held_out=False) for at in range(count)]


def split(asked: PairQuestion, tokenizer: Tokenizer) -> SplitQuestion:
    """Splits a question into what is known and what is masked."""
    prompt, answer = tokenizer.encode(asked.prompt).ids, tokenizer.encode(asked.answer).ids
    if asked.task == "gap":
        mask, filled = tokenizer.token_to_id(MASK), iter(answer)
        known = tuple((at, token) for at, token in enumerate(prompt) if token != mask)
        return SplitQuestion(known, tuple((at, next(filled)) for at, token in enumerate(prompt) if token == mask))
    padded = answer + [token_id(tokenizer, END)] * (ANSWER - len(answer))
    return SplitQuestion(tuple(enumerate(prompt)), tuple(enumerate(padded, len(prompt))))


def masked_rows(
    asked: Sequence[PairQuestion], tokenizer: Tokenizer, block_size: int, generator: torch.Generator
) -> PairRows:
    """Returns rows of the diffusion model, each block masked at a ratio of its own.

    The ratios t of all blocks are spread evenly over (0, 1), and a masked token weighs 1/t (LLaDA, Nie et al. 2025,
    equation 3), over the tokens of an answer.
    """
    parts = [split(each, tokenizer) for each in asked]
    rows, before = len(parts), max(len(each.known) for each in parts)
    tokens = torch.zeros(rows, before + 2 * ANSWER, dtype=torch.int64)
    positions, real = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    for at, each in enumerate(parts):
        for begin, some in ((0, each.known), (before, each.answer), (before + ANSWER, each.answer)):
            here = slice(begin, begin + len(some))
            positions[at, here], tokens[at, here] = torch.tensor(some).T
            real[at, here] = True
    blocks = -(-ANSWER // block_size)
    places = torch.arange(ANSWER)
    block = torch.cat([torch.full((before,), -1), places // block_size, places // block_size])
    noisy = torch.arange(before + 2 * ANSWER) >= before + ANSWER
    # a clean token sees all that is clean up to its block's end; a masked one what is clean before its block, and it
    clean_seen = ~noisy[None] & torch.where(noisy[:, None], block[None] < block[:, None], block[None] <= block[:, None])
    own_seen = noisy[:, None] & noisy[None] & (block[None] == block[:, None])
    visible = (clean_seen | own_seen)[None] & real[:, None, :]
    visible |= torch.eye(len(noisy), dtype=torch.bool)  # padding sees itself: an empty row of attention is no number
    ratios = torch.rand(1, generator=generator) + torch.arange(rows * blocks) / (rows * blocks)
    ratios = (ratios % 1.0)[torch.randperm(rows * blocks, generator=generator)].view(rows, blocks)
    ratios = ratios.clamp_(min=1 / (2 * ANSWER))[:, places // block_size]  # (rows, ANSWER)
    masked = (torch.rand(rows, ANSWER, generator=generator) < ratios) & real[:, before + ANSWER :]
    targets = tokens[:, before + ANSWER :].clone()
    tokens[:, before + ANSWER :][masked] = token_id(tokenizer, MASK)
    learned = torch.zeros_like(real)
    learned[:, before + ANSWER :] = masked
    lengths = real[:, before + ANSWER :].sum(1, keepdim=True)
    weights = (1 / ratios / lengths / rows)[masked]
    return PairRows(tokens, positions, visible, learned.flatten().nonzero()[:, 0], targets[masked], weights)


def causal_rows(asked: Sequence[PairQuestion], tokenizer: Tokenizer) -> PairRows:
    """Returns rows of the twin, which learns each answer and its end. A gap's prompt gets a "=" behind it."""
    encoded = [causal_prompt(each, tokenizer) for each in asked]
    answers = [[*tokenizer.encode(each.answer).ids, token_id(tokenizer, END)] for each in asked]
    length = max(len(p) + len(a) for p, a in zip(encoded, answers, strict=True))
    tokens = torch.zeros(len(asked), length, dtype=torch.int64)
    weights, learned = torch.zeros(len(asked), length), torch.zeros(len(asked), length, dtype=torch.bool)
    for at, (prompt, answer) in enumerate(zip(encoded, answers, strict=True)):
        tokens[at, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        before = slice(len(prompt) - 1, len(prompt) - 1 + len(answer))
        learned[at, before], weights[at, before] = True, 1 / len(answer) / len(asked)
    targets = tokens.roll(-1, 1)
    positions = torch.arange(length).expand(len(asked), -1)
    visible = torch.ones(length, length, dtype=torch.bool).tril().expand(len(asked), -1, -1)
    at_places = learned.flatten().nonzero()[:, 0]
    return PairRows(tokens, positions, visible, at_places, targets[learned], weights[learned])


def causal_prompt(asked: PairQuestion, tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that the twin answers after."""
    return list(tokenizer.encode(asked.prompt + (" =" if asked.task == "gap" else "")).ids)
