"""The value head: read after any sequence's last token, beside whatever else a step holds."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from engine import GREEDY, CheckpointError, Engine, EngineConfig, InvalidParameter, Sampling, Span
from engine.config import DType
from engine.core.output_processor import score_jobs
from engine.core.sampling_types import children_of
from engine.ipc.supervisor import SupervisedLink
from engine.model.value_head import VALUE_HEAD, ValueHead

Expected = Callable[[list[int]], float]


@pytest.fixture(scope="module", params=["torch", "native"])
def valued(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DType]:
    model: Path = request.getfixturevalue("wide_model" if request.param == "native" else "random_model")
    path = tmp_path_factory.mktemp("valued") / "model"
    shutil.copytree(model, path)
    size = AutoModelForCausalLM.from_pretrained(path).config.hidden_size
    draw = torch.Generator().manual_seed(2)
    ValueHead(torch.randn(size, generator=draw), torch.tensor(0.3)).save(path)
    return path, "bfloat16" if request.param == "native" else "float32"


@pytest.fixture
async def engine(valued: tuple[Path, DType]) -> AsyncIterator[Engine]:
    path, dtype = valued
    async with await Engine.start(EngineConfig(str(path), dtype=dtype, kv_blocks=400)) as engine:
        yield engine


@pytest.fixture
def expected(valued: tuple[Path, DType]) -> Expected:
    """Returns the value of token ids by transformers, float32."""
    path, _ = valued
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    head = ValueHead.read(path, model.config.hidden_size)
    assert head is not None

    @torch.inference_mode()
    def value(tokens: list[int]) -> float:
        state = model.model(torch.tensor([tokens])).last_hidden_state[0, -1]
        return float(torch.sigmoid(state @ head.weight + head.bias))

    return value


def near(engine: Engine, value: float) -> object:
    return pytest.approx(value, abs=1e-4 if engine.dtype == "float32" else 0.05)


async def test_values_are_those_of_the_last_state(engine: Engine, expected: Expected) -> None:
    prompts = [list(range(5 + at, 25 + 3 * at)) for at in range(6)]
    sequences = [await engine.open(prompt) for prompt in prompts]
    values = await asyncio.gather(*(each.value() for each in sequences))
    assert values == [near(engine, expected(prompt)) for prompt in prompts]
    assert max(values) - min(values) > 0.2 and all(0 < value < 1 for value in values)
    for each in sequences:
        each.close()


async def test_a_value_follows_what_happens_to_its_sequence(engine: Engine, expected: Expected) -> None:
    async with await engine.open(list(range(40))) as seq:
        await seq.generate_all(Span(Sampling(temperature=1.0, seed=3), max_tokens=9, ignore_eos=True))
        written = seq.tokens
        assert await seq.value() == near(engine, expected(written)) and seq.tokens == written
        first, second = seq.fork(2)
        first.append([7, 8, 9])
        seq.truncate(30)
        found = [await each.value() for each in (first, second, seq)]
        assert found == [near(engine, expected(each)) for each in ([*written, 7, 8, 9], written, written[:30])]


async def test_values_scores_and_spans_share_steps(engine: Engine, expected: Expected) -> None:
    prompt = list(range(50, 90))
    async with await engine.open(prompt) as writing, await engine.open(prompt[:20]) as other:
        alone = await writing.fork()[0].generate_all(Span(GREEDY, max_tokens=20, ignore_eos=True))
        scores = await other.score([[3], [4, 5]])
        asked = [asyncio.create_task(fork.value()) for fork in other.fork(8)]
        scored = asyncio.create_task(other.score([[3], [4, 5]]))
        written = await writing.generate_all(Span(GREEDY, max_tokens=20, ignore_eos=True))
        values, again = [await each for each in asked], await scored
        assert values == [near(engine, expected(prompt[:20]))] * 8
        assert written.token_ids == alone.token_ids
        assert [sum(each) for each in again] == pytest.approx([sum(each) for each in scores], abs=0.05)


async def test_a_cached_prompt_has_a_value_too(engine: Engine, expected: Expected) -> None:
    prompt = list(range(64))
    for _ in range(2):
        async with await engine.open(prompt) as seq:
            assert await seq.value() == near(engine, expected(prompt))


@pytest.mark.parametrize("candidates", [(), ((1,),), ((1,), (2,)), ((1, 2),), ((1, 2), (3,), (4, 5))])
def test_a_read_counts_as_the_fork_that_it_is(candidates: tuple[tuple[int, ...], ...]) -> None:
    assert children_of(candidates) == len(score_jobs(1, candidates, 9)[2])


@pytest.mark.slow
async def test_forks_after_a_value_sample_the_same_when_the_process_was_killed(valued: tuple[Path, DType]) -> None:
    path, dtype = valued
    span = Span(Sampling(temperature=1.0, seed=4), max_tokens=12, ignore_eos=True)
    config = EngineConfig(str(path), dtype=dtype, kv_blocks=400, runs_in="process")
    written = []
    for killed in (False, True):
        async with await Engine.start(config) as engine, await engine.open(list(range(40))) as seq:
            values = [await seq.value(), await seq.value()]
            if killed:
                assert isinstance(engine._link, SupervisedLink)
                os.kill(engine._link.pid, signal.SIGKILL)
            (fork,) = seq.fork()
            written.append((values, (await fork.generate_all(span)).token_ids, await seq.value()))
    assert written[0][1] == written[1][1]
    assert [*written[0][0], written[0][2]] == pytest.approx([*written[1][0], written[1][2]], abs=1e-3)


async def test_without_a_value_head_there_is_no_value(random_model: Path) -> None:
    async with await Engine.start(EngineConfig(str(random_model), dtype="float32", kv_blocks=64)) as engine:
        async with await engine.open([1, 2]) as seq:
            with pytest.raises(InvalidParameter, match="no value head"):
                await seq.value()
            assert len(await seq.score([[3]])) == 1
        assert not engine.value_head


async def test_a_model_with_a_head_of_another_shape_runs_without_one(
    random_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model"
    shutil.copytree(random_model, path)
    save_file({"summary.weight": torch.zeros(1, 3)}, path / VALUE_HEAD)
    async with await Engine.start(EngineConfig(str(path), dtype="float32", kv_blocks=64)) as engine:
        assert not engine.value_head
    assert "no value head is read" in caplog.text and "v_head.summary.weight" in caplog.text


@pytest.mark.parametrize("tensors", [{"v_head.summary.weight": torch.zeros(1, 3)}, {"weight": torch.zeros(3)}, None])
def test_a_head_of_another_shape_is_refused(tmp_path: Path, tensors: dict[str, torch.Tensor] | None) -> None:
    if tensors is None:
        (tmp_path / VALUE_HEAD).write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}")
    else:
        save_file(tensors, tmp_path / VALUE_HEAD)
    with pytest.raises(CheckpointError, match="accepted|whole"):
        ValueHead.read(tmp_path, 3)
