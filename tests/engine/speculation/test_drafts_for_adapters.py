"""Drafts for sequences with adapters: the base's, verified with the adapter, so that no token changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, Sampling, Span
from engine.core.request import NO_ADAPTER
from engine.core.step import Row
from engine.outputs import SpeculationStats
from engine.params import Speculation
from engine.speculation.draft_model import DraftModel
from engine.speculation.medusa import Medusa
from engine.speculation.proposer import DraftTokens
from engine.speculation.speculator import Speculator
from tests.engine.model import tiny
from tests.engine.speculation.test_medusa import heads
from tests.engine.speculation.test_mtp import checkpoint
from tests.engine.speculation.test_suffix import sequence
from tests.engine.speculation.test_trees import Fixed
from tests.lora import write_adapter
from tests.tiny import byte_tokenizer

PROMPT = [5, 9, 7, 11, 4] * 9 + [8]  # repeats itself, so that something is looked up
NAMES = (None, "a0", "a1")
SPANS = (
    Span(Sampling(temperature=0.0), max_tokens=30, ignore_eos=True, logprobs=1),
    Span(Sampling(temperature=0.8, frequency_penalty=-1.5, seed=3), max_tokens=30, ignore_eos=True, logprobs=1),
)
Answer = tuple[object, object]


@pytest.fixture(scope="module")
def adapters(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return written(wide_model, tmp_path_factory.mktemp("adapters"))


def written(model: Path, path: Path) -> dict[str, str]:
    return {name: str(write_adapter(path / name, model, seed=at, rank=2)) for at, name in enumerate(("a0", "a1", "a2"))}


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "random-smaller"
    tiny.build("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, "num_hidden_layers": 1}).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


def config(model: Path, adapters: dict[str, str], **more: Any) -> EngineConfig:  # Any: fields of EngineConfig
    settings = {"kv_blocks": 400, "threads": 1, "deterministic": True, "speculation": "off", **more}
    return EngineConfig(str(model), adapters=tuple(adapters.items()), **settings)


async def answer(engine: Engine, adapter: str | None, span: Span, tenant: str = "") -> Answer:
    async with await engine.open(PROMPT, adapter=adapter, tenant=tenant) as seq:
        found = await seq.generate_all(span)
        return found.token_ids, found.logprobs


async def answers(config: EngineConfig) -> tuple[list[Answer], list[Answer], SpeculationStats]:
    """Returns what one adapter says alone, then two and the base in one batch, by each kind of span."""
    async with await Engine.start(config) as engine:
        alone = [await answer(engine, "a1", span) for span in SPANS]
        asked = [answer(engine, name, span) for name in NAMES for span in SPANS]
        together = list(await asyncio.gather(*asked))
        engine._core.check()
        return alone, together, (await engine.stats()).speculation


async def hold(plain: EngineConfig, drafting: EngineConfig) -> SpeculationStats:
    """Asserts that drafts change no token and no log-probability of any."""
    alone, together, none = await answers(plain)
    assert not none.drafted and len({tokens for tokens, _ in together}) == len(together), "each moves the text"
    found = await answers(drafting)
    assert found[:2] == (alone, together)
    return found[2]


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["suffix", "ngram", "draft", "medusa", "auto"])
async def test_drafts_change_no_answer(
    proposer: str, wide_model: Path, smaller: Path, adapters: dict[str, str], tmp_path: Path
) -> None:
    plain = config(wide_model, adapters)
    of = {"draft": smaller, "auto": smaller, "medusa": tmp_path / "heads"}.get(proposer)
    if proposer == "medusa":
        heads(tmp_path / "heads", wide_model, 0.1)
    found = await hold(plain, replace(plain, speculation=proposer, draft_model=None if of is None else str(of)))
    assert found.drafted > 20


@pytest.mark.slow
async def test_drafts_of_the_checkpoints_own_layer_change_no_answer(tmp_path: Path) -> None:
    """Its K/V are those of the adapter's states, which lie in the adapter's own blocks."""
    checkpoint(tmp_path / "model")
    plain = config(tmp_path / "model", written(tmp_path / "model", tmp_path), dtype="float32")
    found = await hold(plain, replace(plain, speculation="mtp"))
    assert found.drafted > 20


async def test_a_draft_model_that_is_the_base_is_right_for_the_base_alone(
    wide_model: Path, adapters: dict[str, str]
) -> None:
    """So what it drafts for an adapter is computed without one."""
    settings = config(wide_model, adapters, speculation="draft", draft_model=str(wide_model))
    shares = []
    for name in (None, "a0"):
        async with await Engine.start(settings) as engine:
            await answer(engine, name, SPANS[0])
            found = (await engine.stats()).speculation
            shares.append(found.accepted / found.drafted)
    assert shares[0] == 1.0 > shares[1]


async def test_the_draft_models_cache_is_one_for_all_adapters_of_a_tenant(
    wide_model: Path, smaller: Path, adapters: dict[str, str]
) -> None:
    settings = config(wide_model, adapters, speculation="draft", draft_model=str(smaller), block_size=4)
    async with await Engine.start(settings) as engine:
        draft = engine._core._speculator._proposers["draft"]
        assert isinstance(draft, DraftModel)
        read: list[int] = []
        run = draft._runner.run

        def watched(step: Any) -> Any:
            read.append(sum(row.count for row in step.rows))
            return run(step)

        draft._runner.run = watched  # type: ignore[method-assign]
        reads = []
        for name, tenant in ((None, "x"), ("a0", "x"), ("a1", "x"), (None, "x"), ("a0", "y")):
            read.clear()
            await answer(engine, name, replace(SPANS[0], max_tokens=4, logprobs=None), tenant)
            reads.append(read[0])
        assert [each > len(PROMPT) - 4 for each in reads] == [True, False, False, False, True], reads
        draft.check()


async def test_heads_read_the_state_that_the_adapter_has_made(
    wide_model: Path, adapters: dict[str, str], tmp_path: Path
) -> None:
    """Heads that change nothing read the newest token itself from it: that which the adapter has sampled."""
    path = str(heads(tmp_path / "heads", wide_model, 0.0))
    settings = config(wide_model, adapters, speculation="medusa", draft_model=path)
    proposed: list[tuple[int, int]] = []
    async with await Engine.start(settings) as engine:
        medusa = engine._core._speculator._proposers["medusa"]
        assert isinstance(medusa, Medusa)
        whole = medusa.propose_all

        def recorded(asked: Any, min_confidence: float) -> Sequence[DraftTokens]:
            drafts = whole(asked, min_confidence)
            proposed.extend((seq.tokens[-1], draft.tokens[0]) for (seq, _), draft in zip(asked, drafts, strict=True))
            return drafts

        medusa.propose_all = recorded  # type: ignore[method-assign, assignment]
        span = Span(Sampling(temperature=0.0), max_tokens=12, ignore_eos=True)
        await asyncio.gather(*(answer(engine, name, span) for name in NAMES))
    assert len(proposed) > 9 and all(newest == draft for newest, draft in proposed)


@pytest.mark.parametrize("proposer", ["draft", "medusa", "suffix"])
async def test_one_is_unloaded_while_it_is_drafted_for(
    proposer: str, wide_model: Path, smaller: Path, adapters: dict[str, str], tmp_path: Path
) -> None:
    """And its name given to others, of which nothing of the first is drafted wrongly enough to change a token."""
    span = replace(SPANS[0], max_tokens=40, logprobs=None)
    async with await Engine.start(config(wide_model, adapters)) as engine:
        expected = [(await answer(engine, name, span))[0] for name in ("a0", "a1", None)]
    of = str(heads(tmp_path / "heads", wide_model, 0.1) if proposer == "medusa" else smaller)
    settings = config(wide_model, adapters, speculation=proposer, draft_model=None if proposer == "suffix" else of)
    async with await Engine.start(settings) as engine:
        beside = asyncio.create_task(answer(engine, None, span))
        async with await engine.open(PROMPT, adapter="a0") as seq:
            with seq.generate(span) as stream:
                said = list((await anext(stream)).token_ids)
                await engine.unload_adapter("a0")
                said += [token async for piece in stream for token in piece.token_ids]
        await engine.load_adapter("a0", adapters["a1"])
        again, base = (await answer(engine, "a0", span))[0], (await beside)[0]
        assert [tuple(said), again, base] == expected
        assert (await engine.stats()).speculation.drafted > 20
        engine._core.check()
        draft = engine._core._speculator._proposers.get("draft")
        if isinstance(draft, DraftModel):
            draft.check()
            assert not draft._shadows


async def test_a_request_with_an_adapter_may_name_a_proposer(
    wide_model: Path, smaller: Path, adapters: dict[str, str]
) -> None:
    async with await Engine.start(config(wide_model, adapters, draft_model=str(smaller))) as engine:
        plain = await answer(engine, "a0", SPANS[0])
        assert not (await engine.stats()).speculation.drafted
        assert await answer(engine, "a0", replace(SPANS[0], speculation=Speculation("draft"))) == plain
        assert (await engine.stats()).speculation.drafted


def test_drafts_that_fail_for_an_adapter_are_believed_as_before_for_others() -> None:
    speculator = Speculator([Fixed(DraftTokens((5, 6), (0.9, 0.9)))], ("fixed",), 2)

    def drafted(id: int, adapter: int, *, right: bool) -> None:
        seq = sequence([1, 2, 3, 4], id=id)
        seq.adapter, seq.cursor = adapter, 3
        seq.job.speculates, seq.job.produced = True, 1  # type: ignore[union-attr]  # a span's
        (tokens, _) = speculator.drafts([seq])[id]
        speculator.verified(Row(seq, 3, 1, 3, draft=tokens), [0, 1] if right else [], ended=False)

    for id in range(1, 30):
        drafted(2 * id, NO_ADAPTER, right=True)
        drafted(2 * id + 1, 4, right=False)

    def probability(adapter: int) -> float:
        return speculator._learnt["fixed", adapter].calibration.probability(0.9)

    assert probability(NO_ADAPTER) > 0.9 and probability(4) < 0.2
    assert speculator._learnt["fixed", NO_ADAPTER].likely > 0.9
    assert speculator._learnt["fixed", 4].likely < 0.5
