"""Beam search against `transformers`, and against trying everything."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import Engine, EngineConfig, InvalidParameter
from engine.beam_search import beam_search

PROMPT = [5, 9, 33, 120, 7]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("eos_at", [None, 1, 3])
async def test_hypotheses_are_those_of_transformers(
    random_model: Path, width: int, length_penalty: float, eos_at: int | None
) -> None:
    oracle: Any = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32)  # its annotations lack much
    greedy = oracle.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=1, pad_token_id=0)
    eos = 1 if eos_at is None else int(greedy[0, len(PROMPT) + eos_at])  # a token that a beam really reaches
    found = oracle.generate(
        torch.tensor([PROMPT]), num_beams=width, num_return_sequences=width, max_new_tokens=8, do_sample=False,
        length_penalty=length_penalty, eos_token_id=eos, pad_token_id=0, early_stopping=False,
        output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    expected = [tuple(row[len(PROMPT) :]) for row in found.sequences.tolist()]
    async with await Engine.start(EngineConfig(str(random_model), dtype="float32")) as engine:
        async with await engine.open(PROMPT) as seq:
            mine = await beam_search(seq, width=width, max_tokens=8, eos=(eos,), length_penalty=length_penalty)
            assert seq.tokens == PROMPT
        assert eos_at is None or any(h.ended for h in mine)
        padded = [h.token_ids + (eos,) * (len(e) - len(h.token_ids)) for h, e in zip(mine, expected, strict=True)]
        assert padded == expected
        if width > 1:
            assert [h.score for h in mine] == pytest.approx(found.sequences_scores.tolist(), abs=1e-3)
        assert (await engine.stats()).blocks_used == 0


async def test_a_beam_as_wide_as_the_space_finds_the_best_there_is(random_model: Path) -> None:
    async with (
        await Engine.start(EngineConfig(str(random_model), dtype="float32")) as engine,
        await engine.open(PROMPT) as seq,
    ):
        best = (await beam_search(seq, width=32, max_tokens=2))[0]
        firsts = [
            t
            for t, _ in sorted(
                enumerate(await seq.score([[t] for t in range(engine.vocab_size)])), key=lambda p: -p[1][0]
            )[:12]
        ]
        pairs = list(itertools.product(firsts, range(engine.vocab_size)))
        scores = await seq.score(pairs[:1000])
        assert best.logprob >= max(map(sum, scores)) - 1e-4


async def test_a_width_out_of_range_is_refused(random_model: Path) -> None:
    async with (
        await Engine.start(EngineConfig(str(random_model), dtype="float32")) as engine,
        await engine.open(PROMPT) as seq,
    ):
        with pytest.raises(InvalidParameter, match="width"):
            await beam_search(seq, width=0, max_tokens=3)
