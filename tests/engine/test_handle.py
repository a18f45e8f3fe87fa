"""The sequence handle on a real (random, tiny) model: the guarantees for a strategy author."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from engine import (
    GREEDY,
    CheckpointError,
    ContextLengthExceeded,
    DeadlineExceeded,
    Engine,
    EngineConfig,
    EngineStopped,
    InvalidParameter,
    Prefill,
    QueueFull,
    RepetitionDetection,
    Sampling,
    SequenceBusy,
    SequenceClosed,
    Span,
)
from engine.config import LoopName
from tests.known_answers import shared

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]


@pytest.fixture(params=get_args(LoopName))
async def engine(random_model: Path, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    config = EngineConfig(
        str(random_model), dtype="float32", kv_blocks=64, max_batch_tokens=32, max_running=8, loop=request.param
    )
    async with await Engine.start(config) as engine:
        yield engine


def greedy(n: int) -> Span:
    return Span(GREEDY, max_tokens=n, ignore_eos=True)


async def blocks_used(engine: Engine) -> int:
    return (await engine.stats()).blocks_used


async def test_spans_continue_the_same_sequence(engine: Engine) -> None:
    async with await engine.open(PROMPT) as whole, await engine.open(PROMPT) as parts:
        expected = (await whole.generate_all(greedy(12))).token_ids
        first = await parts.generate_all(greedy(5))
        second = await parts.generate_all(greedy(7))
        assert first.token_ids + second.token_ids == expected
        assert parts.tokens == PROMPT + list(expected)
        assert second.prompt_tokens == len(PROMPT) + 5


async def test_a_long_sequence_tells_how_far_it_is_read(engine: Engine) -> None:
    prompt = [5 + at % 20 for at in range(100)]
    told: list[Prefill] = []
    async with await engine.open(prompt) as seq:
        seq.on_prefill = told.append
        result = await seq.generate_all(greedy(4))
        assert told == [Prefill(n, 100, 0) for n in (32, 64, 96)]
        seq.append(prompt[:50])
        await seq.generate_all(greedy(1))
        assert [each.processed for each in told[3:]] == [103 + 32] and told[-1].total == 154
        assert len(result.token_ids) == 4
    async with await engine.open([*prompt, 4]) as again:
        again.on_prefill = told.append
        await again.generate_all(greedy(1))
    assert len(told) == 4  # cached tokens are not read again


async def test_append_then_generate_equals_opening_with_all_of_it(engine: Engine) -> None:
    async with await engine.open(PROMPT) as grown, await engine.open([*PROMPT, 40, 41]) as opened:
        await grown.generate_all(greedy(3))
        grown.truncate(len(PROMPT))
        grown.append([40, 41])
        assert (await grown.generate_all(greedy(6))).token_ids == (await opened.generate_all(greedy(6))).token_ids


async def test_leaving_the_loop_cancels_and_keeps_what_was_yielded(engine: Engine) -> None:
    async with await engine.open(PROMPT) as seq, await engine.open(PROMPT) as other:
        async for _ in seq.generate(greedy(500)):
            if len(seq) == len(PROMPT) + 3:
                break
        rest = await seq.generate_all(greedy(4))
        assert rest.prompt_tokens == len(PROMPT) + 3
        assert seq.tokens == PROMPT + list((await other.generate_all(greedy(7))).token_ids)


async def test_forks_draw_differently_and_repeatably(engine: Engine) -> None:
    span = Span(Sampling(temperature=1.0, seed=11), max_tokens=8, ignore_eos=True)
    runs = []
    for _ in range(2):
        async with await engine.open(PROMPT) as root:
            results = await asyncio.gather(*(kid.generate_all(span) for kid in root.fork(4)))
            runs.append([r.token_ids for r in results])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 4


async def test_a_fork_lives_as_long_as_its_scope_which_may_be_empty(engine: Engine) -> None:
    async with await engine.open([]) as root:
        (child,) = root.fork()
        child.append(PROMPT)
        (grandchild,) = child.fork(scope=root)
        child.close()
        assert (await grandchild.generate_all(Span(GREEDY, max_tokens=2, ignore_eos=True))).token_ids
    with pytest.raises(SequenceClosed):
        grandchild.append([5])


async def test_a_seed_gives_the_same_output_in_any_company(engine: Engine) -> None:
    span = Span(Sampling(temperature=1.0, top_p=0.9, seed=5), max_tokens=12, ignore_eos=True)
    async with await engine.open(PROMPT) as alone:
        expected = (await alone.generate_all(span)).token_ids
    crowd = [await engine.open([30 + i] * (i + 1)) for i in range(5)]
    async with await engine.open(PROMPT) as seq:
        noise = [
            asyncio.create_task(s.generate_all(Span(Sampling(seed=i), max_tokens=20))) for i, s in enumerate(crowd)
        ]
        assert (await seq.generate_all(span)).token_ids == expected
        await asyncio.gather(*noise)


async def test_score_equals_prompt_logprobs_of_each_candidate(engine: Engine) -> None:
    candidates = [[40], [41], [42, 43, 44], [40, 50]]
    async with await engine.open(PROMPT) as seq:
        scores = await seq.score(candidates)
        assert seq.tokens == PROMPT
    for candidate, score in zip(candidates, scores, strict=True):
        async with await engine.open([*PROMPT, *candidate]) as whole:
            result = await whole.generate_all(Span(GREEDY, max_tokens=1, prompt_logprobs=0))
            assert result.prompt_logprobs is not None
            tail = result.prompt_logprobs[len(PROMPT) :]
            assert score == pytest.approx([lp.logprob for lp in tail if lp], abs=1e-4)


async def test_logprobs_of_generated_tokens_agree_with_prompt_logprobs(engine: Engine) -> None:
    async with await engine.open(PROMPT) as seq:
        result = await seq.generate_all(Span(GREEDY, max_tokens=6, ignore_eos=True, logprobs=2))
        again = await seq.generate_all(Span(GREEDY, max_tokens=1, prompt_logprobs=2))
        assert again.prompt_logprobs is not None and again.prompt_logprobs[0] is None
        for made, read in zip(result.logprobs, again.prompt_logprobs[len(PROMPT) :], strict=True):
            assert read is not None and made.token_id == read.token_id == made.top[0][0]
            assert made.logprob == pytest.approx(read.logprob, abs=1e-4)


async def test_closing_frees_blocks_and_ends_what_runs_on_descendants(engine: Engine) -> None:
    root = await engine.open(PROMPT)
    (kid,) = root.fork()
    task = asyncio.create_task(kid.generate_all(greedy(500)))
    while await blocks_used(engine) == 0:
        await asyncio.sleep(0)
    root.close()
    assert await blocks_used(engine) == 0
    with pytest.raises(SequenceClosed):
        await task
    with pytest.raises(SequenceClosed):
        kid.append([1])


async def test_cancelling_the_task_frees_the_sequence(engine: Engine) -> None:
    seq = await engine.open(PROMPT)
    task = asyncio.create_task(seq.generate_all(greedy(500)))
    while (await engine.stats()).generated_tokens == 0:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await engine.stats()).running == 0
    assert len((await seq.generate_all(greedy(2))).token_ids) == 2
    seq.close()


async def test_a_deadline_that_passes_between_spans_ends_the_next_one(engine: Engine) -> None:
    seq = await engine.open(PROMPT, deadline_s=0.02)
    child = seq.fork()[0]
    await asyncio.sleep(0.1)
    for late in (child, seq):
        result = await late.generate_all(greedy(2))
        assert (result.finish_reason, result.token_ids, result.prompt_tokens) == ("deadline", (), len(PROMPT))
        with pytest.raises(DeadlineExceeded):
            await late.score([[1]])
        assert late.past_deadline and not late.closed
    seq.close()
    assert seq.closed and child.closed


async def test_a_deadline_ends_the_span_and_keeps_the_tokens(engine: Engine) -> None:
    seq = await engine.open(PROMPT, deadline_s=0.02)
    result = await seq.generate_all(greedy(engine.max_model_len - len(PROMPT)))
    assert result.finish_reason == "deadline"
    assert await blocks_used(engine) == 0
    (child,) = seq.fork()
    for each in (seq, child):
        assert each.tokens == [*PROMPT, *result.token_ids]
        each.truncate(len(PROMPT))
        each.append([1])
        assert each.tokens == [*PROMPT, 1]
        assert (await each.generate_all(greedy(2))).finish_reason == "deadline"
    assert await blocks_used(engine) == 0
    seq.close()
    with pytest.raises(SequenceClosed):
        child.append([1])


async def test_two_spans_at_once_are_refused(engine: Engine) -> None:
    async with await engine.open(PROMPT) as seq:
        stream = seq.generate(greedy(500))
        for refused in (
            lambda: seq.generate(greedy(1)),
            lambda: seq.append([1]),
            lambda: seq.fork(),
            lambda: seq.truncate(1),
        ):
            with pytest.raises(SequenceBusy):
                refused()
        stream.close()
        seq.append([1])


async def test_what_can_never_fit_is_refused_at_once(engine: Engine) -> None:
    with pytest.raises(ContextLengthExceeded, match=str(engine.max_model_len)):
        await engine.open([1] * engine.max_model_len)
    async with await engine.open(PROMPT) as seq:
        with pytest.raises(ContextLengthExceeded, match="max_tokens is 5000"):
            seq.generate(greedy(5000))
        with pytest.raises(ContextLengthExceeded):
            seq.append([1] * engine.max_model_len)
        assert seq.tokens == PROMPT


async def test_without_max_tokens_a_span_runs_to_the_end_of_the_context(engine: Engine) -> None:
    async with await engine.open([1] * (engine.max_model_len - 6)) as seq:
        result = await seq.generate_all(Span(GREEDY, ignore_eos=True))
        assert (len(result.token_ids), result.finish_reason) == (6, "length")


async def test_bad_tokens_and_parameters_are_refused_by_name(engine: Engine) -> None:
    with pytest.raises(InvalidParameter, match="vocabulary"):
        await engine.open([engine.vocab_size])
    with pytest.raises(InvalidParameter, match="adapter"):
        await engine.open([1], adapter="a")
    for bad in (
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"logit_bias": {1: 101.0}},
        {"temperature": float("nan")},
    ):
        with pytest.raises(InvalidParameter, match=next(iter(bad))):
            Sampling(**bad)
    for bad_span in ({"max_tokens": 0}, {"min_tokens": -1}, {"stop": ("",)}, {"logprobs": 1000}):
        with pytest.raises(InvalidParameter, match=next(iter(bad_span))):
            Span(**bad_span)
    for bad_detection in ({"max_pattern_size": 0}, {"min_pattern_size": 5}, {"min_count": 1}):
        with pytest.raises(InvalidParameter, match=rf"repetition_detection\.{next(iter(bad_detection))} is"):
            RepetitionDetection(**{"max_pattern_size": 4, **bad_detection})
    for option in ({"ageing_s": 0.0}, {"kv_blocks": 0}, {"max_running": 0}, {"dtype": "int3"}):
        with pytest.raises(InvalidParameter, match=next(iter(option))):
            EngineConfig("model", **option)
    async with await engine.open([]) as empty:
        with pytest.raises(InvalidParameter, match="empty"):
            empty.generate(greedy(1))
    async with await engine.open(PROMPT) as seq:
        with pytest.raises(InvalidParameter, match="candidates"):
            await seq.score([[]])


async def test_stop_tokens_end_a_span_and_are_kept_only_on_request(engine: Engine) -> None:
    async with await engine.open(PROMPT) as seq:
        ids = (await seq.generate_all(greedy(6))).token_ids
        at = next(i for i, t in enumerate(ids) if t not in ids[:i] and i > 1)
        for keep in (False, True):
            seq.truncate(len(PROMPT))
            span = Span(GREEDY, max_tokens=20, stop_token_ids=(ids[at],), keep_stop_token=keep, ignore_eos=True)
            result = await seq.generate_all(span)
            assert (result.finish_reason, result.stop_reason) == ("stop", ids[at])
            assert result.token_ids == ids[: at + keep]
            assert seq.tokens == PROMPT + list(result.token_ids)


@pytest.mark.parametrize("min_tokens", [0, 9])
async def test_a_span_that_repeats_itself_ends(engine: Engine, min_tokens: int) -> None:
    loop = Sampling(temperature=0.0, logit_bias={65: 100.0})
    async with await engine.open([*PROMPT, *[65] * 20]) as seq:
        plain = Span(loop, max_tokens=12, ignore_eos=True, stop=("never",))
        assert (await seq.generate_all(plain)).finish_reason == "length"
        span = replace(plain, min_tokens=min_tokens, repetition_detection=RepetitionDetection(3, 1, 5))
        for part in (seq, seq.fork()[0]):
            before = len(part)
            result = await part.generate_all(span)
            count = max(5, min_tokens)
            assert (result.finish_reason, result.stop_reason) == ("repetition", None)
            assert (result.token_ids, result.text) == ((65,) * count, "b" * count)
            assert part.tokens[before:] == [65] * count


async def test_min_tokens_holds_off_stop_tokens(engine: Engine) -> None:
    async with await engine.open(PROMPT) as seq:
        first = (await seq.generate_all(greedy(1))).token_ids[0]
        seq.truncate(len(PROMPT))
        span = Span(GREEDY, max_tokens=8, min_tokens=4, stop_token_ids=(first,), ignore_eos=True)
        result = await seq.generate_all(span)
        assert len(result.token_ids) >= 4 and first not in result.token_ids[:4]


async def test_a_full_queue_is_said_so(random_model: Path) -> None:
    config = EngineConfig(str(random_model), dtype="float32", kv_blocks=64, max_running=1, max_waiting=1)
    async with await Engine.start(config) as engine:
        streams = [(await engine.open(PROMPT)).generate(greedy(400)) for _ in range(2)]
        with pytest.raises(QueueFull):
            await engine.open(PROMPT)
        for stream in streams:
            stream.close()
        async with await engine.open(PROMPT) as seq:
            assert len((await seq.generate_all(greedy(2))).token_ids) == 2


async def test_a_stopped_engine_says_so(random_model: Path) -> None:
    engine = await Engine.start(EngineConfig(str(random_model), dtype="float32", kv_blocks=64))
    seq = await engine.open(PROMPT)
    task = asyncio.create_task(seq.generate_all(greedy(500)))
    await asyncio.sleep(0)
    await engine.stop()
    await engine.stop()
    with pytest.raises((SequenceClosed, EngineStopped)):
        await task
    with pytest.raises(EngineStopped):
        await engine.stats()
    assert not engine.healthy


async def test_a_failing_core_fails_its_requests_and_says_why(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._core._steps.runner, "run", lambda step: 1 / 0)
    async with await engine.open(PROMPT) as seq:
        with pytest.raises(EngineStopped, match="ZeroDivisionError"):
            await seq.generate_all(greedy(3))
    assert not engine.healthy


async def test_an_absent_model_is_explained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        await Engine.start(EngineConfig(str(tmp_path)))


async def test_stories260k_continues_as_its_known_answer() -> None:
    model = shared("models/stories260K")
    expected = (model / "expected_greedy_200tok.txt").read_text(encoding="utf-8")
    async with await Engine.start(EngineConfig(str(model / "hf"), dtype="float32")) as engine:
        bos = engine.tokenizer.bos_token_id
        assert bos is not None
        async with await engine.open([bos]) as seq:
            pieces = [piece async for piece in seq.generate(Span(GREEDY, max_tokens=200))]
        assert "".join(p.text for p in pieces) == expected
        assert len(pieces) == 200
