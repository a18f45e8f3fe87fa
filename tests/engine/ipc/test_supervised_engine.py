"""An engine in a process of its own: the same answers, and the same again when the process is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import (
    GREEDY,
    CheckpointError,
    DeadlineExceeded,
    Engine,
    EngineConfig,
    EngineStopped,
    InvalidParameter,
    Sampling,
    Sequence,
    Span,
    SpanResult,
    TokenLogprob,
)
from engine.errors import EngineRestarting
from engine.ipc import core_process
from engine.ipc.supervisor import SupervisedLink
from engine.structured_output import JsonSchema
from engine.structured_output.layout import Constrained

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]
SCHEMA = Constrained(JsonSchema('{"type":"array","items":{"type":"integer"},"minItems":40,"maxItems":60}'))
SPANS = [
    Span(GREEDY, max_tokens=400, ignore_eos=True),
    Span(Sampling(seed=5), max_tokens=400, ignore_eos=True, stop=("never to be found",)),
    Span(
        Sampling(0.8, top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.2, seed=6), max_tokens=400, ignore_eos=True
    ),
    Span(Sampling(seed=7), max_tokens=300, constraint=SCHEMA),
    Span(Sampling(seed=8), max_tokens=400, ignore_eos=True, logprobs=2, prompt_logprobs=1),
]


@pytest.fixture
def config(random_model: Path) -> EngineConfig:
    return EngineConfig(str(random_model), dtype="float32", kv_blocks=256, max_batch_tokens=64, runs_in="process")


@pytest.fixture
async def engine(config: EngineConfig) -> AsyncIterator[Engine]:
    async with await Engine.start(config) as engine:
        yield engine


def link_of(engine: Engine) -> SupervisedLink:
    assert isinstance(engine._link, SupervisedLink)
    return engine._link


async def until(engine: Engine, state: str) -> None:
    while engine.state != state:
        assert engine.state != "stopped"
        await asyncio.sleep(0.005)


async def answers(engine: Engine, progress: asyncio.Queue[int] | None = None) -> list[SpanResult]:
    """One of each span, half of them on forks; `progress` hears of every piece."""

    async def one(seq: Sequence, span: Span) -> SpanResult:
        pieces = []
        with seq.generate(span) as stream:
            async for piece in stream:
                pieces.append(piece)
                if progress is not None:
                    progress.put_nowait(1)
        last = pieces[-1]
        assert last.finish_reason is not None
        return SpanResult(
            tuple(t for p in pieces for t in p.token_ids), "".join(p.text for p in pieces),
            tuple(lp for p in pieces for lp in p.logprobs), None, last.finish_reason, last.stop_reason,
            pieces[0].prompt_tokens, 0, (),
        )  # fmt: skip

    async with await engine.open(PROMPT) as root:
        await root.generate_all(Span(GREEDY, max_tokens=3, ignore_eos=True))
        await root.score([[1, 2], [3]])  # forks sample by the number of forks before them
        kids = root.fork(len(SPANS))
        done = await asyncio.gather(*(one(kid, span) for kid, span in zip(kids, SPANS, strict=True)))
        scores = await kids[0].score([[4, 5], [6]])
        assert all(score < 0 for each in scores for score in each)
        return done


def same(one: list[SpanResult], other: list[SpanResult]) -> None:
    """To the token; log-probabilities to rounding, which depends on the chunks of the prefill."""
    for a, b in zip(one, other, strict=True):
        assert replace(a, logprobs=()) == replace(b, logprobs=())
        assert [lp.token_id for lp in a.logprobs] == [lp.token_id for lp in b.logprobs]
        assert [lp.logprob for lp in a.logprobs] == pytest.approx([lp.logprob for lp in b.logprobs], abs=1e-3)


async def test_a_killed_process_is_started_again_and_all_streams_go_on_as_if_nothing_had_been(
    config: EngineConfig,
) -> None:
    async with await Engine.start(replace(config, runs_in="thread")) as undisturbed:
        expected = await answers(undisturbed)
    async with await Engine.start(config) as engine:
        link, pids = link_of(engine), []
        same(await answers(engine), expected)
        progress: asyncio.Queue[int] = asyncio.Queue()
        asked = asyncio.create_task(answers(engine, progress))
        for pieces in (1, 150, 613):  # at the beginning, and somewhere in the middle
            for _ in range(pieces):
                await progress.get()
            pids.append(link.pid)
            os.kill(link.pid, signal.SIGKILL)
            await until(engine, "restarting")
            with pytest.raises(EngineRestarting):
                await engine.stats()
            late = await engine.open(PROMPT)  # commands meanwhile wait
            first = asyncio.create_task(late.generate_all(Span(GREEDY, max_tokens=2, ignore_eos=True)))
            await until(engine, "running")
            assert len((await first).token_ids) == 2
            late.close()
        same(await asked, expected)
        stats = await engine.stats()
        assert (stats.sequences, stats.blocks_used, len(link._journal)) == (0, 0, 0)
        pids.append(link.pid)
        directory = Path(link._process.directory)
        assert directory.stat().st_mode & 0o777 == 0o700 and list(directory.iterdir())
    assert len(set(pids)) == 4 and not any(map(psutil.pid_exists, pids))
    assert not directory.exists()


async def test_a_hung_process_is_killed_and_started_again(config: EngineConfig) -> None:
    async with await Engine.start(replace(config, hang_s=1.0)) as engine, await engine.open(PROMPT) as seq:
        expected = (await seq.generate_all(SPANS[1])).token_ids
        seq.truncate(len(PROMPT))
        hung = link_of(engine).pid
        os.kill(hung, signal.SIGSTOP)
        assert (await seq.generate_all(SPANS[1])).token_ids == expected
        assert link_of(engine).pid != hung and not psutil.pid_exists(hung)


async def test_a_process_that_dies_again_and_again_is_given_up(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_process, "MAX_DEATHS", 1)
    async with await Engine.start(config) as engine, await engine.open(PROMPT) as seq:
        stream = asyncio.create_task(seq.generate_all(SPANS[0]))
        for _ in range(2):
            await until(engine, "running")
            os.kill(link_of(engine).pid, signal.SIGKILL)
            await asyncio.wait({asyncio.create_task(engine._link._process._gone.wait())})  # type: ignore[attr-defined]
        with pytest.raises(EngineStopped, match="died 2 times in 60 s, the last time by signal 9"):
            await stream
        assert engine.state == "stopped"
        with pytest.raises(EngineStopped):
            await engine.open(PROMPT)
            await engine.stats()


async def test_constraints_are_compiled_in_the_process(engine: Engine) -> None:
    await engine.compile(SCHEMA.body)
    with pytest.raises(ValueError, match="nope"):
        await engine.compile(JsonSchema('{"type":"nope"}'))


async def test_a_model_that_is_not_there_is_explained_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(CheckpointError, match=r"config\.json"):
        await Engine.start(EngineConfig(str(tmp_path), runs_in="process"))
    with pytest.raises(InvalidParameter, match="runs_in is 'cloud'; accepted: thread, process"):
        EngineConfig(str(tmp_path), runs_in="cloud")  # type: ignore[arg-type]
    assert set(psutil.Process().children()) <= before


PEBBLE = Path(__file__).resolve().parents[3] / "models/pebble"


@pytest.mark.parametrize(
    ("options", "tokens"),  # the last computes a row at a time
    [({}, 260), ({"max_batch_tokens": 40}, 260), ({"kernels": "torch", "deterministic": True}, 80)],
    ids=["default", "short chunks", "deterministic"],
)
async def test_in_bfloat16_a_killed_engine_draws_the_same_tokens_on(options: dict[str, Any], tokens: int) -> None:
    """Its prompt and the answer so far are read in one go then, which were written token by token before. Where that
    gives other bits, log-probabilities differ long before tokens do."""
    config = EngineConfig(str(PEBBLE), dtype="bfloat16", kv_blocks=200, **options)
    spans = [Span(Sampling(1.0, seed=seed), max_tokens=tokens, logprobs=2, ignore_eos=True) for seed in range(4)]
    prompt = [(i * 37) % 4000 + 300 for i in range(50)]
    async with await Engine.start(config) as undisturbed:
        if not undisturbed.numerics.batch_invariant:
            pytest.skip("no kernels in C++ here: bfloat16 on torch is the same with deterministic alone")
        expected = []
        for span in spans:
            async with await undisturbed.open(prompt) as seq:
                expected.append(list((await seq.generate_all(span)).logprobs))
    all_there = asyncio.Barrier(len(spans) + 1)

    async def one(engine: Engine, span: Span) -> list[TokenLogprob]:
        found, waited = list[TokenLogprob](), False
        async with await engine.open(prompt) as seq:
            with seq.generate(span) as stream:
                async for piece in stream:
                    found += piece.logprobs
                    if len(found) >= tokens * 3 // 4 and not waited:
                        waited = True
                        await all_there.wait()
        return found

    async with await Engine.start(replace(config, runs_in="process")) as engine:
        answering = [asyncio.create_task(one(engine, span)) for span in spans]
        await all_there.wait()
        os.kill(link_of(engine).pid, signal.SIGKILL)
        assert await asyncio.gather(*answering) == expected


@pytest.mark.parametrize("replicas", [1, 2])
async def test_past_the_deadline_a_process_is_asked_for_nothing_more(config: EngineConfig, replicas: int) -> None:
    async with await Engine.start(replace(config, data_parallel_size=replicas)) as engine:
        seq = await engine.open(PROMPT, deadline_s=0.05)
        assert (await seq.generate_all(Span(max_tokens=600, ignore_eos=True))).finish_reason == "deadline"
        (child,) = seq.fork()
        seq.truncate(len(PROMPT))
        child.append([1])
        async with asyncio.timeout(20):
            for each in (seq, child):
                assert (await each.generate_all(Span(max_tokens=2))).finish_reason == "deadline"
                with pytest.raises(DeadlineExceeded):
                    await each.score([[1]])
            mixed = await seq.generate_mixed([child], [1.0, 1.0], Span(max_tokens=2)).result()
        assert (mixed.finish_reason, mixed.token_ids) == ("deadline", ())
        assert seq.tokens == PROMPT and child.tokens[-1] == 1
        seq.close()
        stats = await engine.stats()
        assert stats.sequences == stats.blocks_used == 0


async def test_an_engine_that_comes_back_with_other_numerics_says_so(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async with await Engine.start(config) as engine:
        link = link_of(engine)
        assert link._journal.numerics == engine.numerics
        link._journal.numerics = replace(engine.numerics, threads=77)
        os.kill(link.pid, signal.SIGKILL)
        await until(engine, "restarting")
        await until(engine, "running")
        assert link._journal.numerics == engine.numerics
    assert "computes otherwise now" in caplog.text and "threads was 77, is" in caplog.text
