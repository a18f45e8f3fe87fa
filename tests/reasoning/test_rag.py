"""RAG-Sequence against whole sums over `transformers`, and both strategies over documents."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import GREEDY, DeadlineExceeded, Engine, EngineConfig, InvalidParameter, Sampling, Span
from reasoning.rag import (
    RagOptions,
    RagSequenceOptions,
    answer_by_sequence,
    document_weights,
    rag_sequence,
    rag_token,
)
from reasoning.strategies import run_strategy
from reasoning.strategy import Context, ContextDocument
from reasoning.thinking import Markers, Piece
from tests.reasoning.test_strategies import at_deadlines

PROMPTS = [[5, 6, 7, 8, 9, 60, 61], [100 + at for at in range(45)], [30, 31, 200, 201, 202, 60, 61]]
SCORES = [0.4, 0.7, 0.5]
DOCUMENTS = tuple(ContextDocument(tuple(p), score) for p, score in zip(PROMPTS, SCORES, strict=True))
SPAN = Span(GREEDY, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.model import tiny
    from tests.tiny import byte_tokenizer

    path = tmp_path_factory.mktemp("models") / "random-qwen3"
    tiny.build("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
async def engine(checkpoint: Path) -> AsyncIterator[Engine]:
    async with await Engine.start(EngineConfig(str(checkpoint), dtype="float32", kv_blocks=256)) as engine:
        yield engine


@torch.inference_mode()
def logprob(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> float:
    rows = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
    return float(rows[torch.arange(len(answer)), torch.tensor(answer)].sum())


async def candidates(engine: Engine, weights: Sequence[float], span: Span = SPAN, **fields: Any) -> Any:
    forks = [await engine.open(prompt) for prompt in PROMPTS]
    found = await answer_by_sequence(forks, weights, span, fields.pop("stop_ids", ()), **fields)
    assert [fork.tokens for fork in forks] == PROMPTS
    for fork in forks:
        fork.close()
    return found


async def test_thorough_scores_are_sums_over_all_documents(engine: Engine, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    weights = document_weights(SCORES, 0.2)
    found = await candidates(engine, weights, thorough=True)
    assert len(found) == 3
    for answer in found:
        parts = [w * math.exp(logprob(model, p, answer.tokens)) for w, p in zip(weights, PROMPTS, strict=True)]
        assert answer.logprob == pytest.approx(math.log(math.fsum(parts)), abs=1e-4)
    assert found == sorted(found, key=lambda answer: -answer.logprob)


async def test_fast_scores_are_of_the_documents_that_wrote_the_answer(engine: Engine, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    weights = document_weights(SCORES, 0.2)
    for answer in await candidates(engine, weights, thorough=False):
        own = math.log(weights[answer.document]) + logprob(model, PROMPTS[answer.document], answer.tokens)
        assert answer.logprob == pytest.approx(own, abs=1e-4)


async def test_the_stop_token_counts(engine: Engine, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    whole = await candidates(engine, [0.2, 0.5, 0.3], thorough=True)
    stop = whole[0].tokens[3]
    found = await candidates(engine, [0.2, 0.5, 0.3], thorough=True, stop_ids=(stop,))
    ended = next(answer for answer in found if answer.ended)
    assert ended.tokens[-1] == stop
    parts = [w * math.exp(logprob(model, p, ended.tokens)) for w, p in zip([0.2, 0.5, 0.3], PROMPTS, strict=True)]
    assert ended.logprob == pytest.approx(math.log(math.fsum(parts)), abs=1e-4)


def test_weights_are_a_softmax_of_scores() -> None:
    expected = torch.tensor(SCORES, dtype=torch.float64).div(0.2).softmax(0).tolist()
    assert document_weights(SCORES, 0.2) == pytest.approx(expected)


async def test_a_weight_of_zero_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidParameter, match="weights"):
        await candidates(engine, [0.5, 0.0, 0.5], thorough=True)


def context(engine: Engine, span: Span = SPAN, **fields: Any) -> Context:
    return Context(engine.tokenizer, span, None, **{"documents": DOCUMENTS, **fields})


async def turn(engine: Engine, chosen: Any, ctx: Context, options: Any) -> list[int]:
    """The tokens that the strategy leaves in the sequence."""
    prompt = [5, 6, 7, 90, 91]
    async with await engine.open(prompt) as seq:
        items = [item async for item in run_strategy(chosen, seq, ctx, options)]
        assert isinstance(items[-1], Piece) and items[-1].finish_reason is not None
        assert (await engine.stats()).sequences == 1, "a fork is still there"
        return seq.tokens[len(prompt) :]


async def test_the_strategy_writes_what_a_mixture_of_the_documents_writes(engine: Engine) -> None:
    written = await turn(engine, rag_token, context(engine), RagOptions(k=2, temperature=0.3))
    leader, other = await engine.open(PROMPTS[1]), await engine.open(PROMPTS[2])
    stream = leader.generate_mixed([other], document_weights([0.7, 0.5], 0.3), SPAN)
    assert tuple(written) == (await stream.result()).token_ids


async def test_a_seed_gives_the_same_answer_again(engine: Engine) -> None:
    ctx = context(engine, Span(Sampling(seed=5), max_tokens=10, ignore_eos=True))
    assert await turn(engine, rag_token, ctx, RagOptions()) == await turn(engine, rag_token, ctx, RagOptions())


async def test_the_strategy_gives_the_likeliest_answer_over_documents(engine: Engine) -> None:
    best = (await candidates(engine, document_weights(SCORES, 0.1), thorough=True))[0]
    written = await turn(engine, rag_sequence, context(engine), RagSequenceOptions())
    assert tuple(written) == best.tokens


@pytest.mark.parametrize(("chosen", "options"), [(rag_token, RagOptions()), (rag_sequence, RagSequenceOptions())])
async def test_at_the_deadline_what_is_written_is_the_answer(engine: Engine, chosen: Any, options: Any) -> None:
    ctx, prompt = context(engine, Span(Sampling(seed=5), max_tokens=400, ignore_eos=True)), [5, 6, 7, 90, 91]
    ended = await at_deadlines(engine, prompt, chosen, ctx, options)
    assert all(pieces[-1].finish_reason in ("deadline", "length") for pieces, _ in ended)
    assert any(turn for _, turn in ended)


async def test_answers_that_were_not_begun_at_the_deadline_are_none(engine: Engine) -> None:
    forks = [await engine.open(prompt, deadline_s=0.01) for prompt in PROMPTS]
    await asyncio.sleep(0.05)
    with pytest.raises(DeadlineExceeded, match="No answer was begun"):
        await answer_by_sequence(forks, document_weights(SCORES, 0.1), SPAN, (), thorough=True)


@pytest.mark.parametrize(("chosen", "options"), [(rag_token, RagOptions()), (rag_sequence, RagSequenceOptions())])
async def test_without_documents_they_are_refused(engine: Engine, chosen: Any, options: Any) -> None:
    with pytest.raises(InvalidParameter, match="a run of a chat with collections"):
        await turn(engine, chosen, context(engine, documents=()), options)


async def test_thinking_is_refused(engine: Engine) -> None:
    ctx = Context(engine.tokenizer, SPAN, Markers(3, 4), opened=True, documents=DOCUMENTS)
    with pytest.raises(InvalidParameter, match="no thinking"):
        await turn(engine, rag_token, ctx, RagOptions())
