"""Drafts that run over the ends of things: of thinking, of bodies, of what a distribution allows; and what is told of
them."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import jsonschema
import pytest

from engine import GREEDY, Engine, EngineConfig, InvalidParameter, Sampling, Span
from engine.builder import build
from engine.core import messages as m
from engine.core.request import SequenceState
from engine.ipc import wire
from engine.outputs import SpanOutput
from engine.params import Speculation
from engine.speculation.proposer import DraftTokens, Proposer
from engine.structured_output.layout import Constrained, Layout
from engine.structured_output.spec import JsonSchema
from tests.engine.speculation.test_same_tokens import ANSWER, AT_ONCE, THINK, Planted, Recorder

OBJECT = {
    "type": "object",
    "properties": {"a": {"enum": ["red", "green"]}, "n": {"enum": [1, 22, 333]}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
TEMPERATURE = 2.0
THOUGHT = Layout(think=(THINK, ANSWER), thinking=True)


async def pieces(
    engine: Engine, prompt: list[int], span: Span, gate: AbstractAsyncContextManager[object] | None = None
) -> list[SpanOutput]:
    async with gate or nullcontext(), await engine.open(prompt) as seq:
        return [output async for output in seq.generate(span)]


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
async def test_thinking_that_ends_inside_a_draft_is_followed_by_a_valid_body(wide_model: Path, count: int) -> None:
    config = EngineConfig(
        str(wide_model), deterministic=True, kv_blocks=6000, max_running=512, threads=1, speculation="planted"
    )
    constraint = Constrained(JsonSchema.of(OBJECT), THOUGHT)
    spans = [
        Span(
            Sampling(temperature=1.0, seed=seed, logit_bias={ANSWER: 5.0}, presence_penalty=0.5 * (seed % 2)),
            max_tokens=150,
            constraint=constraint,
        )
        for seed in range(count)
    ]
    recorder, found = Recorder(), []
    for proposer in (recorder, Planted(recorder.spans, 0.1)):
        async with await Engine.start(config, partial(build, proposers=(proposer,))) as engine:
            gate = asyncio.Semaphore(AT_ONCE)
            every = await asyncio.gather(*(pieces(engine, [5, 6, 7], span, gate) for span in spans))
        found.append([[(p.text, p.kind) for p in made if p.text] for made in every])
        bodies = [
            "".join(p.text for p in made if p.kind == "body") for made in every if made[-1].finish_reason == "stop"
        ]
        assert len(bodies) > 0.6 * count
        for body in bodies:
            jsonschema.validate(json.loads(body), OBJECT)
    inside = [made for made in every if any(p.drafted and p.kind == "body" for p in made)]
    assert len(inside) > 0.3 * count, "few thoughts ended in a draft that went on"
    joined = [
        ["".join(text for text, kind in made if kind == part) for part in ("thought", "body")] for made in found[0]
    ]
    assert joined == [
        ["".join(t for t, kind in made if kind == part) for part in ("thought", "body")] for made in found[1]
    ]


class Likeliest(Proposer):
    """Always proposes the same token, which is often right."""

    name = "likeliest"

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, seq: SequenceState, budget: int) -> DraftTokens:
        return DraftTokens((self.token,) * budget, (0.9,) * budget)


@pytest.mark.slow
async def test_the_distribution_is_the_models(random_model: Path) -> None:
    """A chi-square of the first three tokens, of two each: the likeliest second one is always drafted."""
    config = EngineConfig(str(random_model), dtype="float32", kv_blocks=800, speculation="likeliest")
    prompt, draws = [5, 6, 7, 8], 4000
    expected: dict[tuple[int, ...], float] = {(): float(draws)}
    async with await Engine.start(replace(config, speculation="off")) as engine:
        for _ in range(3):
            longer: dict[tuple[int, ...], float] = {}
            for known, count in expected.items():
                async with await engine.open([*prompt, *known]) as seq:
                    told = await seq.generate_all(Span(GREEDY, max_tokens=1, logprobs=2, ignore_eos=True))
                (one, a), (two, b) = told.logprobs[0].top
                share = 1 / (1 + math.exp((b - a) / TEMPERATURE))
                longer |= {(*known, one): count * share, (*known, two): count * (1 - share)}
            expected = longer
    second = Counter[int]()
    for key, count in expected.items():
        second[key[1]] += int(count)
    proposer = Likeliest(second.most_common(1)[0][0])
    async with await Engine.start(config, partial(build, proposers=(proposer,))) as engine:

        async def three(seed: int) -> tuple[int, ...]:
            async with await engine.open(prompt) as seq:
                sampling = Sampling(temperature=TEMPERATURE, top_k=2, seed=seed)
                return (await seq.generate_all(Span(sampling, max_tokens=3, ignore_eos=True))).token_ids

        seen = Counter[tuple[int, ...]]()
        for first in range(0, draws, 50):  # so few that none waits: then nothing is drafted
            seen.update(await asyncio.gather(*(three(seed) for seed in range(first, first + 50))))
        stats = (await engine.stats()).speculation
    assert set(seen) <= set(expected)
    assert stats.accepted > 0.05 * draws
    chi2 = sum((seen[key] - count) ** 2 / count for key, count in expected.items())
    assert chi2 < 29.9, "of 7 degrees of freedom: one in 10,000 runs"


async def test_pieces_say_which_tokens_were_drafted(wide_model: Path) -> None:
    config = EngineConfig(str(wide_model), deterministic=True, kv_blocks=200, threads=1, speculation="planted")
    span = Span(Sampling(temperature=0.0, seed=1), max_tokens=30, ignore_eos=True)
    recorder = Recorder()
    async with await Engine.start(config, partial(build, proposers=(recorder,))) as engine:
        assert not any(each.drafted for each in await pieces(engine, [9] * 9, span))
    async with await Engine.start(config, partial(build, proposers=(Planted(recorder.spans, 0.0),))) as engine:
        made = await pieces(engine, [9] * 9, span)
        stats = (await engine.stats()).speculation
    assert sum(len(each.token_ids) for each in made if each.drafted) == stats.accepted > 15
    assert sum(len(each.token_ids) for each in made) == 30


def test_a_wish_travels_between_processes() -> None:
    span = Span(GREEDY, speculation=Speculation("suffix", 5, (1, 2, 3)))
    command = m.Generate(1, 2, span, 0, 10)
    assert wire.decode_commands(wire.encode_command(command)) == [command]


@pytest.mark.parametrize("tokens", [0, 33])
def test_a_draft_of_no_or_too_many_tokens_is_refused(tokens: int) -> None:
    with pytest.raises(InvalidParameter, match="1 to 32"):
        Speculation(max_tokens=tokens)
    with pytest.raises(InvalidParameter, match="1 to 32"):
        EngineConfig("model", speculation_tokens=tokens)
