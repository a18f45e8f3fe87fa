"""Engines that share a device: how its K/V memory is divided among them, and that each keeps its own CPU threads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import GREEDY, Engine, EngineConfig, InvalidParameter, Span
from engine.core.step import Step
from engine.families import family_of
from engine.model import memory
from engine.model.batch import KVCache
from engine.model.loader import read_json
from engine.model.memory import block_bytes, level, needs_of
from engine.model.runner import ModelRunner
from tests.tiny import write_checkpoint

TINY_BLOCK = 2 * 1 * 1 * 16 * 16 * 4  # keys and values x layers x heads x numbers x tokens x bytes
_Sizes = st.lists(st.integers(1, 100), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def larger(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose blocks are three times as large, with a quarter of the context. Nobody loads it."""
    path = write_checkpoint(tmp_path_factory.mktemp("larger") / "larger")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "max_position_embeddings": 512}))
    return path


def divided(configs: list[EngineConfig]) -> list[EngineConfig]:
    return memory.divided(configs, [needs_of(each) for each in configs])


def configs(*models: Path, **common: Any) -> list[EngineConfig]:
    return [EngineConfig(str(model), dtype="float32", device="cpu", **common) for model in models]


def test_one_engine_keeps_all_of_it(model: Path) -> None:
    (alone,) = divided(configs(model, kv_bytes=1 << 20))
    assert alone.kv_bytes == 1 << 20 and alone.kv_blocks is None


def test_each_context_and_each_replica_has_all_weights(model: Path) -> None:
    (config,) = configs(model)
    one = needs_of(config)
    contexts = needs_of(replace(config, prefill_context_parallel_size=2))
    assert (contexts.weights, contexts.block, contexts.blocks) == (2 * one.weights, one.block, one.blocks)
    replicas = needs_of(replace(config, data_parallel_size=3))
    assert (replicas.weights, replicas.block, replicas.blocks) == (3 * one.weights, one.block, 3 * one.blocks)


def test_blocks_are_divided_equally(model: Path, larger: Path) -> None:
    assert [each.kv_blocks for each in divided(configs(model, larger, kv_blocks=101))] == [50, 50]


def test_bytes_are_divided_so_that_each_pool_holds_as_many_tokens(model: Path, larger: Path) -> None:
    shared = divided(configs(model, larger, kv_bytes=40 * TINY_BLOCK + 1))
    assert [each.kv_blocks for each in shared] == [10, 10]  # of 1 and 3 times the size
    assert all(each.kv_bytes is None for each in shared)


def test_free_memory_is_divided_once_the_weights_have_their_part(
    model: Path, larger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = sum(memory.weight_bytes(path, torch.float32) for path in (model, larger))
    monkeypatch.setattr(memory, "free_bytes", lambda device: weights + 4 * 400 * TINY_BLOCK)
    assert [each.kv_blocks for each in divided(configs(model, larger))] == [100, 100]
    # Four sequences of 512 tokens are 128 blocks: beyond them the one with the long context gets the rest.
    monkeypatch.setattr(memory, "free_bytes", lambda device: weights + 4 * 700 * TINY_BLOCK)
    assert [each.kv_blocks for each in divided(configs(model, larger, max_running=4))] == [316, 128]


@pytest.mark.parametrize(("field", "value"), [("kv_blocks", 1), ("kv_bytes", 4 * TINY_BLOCK - 1)])
def test_too_little_for_all_is_refused_with_what_would_do(model: Path, larger: Path, field: str, value: int) -> None:
    with pytest.raises(InvalidParameter, match=rf"{field} is {value}; accepted: at least"):
        divided(configs(model, larger, **{field: value}))
    divided(configs(model, larger, **{field: value + 1}))


@given(data=st.data(), total=st.integers(0, 10_000), sizes=_Sizes)
def test_nothing_is_given_twice_and_nothing_useful_is_left(data: st.DataObject, total: int, sizes: list[int]) -> None:
    most = data.draw(st.lists(st.integers(1, 100), min_size=len(sizes), max_size=len(sizes)))
    blocks = level(total, sizes, most)
    assert all(0 <= got <= wanted for got, wanted in zip(blocks, most, strict=True))
    left = total - sum(got * size for got, size in zip(blocks, sizes, strict=True))
    wanting = [at for at in range(len(sizes)) if blocks[at] < most[at]]
    assert left >= 0 and (not wanting or left < sum(sizes[at] for at in wanting))
    assert len({blocks[at] for at in wanting}) <= 1  # those that want more get equal numbers
    assert not wanting or max(blocks) == blocks[wanting[0]]


async def test_each_engine_computes_on_its_own_threads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: dict[int, int] = {}
    run = ModelRunner.run

    def noted(self: ModelRunner, step: Step) -> torch.Tensor:
        if isinstance(self._kv, KVCache):  # a server of other tests may step in this process, too
            used[self._kv.data.shape[2]] = torch.get_num_threads()
        return run(self, step)

    monkeypatch.setattr(ModelRunner, "run", noted)
    pools = {30: 1, 40: 2, 50: 3}  # blocks -> threads
    settings = [config for each, n in pools.items() for config in configs(model, kv_blocks=each, threads=n)]
    engines = [await Engine.start(config) for config in settings]
    for engine in engines:  # only now: the last model must not decide for all
        async with engine, await engine.open([1]) as seq:
            await seq.generate_all(Span(GREEDY, 1))
    assert {blocks: used.get(blocks + 1) for blocks in pools} == pools


def test_a_block_has_what_a_convolution_mixes(random_hybrid: Path) -> None:
    config = read_json(random_hybrid / "config.json")
    spec = family_of(config).spec(config)
    expected = 16 * 4 * (2 * 2 * spec.kv_heads * spec.head_dim + 3 * spec.hidden_size)  # two attend, three convolve
    assert block_bytes(spec, 16, torch.float32) == expected
    assert KVCache.of(spec, 3, 16, torch.float32, "cpu").block_nbytes == expected


def test_a_block_is_keys_and_values_of_all_layers(model: Path) -> None:
    config = read_json(model / "config.json")
    assert block_bytes(family_of(config).spec(config), 16, torch.float32) == TINY_BLOCK


async def refused(config: EngineConfig) -> str:
    with pytest.raises(InvalidParameter, match="GB of memory are free") as caught:
        await Engine.start(config)
    return str(caught.value)


@pytest.fixture(scope="module")
def huge(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are a file of 80 GB in float32, of which nothing is written. Nobody can load it."""
    path = write_checkpoint(tmp_path_factory.mktemp("huge") / "huge")
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(80 * 10**9)
    return path


@pytest.mark.parametrize(
    ("free", "settings", "accepted"),
    [
        (39, {"dtype": "bfloat16"}, "39.0 GB of memory are free; accepted: quantization int8 (20."),
        (15, {"dtype": "bfloat16"}, "accepted: quantization int4 (1"),
        (15, {"dtype": "bfloat16", "quantization": "int8"}, "20.0 GB in int8, and 15.0 GB of memory are free"),
        (50, {"dtype": "float32"}, "80.0 GB in float32, and 50.0 GB of memory are free; accepted: dtype bfloat16"),
        (4, {"dtype": "bfloat16"}, "accepted: models of up to 2.0 billion parameters in 16 bits, 4.0 in int8, 7"),
        (4, {"dtype": "bfloat16", "quantization": "int4"}, "accepted: models of up to 2.0 billion"),
        (
            50,
            {"dtype": "bfloat16", "prefill_context_parallel_size": 2},
            "80.0 GB in bfloat16, and 50.0 GB of memory are free; accepted: prefill_context_parallel_size 1 (40.",
        ),
    ],
)  # fmt: skip
async def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    huge: Path, free: int, settings: dict[str, Any], accepted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: free * 10**9)
    assert accepted in await refused(EngineConfig(str(huge), device="cpu", **settings))


async def test_weights_are_tried_where_free_memory_is_not_known(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1)
    assert "models of up to 0.0 billion" in await refused(EngineConfig(str(model), device="cpu"))
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "none")
    async with await Engine.start(EngineConfig(str(model), device="cpu", kv_blocks=4)):
        pass
