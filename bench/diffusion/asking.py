"""Asks held-out questions of the pair, and counts right answers and passes of the model.

The twin runs on the engine as any model does, greedily: a pass gives one token. A pass of the diffusion model fills
what its way of unmasking keeps. Answers count as tokens with their end, where they have one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from engine import GREEDY, Engine, EngineConfig, Span
from engine.diffusion import BlockDiffusion, Unmasking, load_masked_diffusion
from training.diffusion.byte_tokenizer import byte_tokenizer
from training.diffusion.questions import PairQuestion, Task, question
from training.diffusion.rows import causal_prompt

SEED = "evaluation"  # training makes its questions from "seed-step"


@dataclass(frozen=True, slots=True)
class AskedAnswer:
    """Of one question: whether the answer is right, its tokens, and the passes of the model and milliseconds that it
    took."""

    right: bool
    tokens: int
    passes: int
    ms: float


def held_out(task: Task, n: int) -> list[PairQuestion]:
    """Returns questions that training left out, each once."""
    rng, found = Random(f"{SEED}-{task}"), dict[str, PairQuestion]()
    while len(found) < n:
        made = question(rng, task, held_out=True)
        found[made.prompt] = made
    return list(found.values())


def ask_diffusion(
    model: Path,
    asked: Sequence[PairQuestion],
    ways: Sequence[Unmasking],
    progress: Callable[[str], None],
) -> list[list[AskedAnswer]]:
    """Returns the answers of each way of unmasking."""
    loaded = load_masked_diffusion(str(model), device="cpu", dtype=torch.float32)
    diffusion, tokenizer, found = BlockDiffusion(loaded), loaded.tokenizer, []
    for way in ways:
        answers = list[AskedAnswer]()
        for each in asked:
            prompt, began = tokenizer.encode(each.prompt), time.perf_counter()
            gap = each.task == "gap"
            run = diffusion.infill(prompt, way) if gap else diffusion.generate(prompt, loaded.answer_tokens, way)
            for _ in run:
                pass
            ms = (time.perf_counter() - began) * 1e3
            right = tokenizer.decode(run.answer) == each.answer
            answers.append(AskedAnswer(right, len(run.answer) + run.ended, run.passes, ms))
        found.append(answers)
        progress(f"{way}: {sum(each.right for each in answers)} of {len(answers)}")
    return found


async def ask_twin(model: Path, asked: Sequence[PairQuestion]) -> list[AskedAnswer]:
    """Returns the twin's answers, asked one after the other."""
    answers, tokenizer = list[AskedAnswer](), byte_tokenizer()
    config = EngineConfig(str(model), device="cpu", dtype="float32", speculation="off", prefix_cache=False, threads=1)
    async with await Engine.start(config) as engine:
        for each in asked:
            began = time.perf_counter()
            async with await engine.open(causal_prompt(each, tokenizer)) as seq:
                made = await seq.generate_all(Span(GREEDY, max_tokens=32))
            ms, tokens = (time.perf_counter() - began) * 1e3, len(made.token_ids) + (made.finish_reason == "stop")
            answers.append(AskedAnswer(made.text == each.answer, tokens, tokens, ms))
    return answers
