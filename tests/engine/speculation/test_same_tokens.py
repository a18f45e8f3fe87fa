"""Speculation changes no token, text or log-probability: every kind of request with and without it, however it is
drafted for, batched, cut, forked and preempted."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from engine import Engine, EngineConfig, Sampling, Span
from engine.builder import build
from engine.config import LoopName
from engine.core.request import SequenceState, SpanJob
from engine.errors import EngineError
from engine.outputs import SpeculationStats
from engine.params import RepetitionDetection, Speculation
from engine.speculation.proposer import NOTHING, DraftTokens, Proposer
from engine.structured_output.layout import Constrained, Layout
from engine.structured_output.spec import JsonSchema, Regex
from tests.tiny import byte_tokenizer

THINK, ANSWER, BEGIN, END = 258, 259, 260, 261  # tokens that switch modes; made likely where a layout has them
AT_ONCE = 12  # requests: beside many that begin, little is drafted
LIKELY = {BEGIN: 3.0, END: 3.0, THINK: 3.0, ANSWER: 3.0}
SCHEMA = JsonSchema.of(
    {
        "type": "object",
        "properties": {"a": {"enum": ["red", "green", "great"]}, "n": {"type": "integer"}, "s": {"type": "string"}},
        "required": ["a", "n", "s"],
        "additionalProperties": False,
    }
)
SECTIONS = Layout(begin=BEGIN, end=END, free=True, several=True, think=(THINK, ANSWER))
THOUGHT = Layout(think=(THINK, ANSWER), thinking=True)

Key = tuple[tuple[int, ...], int, int]  # a span: the tokens before it, its seed, its place in the fork tree
Spans = dict[Key, tuple[int, ...]]


class Recorder(Proposer):
    """Proposes nothing, and records what every span has written."""

    name = "planted"

    def __init__(self) -> None:
        self.spans: Spans = {}

    def propose(self, seq: SequenceState, budget: int) -> DraftTokens:
        return NOTHING

    def ended(self, seq: SequenceState, start: int) -> None:
        self.spans[_key(seq)] = tuple(seq.tokens[start:])


class Planted(Proposer):
    """Proposes what a span has written in another run, each token wrong with probability `wrong`."""

    name = "planted"

    def __init__(self, spans: Spans, wrong: float, seed: int = 0) -> None:
        self._spans, self._wrong, self._draw = spans, wrong, random.Random(seed)

    def propose(self, seq: SequenceState, budget: int) -> DraftTokens:
        assert isinstance(seq.job, SpanJob)
        known = self._spans.get(_key(seq), ())
        at = len(seq) - seq.job.prompt_tokens
        tokens = [
            self._draw.randrange(300) if self._draw.random() < self._wrong else token for token in known[at:][:budget]
        ]
        return DraftTokens(tuple(tokens), (0.9,) * len(tokens))


def _key(seq: SequenceState) -> Key:
    assert isinstance(seq.job, SpanJob)
    return tuple(seq.tokens[: seq.job.prompt_tokens]), seq.job.seed, seq.stream


@dataclass(frozen=True)
class Request:
    """A span on a prompt; then `forks` children go on, and one of them is cut to `keep` of its length."""

    prompt: list[int]
    span: Span
    forks: int = 0
    keep: float = 1.0


def many(few: int) -> int:
    """Returns how many requests a proposer is held to: `few`, or `PONDER_TEST_REQUESTS` for a longer run."""
    return int(os.environ.get("PONDER_TEST_REQUESTS", few))


def requests(count: int, seed: int = 7) -> list[Request]:
    draw = random.Random(seed)
    beginnings = [[draw.randrange(3, 256) for _ in range(60)] for _ in range(4)]
    made = []
    for index in range(count):
        sampling = draw.choice(
            (
                Sampling(temperature=0.0),
                Sampling(temperature=1.0),
                Sampling(temperature=0.7, top_p=0.9),
                Sampling(temperature=1.2, min_p=0.05),
                Sampling(temperature=0.9, top_k=5),
                Sampling(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5),
                Sampling(temperature=0.8, repetition_penalty=1.3),
                Sampling(temperature=0.6, frequency_penalty=-0.7, logit_bias={index % 250: 2.0}),
            )
        )
        more: dict[str, Any] = {}  # Any: fields of a span
        kind = draw.choice((None, None, SCHEMA, Regex("(abc|abd)+[0-9]{2,9}x"), SECTIONS, THOUGHT))
        if isinstance(kind, Layout):
            sampling = replace(sampling, logit_bias={**sampling.logit_bias, **LIKELY})
            more["constraint"] = Constrained(SCHEMA, kind)
        else:
            more["constraint"] = None if kind is None else Constrained(kind, Layout())
        more["logprobs"] = draw.choice((None, None, 0, 3))
        more["prompt_logprobs"] = draw.choice((None, None, 2))
        more["stop"] = draw.choice(((), (), ("a",), ("e", "zz"), ("\x01",)))
        more["stop_token_ids"] = draw.choice(((), tuple(draw.sample(range(3, 256), 6))))
        more["keep_stop_token"] = draw.random() < 0.3
        more["min_tokens"] = draw.choice((0, 0, 3, 9))
        more["repetition_detection"] = draw.choice((None, RepetitionDetection(4, min_count=3)))
        more["ignore_eos"] = more["constraint"] is None and draw.random() < 0.7
        more["max_tokens"] = draw.choice((9, 14, 40))
        span = Span(replace(sampling, seed=index), **more)
        prompt = draw.choice((*beginnings, []))[: draw.choice((3, 30, 60))] + [draw.randrange(3, 256) for _ in range(5)]
        made.append(Request(prompt, span, draw.choice((0, 0, 2)), draw.choice((1.0, 0.6))))
    return made


Answer = list[object]


async def answers(config: EngineConfig, asked: Sequence[Request], *proposers: Proposer) -> tuple[list[Answer], Any]:
    """Returns everything that the requests get, to the bit, and the engine's statistics."""
    gate = asyncio.Semaphore(AT_ONCE)
    async with await Engine.start(config, partial(build, proposers=proposers)) as engine:

        async def span(seq: Any, span: Span) -> object:  # Any: a sequence, of an engine with types of its own
            try:
                found = await seq.generate_all(span)
            except EngineError as error:
                return repr(error)
            logprobs = [(each.token_id, each.logprob, each.top) for each in found.logprobs]
            ended = found.finish_reason, found.stop_reason
            return found.token_ids, found.text, logprobs, found.prompt_logprobs, ended, found.sections

        async def one(request: Request) -> Answer:
            async with gate, await engine.open(request.prompt) as seq:
                got: Answer = [await span(seq, request.span)]
                kids = seq.fork(request.forks) if request.forks else []
                for at, kid in enumerate(kids):
                    if at == 0 and request.keep < 1:
                        kid.truncate(int(len(kid.tokens) * request.keep))
                free = replace(request.span, constraint=None, max_tokens=9)
                got += await asyncio.gather(*(span(kid, free) for kid in kids))
                return got

        found = await asyncio.gather(*(one(request) for request in asked))
        engine._core.check()
        stats = await engine.stats()
        assert stats.blocks_used == 0
        return list(found), stats


async def assert_same_answers(
    config: EngineConfig, asked: Sequence[Request], wrong: float
) -> tuple[SpeculationStats, Any]:
    """Asserts that all requests get the same with drafts of which a share is wrong as without any."""
    recorder = Recorder()
    plain, without = await answers(replace(config, speculation="planted"), asked, recorder)
    assert without.speculation.drafted == 0
    got, stats = await answers(replace(config, speculation="planted"), asked, Planted(recorder.spans, wrong))
    assert got == plain
    return stats.speculation, stats


@pytest.mark.slow
@pytest.mark.parametrize("loop", get_args(LoopName))
@pytest.mark.parametrize("wrong", [0.0, 0.3, 0.9])
async def test_tokens_are_those_of_a_run_without_drafts(wide_model: Path, loop: LoopName, wrong: float) -> None:
    config = EngineConfig(str(wide_model), loop=loop, deterministic=True, kv_blocks=400, threads=1)
    found, _ = await assert_same_answers(config, requests(40), wrong)
    assert found.drafted > 40
    assert found.accepted > (100 if wrong < 0.5 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("loop", get_args(LoopName))
@pytest.mark.parametrize("wrong", [0.0, 0.1, 0.5, 0.9])
async def test_a_thousand_requests_are_answered_alike(wide_model: Path, loop: LoopName, wrong: float) -> None:
    config = EngineConfig(str(wide_model), loop=loop, deterministic=True, kv_blocks=600, threads=1)
    found, _ = await assert_same_answers(config, requests(334, seed=int(100 * wrong)), wrong)
    assert found.accepted > 500 * (1 - wrong)


async def test_prompts_are_read_beside_drafts(wide_model: Path) -> None:
    """In chunks so small that the last of a prompt runs with others' drafts; its log-probabilities are asked for."""
    config = EngineConfig(str(wide_model), max_batch_tokens=20, deterministic=True, kv_blocks=400, threads=1)
    made = requests(20, seed=13)
    asked = [replace(each, span=replace(each.span, prompt_logprobs=at % 3)) for at, each in enumerate(made)]
    found, _ = await assert_same_answers(config, asked, 0.2)
    assert found.accepted > 0


async def test_a_span_below_its_min_tokens_may_end_in_a_section_but_not_in_text(wide_model: Path) -> None:
    """A draft that begins in free text and reaches into a section would be sampled as free text there."""
    config = EngineConfig(str(wide_model), deterministic=True, kv_blocks=400, threads=1)
    (quote,) = byte_tokenizer().encode('"').ids
    span = Span(
        Sampling(logit_bias={BEGIN: 5.0}), max_tokens=30, min_tokens=9, stop_token_ids=(quote,),
        constraint=Constrained(SCHEMA, SECTIONS),
    )  # fmt: skip
    asked = [Request([5, 6, 7 + at], replace(span, sampling=replace(span.sampling, seed=at))) for at in range(12)]
    recorder = Recorder()
    plain, _ = await answers(replace(config, speculation="planted"), asked, recorder)
    early = [tokens for tokens in recorder.spans.values() if BEGIN in tokens[2:] and len(tokens) < 9]
    assert len(early) > 3, "they end with the section's first quotation mark"
    got, _ = await answers(replace(config, speculation="planted"), asked, Planted(recorder.spans, 0.0))
    assert got == plain


async def test_preempted_sequences_are_drafted_for_again(wide_model: Path) -> None:
    config = EngineConfig(
        str(wide_model), block_size=4, kv_blocks=60, deterministic=True, threads=1, prefix_cache=False
    )
    asked = [replace(each, span=replace(each.span, max_tokens=40)) for each in requests(12, seed=3)]
    found, stats = await assert_same_answers(config, asked, 0.2)
    assert stats.preemptions > 0
    assert found.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "random_model",
        "random_hybrid",
        "random_mixture",
        "random_latent",
        "random_recurrent",
        "random_mamba",
        "random_beside",
        "random_windows",
    ],
)
async def test_every_kind_of_model_takes_its_drafts_back(model: str, request: pytest.FixtureRequest) -> None:
    config = EngineConfig(str(request.getfixturevalue(model)), dtype="float32", deterministic=True, kv_blocks=400)
    found, _ = await assert_same_answers(config, requests(8, seed=5), 0.4)
    assert 0 < found.accepted < found.drafted


@pytest.mark.parametrize("proposer", ["suffix", "ngram"])
async def test_looked_up_drafts_change_nothing(wide_model: Path, proposer: str) -> None:
    config = EngineConfig(str(wide_model), deterministic=True, kv_blocks=400, threads=1)
    asked = requests(many(25), seed=11)
    asked = [replace(each, prompt=each.prompt * 3) for each in asked]  # texts that repeat, so that something is found
    plain, _ = await answers(config, asked, Recorder())
    got, stats = await answers(replace(config, speculation=proposer), asked, Recorder())
    assert got == plain
    assert stats.speculation.drafted > 0


async def test_a_span_may_ask_for_drafts_or_refuse_them(wide_model: Path) -> None:
    config = EngineConfig(str(wide_model), deterministic=True, kv_blocks=400, threads=1, speculation="planted")
    asked = requests(6)
    recorder = Recorder()
    await answers(config, asked, recorder)

    def wishing(wish: Speculation | None) -> list[Request]:
        return [replace(each, span=replace(each.span, speculation=wish)) for each in asked]

    planted = Planted(recorder.spans, 0.0)
    _, off = await answers(config, wishing(Speculation("off")), planted)
    assert off.speculation.drafted == 0
    _, two = await answers(config, wishing(Speculation("planted", max_tokens=2)), planted)
    assert two.speculation.drafted_at[1] > 0
    assert not any(two.speculation.drafted_at[2:])
    _, on = await answers(replace(config, speculation="off"), wishing(Speculation("planted")), planted)
    assert on.speculation.drafted > 0
