"""The draft model: its own paged K/V, and samples that are the target's where the distributions are."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, InvalidParameter, Sampling, Span
from engine.speculation.draft_model import DraftModel
from tests.engine.model import tiny
from tests.engine.speculation.test_same_tokens import Recorder, answers, many, requests
from tests.tiny import byte_tokenizer


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model of half the layers, which agrees with nobody."""
    path = tmp_path_factory.mktemp("models") / "random-smaller"
    tiny.build("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, "num_hidden_layers": 1}).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("kernels", ["random_model", "wide_model"])
async def test_drafts_change_nothing(kernels: str, smaller: Path, request: pytest.FixtureRequest) -> None:
    target = str(request.getfixturevalue(kernels))
    config = EngineConfig(target, deterministic=True, kv_blocks=400, threads=1)
    asked = requests(many(20), seed=21)
    plain, _ = await answers(config, asked, Recorder())
    drafting = replace(config, speculation="draft", draft_model=str(smaller))
    got, stats = await answers(drafting, asked, Recorder())
    assert got == plain
    assert stats.speculation.drafted > 0


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=1.0), Sampling(top_p=0.8)])
async def test_the_same_distribution_gives_the_same_samples(random_model: Path, sampling: Sampling) -> None:
    """Its random numbers are keyed like the target's: of a draft model that is the target, every token is accepted."""
    config = EngineConfig(
        str(random_model), dtype="float32", deterministic=True, speculation="draft", draft_model=str(random_model)
    )
    span = Span(replace(sampling, seed=4), max_tokens=90, ignore_eos=True)
    async with await Engine.start(config) as engine, await engine.open(range(3, 50)) as seq:
        await seq.generate_all(span)
        found = (await engine.stats()).speculation
        assert found.accepted == found.drafted > 20


async def test_few_blocks_are_shared_by_taking_them_from_others(random_model: Path, smaller: Path) -> None:
    config = EngineConfig(
        str(random_model), dtype="float32", block_size=4, kv_blocks=100, speculation="draft", draft_model=str(smaller)
    )
    async with await Engine.start(config) as engine:
        speculator = engine._core._speculator
        draft = speculator._proposers["draft"]
        assert isinstance(draft, DraftModel)
        opened = [await engine.open([10 + at] * 30) for at in range(12)]  # 12 x 40 tokens, and K/V for 400
        for seq in opened:
            await seq.generate_all(Span(Sampling(temperature=0.0), max_tokens=10, ignore_eos=True))
            draft.check()
        assert 0 < len(draft._shadows) < len(opened)
        for seq in opened:
            seq.close()
        await engine.stats()
        assert not draft._shadows
        draft.check()
        assert draft._pool.used == 0


async def test_its_keys_and_values_take_half_of_the_targets_memory_at_most(random_model: Path, smaller: Path) -> None:
    """Half of the blocks where it is as large as the target, and all of them where it is much smaller."""
    for draft, layers in ((random_model, 3), (smaller, 1)):
        config = EngineConfig(str(random_model), dtype="float32", kv_blocks=100, draft_model=str(draft))
        async with await Engine.start(config) as engine:
            made = engine._core._speculator._proposers["draft"]
            assert isinstance(made, DraftModel)
            assert made._pool.total == min(100, 100 * 3 // 2 // layers)


@pytest.mark.parametrize("wrong", ["vocabulary", "states", "none"])
async def test_a_draft_model_that_does_not_fit_is_refused(
    wrong: str, random_model: Path, random_recurrent: Path, tmp_path: Path
) -> None:
    draft, accepted = str(random_recurrent), "recurrent layers"
    if wrong == "vocabulary":
        draft, accepted = str(tmp_path / "other"), "accepted: a model with"
        tiny.build("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, "vocab_size": 500}).save_pretrained(draft)
        shutil.copy(random_model / "tokenizer.json", draft)
    config = EngineConfig(str(random_model), dtype="float32", draft_model=draft)
    if wrong == "none":
        config, accepted = replace(config, draft_model=None, speculation="draft"), "come with draft_model"
    with pytest.raises(InvalidParameter, match=accepted):
        await Engine.start(config)
