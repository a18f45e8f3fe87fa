"""Fallback weights: where the first ones are not sure, the others go on as if they had written all of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine import GREEDY, Engine, EngineConfig, InvalidParameter, RepetitionDetection, Sampling, Span, SpanOutput
from engine import Sequence as Handle
from engine.config import Fallback
from engine.core.engine_core import EngineCore
from engine.errors import SequenceClosed
from engine.ipc.fallback_link import FallbackLink
from engine.ipc.supervisor import SupervisedLink
from engine.ipc.thread_link import ThreadLink
from engine.structured_output import JsonSchema
from engine.structured_output.layout import Constrained, Layout
from tests.engine.model import tiny
from tests.tiny import byte_tokenizer, write_checkpoint

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]
ARRAY = JsonSchema('{"type":"array","items":{"type":"integer"},"minItems":10,"maxItems":20}')
SPANS = {
    "greedy": Span(GREEDY, max_tokens=60, ignore_eos=True),
    "sampled": Span(Sampling(seed=5), max_tokens=60, ignore_eos=True, stop=("never to be found",)),
    "penalties": Span(
        Sampling(0.8, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.3, seed=6),
        max_tokens=60, ignore_eos=True,
    ),
    "schema": Span(Sampling(seed=7), max_tokens=90, constraint=Constrained(ARRAY)),
    "sections": Span(
        Sampling(seed=8), max_tokens=90, constraint=Constrained(ARRAY, Layout(begin=256, end=257, several=True))
    ),
    "log-probabilities": Span(Sampling(seed=9), max_tokens=40, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    "repetition": Span(GREEDY, max_tokens=60, ignore_eos=True, repetition_detection=RepetitionDetection(40, 1, 2)),
    "minimum": Span(Sampling(seed=3), max_tokens=60, min_tokens=50, stop=("a", "e", "\u0001")),
}  # fmt: skip


def config_of(model: Path, **changed: object) -> EngineConfig:
    return replace(EngineConfig(str(model), dtype="float32", kv_blocks=256, threads=1), **changed)  # type: ignore[arg-type]  # fields by name


@asynccontextmanager
async def started(config: EngineConfig, other: EngineConfig, confidence: float) -> AsyncIterator[Engine]:
    """An engine with fallback weights that has nothing left at its end."""
    async with await Engine.start(config, fallback=Fallback(other, confidence)) as engine:
        yield engine
        await engine.stats()  # closing is a command that the first core takes before
        for core in cores(engine):
            while core.stats().sequences:
                await asyncio.sleep(0.005)
            core.check()
            assert core.stats().blocks_used == 0


def cores(engine: Engine) -> list[EngineCore]:
    link = engine._link
    assert isinstance(link, FallbackLink)
    return [each.core for each in (link._first, link._fallback) if isinstance(each, ThreadLink)]


async def pieces_of(seq: Handle, span: Span) -> list[SpanOutput]:
    with seq.generate(span) as stream:
        return [piece async for piece in stream]


def joined(pieces: Sequence[SpanOutput]) -> tuple[object, ...]:
    """All that a client sees, whatever the pieces' borders: log-probabilities to 4 places, as chunks round them."""
    texts: dict[tuple[object, int], str] = {}
    for piece in pieces:
        texts[piece.kind, piece.section] = texts.get((piece.kind, piece.section), "") + piece.text
    logprobs = [(each.token_id, round(each.logprob, 3), len(each.top)) for piece in pieces for each in piece.logprobs]
    read = [None if each is None else each.token_id for each in pieces[0].prompt_logprobs or ()]
    tokens = [token for piece in pieces for token in piece.token_ids]
    end = pieces[-1].finish_reason, pieces[-1].stop_reason, pieces[0].prompt_tokens
    return tokens, {key: text for key, text in texts.items() if text}, logprobs, read, end


def before(pieces: Sequence[SpanOutput]) -> int:
    """Tokens of the first weights."""
    return sum(len(piece.token_ids) for piece in pieces if not piece.fallback)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same vocabulary."""
    path = tmp_path_factory.mktemp("models") / "other-qwen3"
    tiny.build("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}, seed=11).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["plain", "overlapped"])
async def test_a_hand_over_to_the_same_weights_is_not_seen(random_model: Path, loop: str) -> None:
    config = config_of(random_model, loop=loop)
    async with await Engine.start(config) as alone, await alone.open(PROMPT) as root:
        expected = await asyncio.gather(*map(pieces_of, root.fork(len(SPANS)), SPANS.values()))
    for confidence in (0.0, 0.036, 0.045, 1.0):
        async with started(config, config, confidence) as engine, await engine.open(PROMPT) as root:
            forks = root.fork(len(SPANS))
            made = await asyncio.gather(*map(pieces_of, forks, SPANS.values()))
            assert [joined(each) for each in made] == [joined(each) for each in expected]
            tokens = [before(each) for each in made]
            whole = [before(each) for each in expected]
            if confidence in (0.0, 1.0):
                assert tokens == (whole if confidence == 0.0 else [0] * len(made))
            else:
                assert any(0 < some < every for some, every in zip(tokens, whole, strict=True)), tokens
            assert [seq.tokens[len(PROMPT) :] for seq in forks] == [joined(each)[0] for each in made]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=4), Sampling(0.7, top_k=5, seed=1)])
async def test_the_other_weights_go_on_as_they_would_from_that_prefix(
    random_model: Path, other_model: Path, sampling: Sampling
) -> None:
    first, other = config_of(random_model), config_of(other_model)
    span = Span(sampling, max_tokens=50, ignore_eos=True)
    async with (
        started(first, other, 0.045) as engine,
        await engine.open(PROMPT) as seq,
        await Engine.start(other) as exact,
    ):
        pieces = await pieces_of(seq, span)
        count = before(pieces)
        assert 0 < count < 50
        async with await exact.open(seq.tokens[: len(PROMPT) + count]) as same:
            await same.generate_all(replace(span, max_tokens=50 - count))
            assert same.tokens == seq.tokens
        async with await engine.open(PROMPT) as again:
            assert joined(await pieces_of(again, span)) == joined(pieces)


async def test_the_first_unsure_token_is_the_fallbacks_own(random_model: Path, other_model: Path) -> None:
    span = Span(GREEDY, max_tokens=50, ignore_eos=True, logprobs=1)
    async with await Engine.start(config_of(random_model)) as alone, await alone.open(PROMPT) as seq:
        sure = [piece.logprobs[0].top[0][1] for piece in await pieces_of(seq, span)]
    for confidence in (0.032, 0.036, 0.045):
        unsure = next(at for at, each in enumerate(sure) if each < math.log(confidence))
        async with (
            started(config_of(random_model), config_of(other_model), confidence) as engine,
            await engine.open(PROMPT) as seq,
        ):
            assert before(await pieces_of(seq, replace(span, logprobs=None))) == unsure
            assert seq._deferred_at == len(PROMPT) + unsure


async def test_what_follows_on_the_sequence_is_the_fallbacks_until_it_is_cut_back(
    random_model: Path, other_model: Path
) -> None:
    span = Span(GREEDY, max_tokens=30, ignore_eos=True)
    async with (
        started(config_of(random_model), config_of(other_model), 0.045) as engine,
        await engine.open(PROMPT) as seq,
    ):
        count = before(await pieces_of(seq, span))
        assert 0 < count < 30
        seq.append([40, 41])
        (kid,) = seq.fork()
        for each in (seq, kid):
            assert before(await pieces_of(each, span)) == 0
        assert kid.tokens == seq.tokens
        assert before(await pieces_of(kid, replace(span, min_confidence=0.0))) == 30
        scores = await seq.score([[1, 2], [3]])
        kid.truncate(len(PROMPT) + count)
        seq.truncate(len(PROMPT) + count + 1)
        assert before(await pieces_of(seq, replace(span, max_tokens=5))) == 0
        kid.append([50])
        assert before(await pieces_of(kid, replace(span, min_confidence=1e-9))) == 30
        assert all(score < 0 for each in scores for score in each)


async def test_spans_of_several_sequences_in_turn_are_those_of_one_engine(random_model: Path) -> None:
    span = Span(GREEDY, max_tokens=23, ignore_eos=True, logprobs=0)

    async def in_turn(engine: Engine) -> list[tuple[object, ...]]:
        seqs = [await engine.open([*PROMPT, at]) for at in range(4)]
        made = []
        for turn in range(4):
            for seq in seqs if turn % 2 else reversed(seqs):
                made.append(joined(await pieces_of(seq, span)))
                seq.append([turn, 40, 41])
        for seq in seqs:
            seq.close()
        return made

    async with await Engine.start(config_of(random_model)) as alone:
        expected = [await in_turn(alone) for _ in range(2)]
    async with started(config_of(random_model), config_of(random_model), 0.045) as engine:
        assert [await in_turn(engine) for _ in range(2)] == expected


@pytest.mark.parametrize("end", ["leave", "close", "scope", "deadline"])
async def test_a_deferred_span_that_is_ended_leaves_nothing(random_model: Path, other_model: Path, end: str) -> None:
    span = Span(GREEDY, max_tokens=600, ignore_eos=True)
    async with started(config_of(random_model), config_of(other_model), 1.0) as engine:
        root = await engine.open(PROMPT, deadline_s=0.1 if end == "deadline" else None)
        (seq,) = root.fork() if end == "scope" else [root]
        stream = seq.generate(span)
        pieces = [await anext(stream) for _ in range(0 if end == "deadline" else 5)]
        assert all(piece.fallback for piece in pieces)
        match end:
            case "leave":
                stream.close()
                assert len(seq) == len(PROMPT) + 5
                more = await seq.generate_all(replace(span, max_tokens=3))
                assert more.prompt_tokens == len(PROMPT) + 5
            case "deadline":
                assert [piece async for piece in stream][-1].finish_reason == "deadline"
                async with asyncio.timeout(20):
                    assert (await seq.generate_all(replace(span, max_tokens=3))).finish_reason == "deadline"
                    assert (await seq.fork()[0].generate_all(replace(span, max_tokens=3))).finish_reason == "deadline"
            case _:
                (root if end == "scope" else seq).close()
                with pytest.raises(SequenceClosed):
                    _ = [piece async for piece in stream]
        root.close()


async def test_sequences_that_are_preempted_by_either_core_write_the_same(random_model: Path) -> None:
    config = config_of(random_model)
    prompts = [[at, *PROMPT] for at in range(6)]
    span = Span(Sampling(seed=2), max_tokens=100, ignore_eos=True)

    async def all_of(engine: Engine) -> list[list[int]]:
        seqs = [await engine.open(prompt) for prompt in prompts]
        await asyncio.gather(*(seq.generate_all(span) for seq in seqs))
        made = [seq.tokens for seq in seqs]
        for seq in seqs:
            seq.close()
        return made

    async with await Engine.start(config) as alone:
        expected = await all_of(alone)
    small, preemptions = replace(config, kv_blocks=30), [0, 0]  # 15 for each core: two of the sequences
    for confidence in (0.025, 0.034):  # most is decoded by the first core, and by the fallback
        async with started(small, small, confidence) as engine:
            assert await all_of(engine) == expected
            for at, core in enumerate(cores(engine)):
                preemptions[at] += core.stats().preemptions
    assert all(preemptions)


async def test_what_cannot_be_is_refused_by_name(random_model: Path, tmp_path: Path) -> None:
    config = config_of(random_model)
    with pytest.raises(InvalidParameter, match=r"min_confidence is 1.5; accepted: a probability, 0 to 1"):
        Fallback(config, 1.5)
    with pytest.raises(InvalidParameter, match=r"min_confidence is -1; accepted: None, or a probability"):
        Span(min_confidence=-1)
    one, other = write_checkpoint(tmp_path / "one"), write_checkpoint(tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace("<|ponder|>", "<|wonder|>"), encoding="utf-8")
    with pytest.raises(InvalidParameter, match="have other tokens than .*; accepted: a model of the same") as error:
        await Engine.start(config_of(one), fallback=Fallback(config_of(other)))
    assert error.value.name == "fallback"
    async with await Engine.start(config) as alone, await alone.open(PROMPT) as seq:
        with pytest.raises(InvalidParameter, match="the engine has no fallback weights; accepted: None"):
            seq.generate(Span(min_confidence=0.5))
        assert len((await seq.generate_all(Span(GREEDY, 3, min_confidence=0.0, ignore_eos=True))).token_ids) == 3
    async with started(config, config, 0.5) as engine, await engine.open(PROMPT) as seq:
        (second,) = seq.fork()
        with pytest.raises(InvalidParameter, match="a mixture is sampled by the first weights alone; accepted: None"):
            seq.generate_mixed([second], [1, 1], Span(GREEDY, 3, min_confidence=0.5))
        mixed = seq.generate_mixed([second], [1, 1], Span(GREEDY, 3, ignore_eos=True))
        assert before([piece async for piece in mixed]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["_first", "_fallback"])
async def test_a_killed_process_of_either_core_is_started_again(random_model: Path, killed: str) -> None:
    config = config_of(random_model)
    span = Span(Sampling(seed=5), max_tokens=400, ignore_eos=True)
    async with await Engine.start(config) as alone, await alone.open(PROMPT) as seq:
        await pieces_of(seq, span)
        expected = seq.tokens
    apart = replace(config, runs_in="process")
    async with await Engine.start(apart, fallback=Fallback(apart, 0.036)) as engine, await engine.open(PROMPT) as seq:
        link = engine._link
        assert isinstance(link, FallbackLink)
        supervised = getattr(link, killed)
        assert isinstance(supervised, SupervisedLink)
        count = 0
        async for piece in seq.generate(span):
            count += piece.fallback
            if count == 20:
                supervised._process.kill()
        assert seq.tokens == expected
        await seq.generate_all(replace(span, max_tokens=5))
