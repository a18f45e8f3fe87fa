"""Mixtures of sequences (RAG-Token) against the weighted sum of `transformers`' distributions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine import (
    GREEDY,
    Engine,
    EngineConfig,
    FollowerClosed,
    InvalidParameter,
    Sampling,
    SequenceBusy,
    SequenceClosed,
    Span,
    SpanResult,
)
from engine.config import LoopName
from engine.params import Speculation
from engine.structured_output import JsonSchema
from engine.structured_output.layout import Constrained

pytestmark = pytest.mark.slow

QUESTION = [60, 61, 62, 63]
DOCUMENTS = [[5, 6, 7, 8, 9], [100 + at for at in range(45)], [30, 31, 200, 201, 202, 203, 204, 33]]
PROMPTS = [document + QUESTION for document in DOCUMENTS]
WEIGHTS = [0.2, 0.5, 0.3]
SAMPLED = Span(Sampling(seed=11, temperature=0.9, top_p=0.95, frequency_penalty=0.3), max_tokens=24, ignore_eos=True)


def config_of(model: Path, loop: LoopName = "plain", **changed: Any) -> EngineConfig:  # Any: of different fields
    config = EngineConfig(str(model), dtype="float32", kv_blocks=96, max_batch_tokens=32, max_running=8, loop=loop)
    return replace(config, **changed)


@pytest.fixture(params=get_args(LoopName))
async def engine(random_model: Path, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    async with await Engine.start(config_of(random_model, request.param)) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(random_model: Path) -> Any:  # its annotations lack much
    return AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32)


@torch.inference_mode()
def mixed(oracle: Any, written: Sequence[int], prompts: Sequence[list[int]] = PROMPTS) -> Tensor:
    """Computes the mixture's probabilities after `written`, in double precision."""
    each = [oracle(torch.tensor([[*prompt, *written]])).logits[0, -1].double().softmax(-1) for prompt in prompts]
    return sum((w * p for w, p in zip(WEIGHTS, each, strict=True)), torch.zeros_like(each[0]))


async def mixture(
    engine: Engine, span: Span, weights: Sequence[float] = WEIGHTS, prompts: Sequence[list[int]] = PROMPTS
) -> SpanResult:
    leader, *others = [await engine.open(prompt) for prompt in prompts]
    try:
        result = await leader.generate_mixed(others, weights, span).result()
        for seq, prompt in zip([leader, *others], prompts, strict=True):
            assert seq.tokens == [*prompt, *result.token_ids]
        return result
    finally:
        for seq in (leader, *others):
            seq.close()


async def test_each_step_is_the_weighted_sum_of_the_distributions(engine: Engine, oracle: Any) -> None:
    result = await mixture(engine, Span(GREEDY, max_tokens=16, ignore_eos=True, logprobs=20))
    for at, found in enumerate(result.logprobs):
        expected = mixed(oracle, result.token_ids[:at])
        assert found.token_id == int(expected.argmax())
        for token, logprob in found.top:
            assert logprob == pytest.approx(float(expected[token].log()), abs=1e-4)


async def test_weights_are_divided_by_their_sum(engine: Engine) -> None:
    span = Span(GREEDY, max_tokens=8, ignore_eos=True, logprobs=3)
    shares = await mixture(engine, span)
    parts = await mixture(engine, span, [2e-300, 5e-300, 3e-300])
    assert parts.token_ids == shares.token_ids
    assert [each.logprob for each in parts.logprobs] == pytest.approx([e.logprob for e in shares.logprobs], abs=1e-5)


async def test_a_mixture_of_one_is_a_span_like_any_other(engine: Engine) -> None:
    async with await engine.open(PROMPTS[0]) as alone, await engine.open(PROMPTS[0]) as seq:
        expected = await alone.generate_all(SAMPLED)
        assert (await seq.generate_mixed([], [0.25], SAMPLED).result()).token_ids == expected.token_ids


async def test_a_mixture_of_equal_prompts_is_what_one_of_them_writes(engine: Engine) -> None:
    span = Span(GREEDY, max_tokens=12, ignore_eos=True)
    async with await engine.open(PROMPTS[1]) as alone:
        expected = await alone.generate_all(span)
    assert (await mixture(engine, span, prompts=[PROMPTS[1]] * 3)).token_ids == expected.token_ids


async def test_company_and_loop_do_not_change_sampled_tokens(random_model: Path) -> None:
    written = set()
    for loop in get_args(LoopName):
        async with await Engine.start(config_of(random_model, loop)) as engine:
            written.add((await mixture(engine, SAMPLED)).token_ids)
            others = [await engine.open([40 + at] * (at + 3)) for at in range(5)]
            span = Span(Sampling(), max_tokens=40, ignore_eos=True)
            results = await asyncio.gather(
                mixture(engine, SAMPLED), mixture(engine, SAMPLED), *(seq.generate_all(span) for seq in others)
            )
            written.update(each.token_ids for each in results[:2])
    assert len(written) == 1


@pytest.mark.parametrize("changed", [{"kv_blocks": 9, "max_model_len": 128}, {"max_running": 1}])
async def test_members_that_do_not_run_side_by_side_write_the_same(random_model: Path, changed: dict[str, Any]) -> None:
    async with await Engine.start(config_of(random_model)) as engine:
        expected = (await mixture(engine, SAMPLED)).token_ids
    for loop in get_args(LoopName):
        async with await Engine.start(config_of(random_model, loop, **changed)) as engine:
            found = await asyncio.gather(mixture(engine, SAMPLED), mixture(engine, SAMPLED))
            assert [each.token_ids for each in found] == [expected, expected]
            assert (await engine.stats()).blocks_used == 0


async def test_a_preempted_member_writes_the_same(random_model: Path) -> None:
    span = replace(SAMPLED, max_tokens=80)
    async with await Engine.start(config_of(random_model)) as engine:
        expected = (await mixture(engine, span)).token_ids
    async with await Engine.start(config_of(random_model, kv_blocks=20)) as engine:
        alone = await engine.open([7] * 20)
        results = await asyncio.gather(
            mixture(engine, span), alone.generate_all(Span(GREEDY, max_tokens=150, ignore_eos=True))
        )
        assert (await engine.stats()).preemptions > 0
        assert results[0].token_ids == expected


async def test_a_constraint_holds_the_mixture(engine: Engine) -> None:
    constraint = Constrained(JsonSchema('{"type":"array","items":{"type":"integer"},"minItems":2,"maxItems":3}'))
    result = await mixture(engine, Span(Sampling(seed=3), max_tokens=60, constraint=constraint))
    assert result.text.startswith("[") and (result.text.endswith("]") or result.finish_reason == "length")


async def test_a_stop_string_ends_all_members(engine: Engine) -> None:
    span = Span(GREEDY, max_tokens=16, ignore_eos=True)
    whole = await mixture(engine, span)
    assert len(whole.text) > 4
    cut = await mixture(engine, replace(span, stop=(whole.text[2:4],)))
    assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(whole.text[2:4])]


async def test_members_go_on_alone_after_the_span(engine: Engine, oracle: Any) -> None:
    leader, *others = [await engine.open(prompt) for prompt in PROMPTS]
    await leader.generate_mixed(others, WEIGHTS, SAMPLED).result()
    for seq in (leader, *others):
        with torch.inference_mode():
            expected = int(oracle(torch.tensor([seq.tokens])).logits[0, -1].argmax())
        assert (await seq.generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True))).token_ids == (expected,)


async def test_members_are_busy_while_the_span_runs(engine: Engine) -> None:
    leader, other = await engine.open(PROMPTS[0]), await engine.open(PROMPTS[1])
    with leader.generate_mixed([other], [1, 1], SAMPLED), pytest.raises(SequenceBusy):
        other.append([5])
    other.append([5])


async def test_a_span_left_early_truncates_all_members(engine: Engine) -> None:
    leader, *others = [await engine.open(prompt) for prompt in PROMPTS]
    with leader.generate_mixed(others, WEIGHTS, SAMPLED) as stream:
        first = await anext(stream)
    again = await leader.generate_mixed(others, WEIGHTS, SAMPLED).result()
    whole = await mixture(engine, SAMPLED)
    for seq, prompt in zip([leader, *others], PROMPTS, strict=True):
        assert seq.tokens == [*prompt, *first.token_ids, *again.token_ids]
    assert first.token_ids == whole.token_ids[: len(first.token_ids)]


async def test_a_follower_that_closes_fails_the_span_and_no_one_else(engine: Engine) -> None:
    leader, *others = [await engine.open(prompt) for prompt in PROMPTS]
    stream = leader.generate_mixed(others, WEIGHTS, SAMPLED)
    pieces = [await anext(stream)]
    others[0].close()
    with pytest.raises(FollowerClosed, match="mixture"):
        while True:
            pieces.append(await anext(stream))
    written = [token for piece in pieces for token in piece.token_ids]
    assert leader.tokens == [*PROMPTS[0], *written] and others[1].tokens == [*PROMPTS[2], *written]
    rest = await leader.generate_mixed(others[1:], [1, 1], SAMPLED).result()
    assert others[1].tokens == [*PROMPTS[2], *written, *rest.token_ids]


async def test_a_leader_that_closes_frees_its_followers(engine: Engine, oracle: Any) -> None:
    leader, *others = [await engine.open(prompt) for prompt in PROMPTS]
    stream = leader.generate_mixed(others, WEIGHTS, SAMPLED)
    await anext(stream)
    leader.close()
    with pytest.raises(SequenceClosed):
        while True:
            await anext(stream)
    with torch.inference_mode():
        expected = int(oracle(torch.tensor([others[0].tokens])).logits[0, -1].argmax())
    found = await others[0].generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True))
    assert found.token_ids == (expected,)


async def test_a_scope_that_closes_ends_its_mixture(engine: Engine) -> None:
    root = await engine.open(PROMPTS[0])
    leader, other = root.fork(2)
    stream = leader.generate_mixed([other], [1, 2], SAMPLED)
    await anext(stream)
    root.close()
    with pytest.raises(SequenceClosed):
        while True:
            await anext(stream)
    assert (await engine.stats()).blocks_used == 0


async def test_a_sequence_closed_before_the_span_is_refused(engine: Engine) -> None:
    leader, other = await engine.open(PROMPTS[0]), await engine.open(PROMPTS[1])
    other.close()
    with pytest.raises(SequenceClosed):
        leader.generate_mixed([other], [1, 1], SAMPLED)


@pytest.mark.parametrize("weights", [[0.5, 0.0], [0.5, -1.0], [0.5], [0.5, float("nan")], [0.5, float("inf")]])
async def test_weights_that_are_no_shares_are_refused(engine: Engine, weights: list[float]) -> None:
    leader, other = await engine.open(PROMPTS[0]), await engine.open(PROMPTS[1])
    with pytest.raises(InvalidParameter, match="weights are"):
        leader.generate_mixed([other], weights, SAMPLED)


async def test_a_sequence_twice_is_refused(engine: Engine) -> None:
    leader = await engine.open(PROMPTS[0])
    with pytest.raises(InvalidParameter, match="twice"):
        leader.generate_mixed([leader], [1, 1], SAMPLED)


async def test_prompt_logprobs_are_refused(engine: Engine) -> None:
    leader, other = await engine.open(PROMPTS[0]), await engine.open(PROMPTS[1])
    with pytest.raises(InvalidParameter, match="prompt_logprobs"):
        leader.generate_mixed([other], [1, 1], replace(SAMPLED, prompt_logprobs=1))


async def test_a_proposer_of_drafts_is_refused(engine: Engine) -> None:
    leader, other = await engine.open(PROMPTS[0]), await engine.open(PROMPTS[1])
    with pytest.raises(InvalidParameter, match="'suffix', and a mixture verifies no drafts; accepted: auto, off"):
        leader.generate_mixed([other], [1, 1], replace(SAMPLED, speculation=Speculation("suffix")))


async def test_a_mixture_goes_on_after_the_process_died(random_model: Path) -> None:
    span = replace(SAMPLED, max_tokens=200)
    async with await Engine.start(config_of(random_model)) as engine:
        expected = (await mixture(engine, span)).token_ids
    async with await Engine.start(config_of(random_model, runs_in="process")) as engine:
        leader, *others = [await engine.open(prompt) for prompt in PROMPTS]
        stream = leader.generate_mixed(others, WEIGHTS, span)
        first = await anext(stream)
        engine._link._process.kill()  # type: ignore[attr-defined]  # a `SupervisedLink` has it
        rest = [token async for piece in stream for token in piece.token_ids]
        assert (*first.token_ids, *rest) == expected
        assert others[1].tokens == [*PROMPTS[2], *expected]
        assert len((await others[1].generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True))).token_ids) == 1
