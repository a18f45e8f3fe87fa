"""Adapters of an engine: rows of many in one batch, their caches, forks, snapshots, drafts, loads and unloads."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from safetensors.torch import load_file

from engine import GREEDY, Engine, EngineConfig, InvalidParameter, Sampling, Span
from engine.builder import build
from engine.config import Fallback, LoopName
from engine.errors import BadSnapshot, SequenceClosed
from engine.ipc.supervisor import SupervisedLink
from engine.kernels import cpu
from engine.model.adapters.peft_checkpoint import CONFIG, WEIGHTS
from engine.model.memory import needs_of
from engine.outputs import Stats
from engine.structured_output.spec import Regex
from tests.engine.ipc.test_joined_engine import Places
from tests.engine.speculation.test_same_tokens import Planted
from tests.engine.speculation.test_trees import PlantedTrees
from tests.lora import ALL, write_adapter

pytestmark = pytest.mark.slow

PROMPT = [(i * i * 7 + i) % 300 + 3 for i in range(50)]
SPAN = Span(GREEDY, max_tokens=12, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def adapters(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _written(random_model, tmp_path_factory.mktemp("adapters"), 3)


def _written(model: Path, path: Path, count: int) -> dict[str, str]:
    names = [f"a{i}" for i in range(count)]
    for i, name in enumerate(names):
        targets = ALL if i % 2 else ("q_proj", "v_proj")
        write_adapter(path / name, model, rank=1 + i % 5, alpha=1 + i, seed=i, targets=targets)
    return {name: str(path / name) for name in names}


def config(model: Path, adapters: dict[str, str], **more: Any) -> EngineConfig:  # Any: fields of EngineConfig
    settings = {"kv_blocks": 200, "threads": 1, "dtype": "float32", **more}
    return EngineConfig(str(model), adapters=tuple(adapters.items()), **settings)


@pytest.fixture(
    params=[
        *(("thread", loop, 1) for loop in get_args(LoopName) if loop != "auto"),
        ("process", "plain", 1),
        ("thread", "plain", 2),
    ]
)
async def engine(request: pytest.FixtureRequest, random_model: Path, adapters: dict[str, str]) -> AsyncIterator[Engine]:
    runs_in, loop, replicas = request.param
    more = {"runs_in": runs_in, "loop": loop, "data_parallel_size": replicas}
    async with await Engine.start(config(random_model, adapters, **more)) as engine:
        yield engine


async def tokens(engine: Engine, adapter: str | None, prompt: Sequence[int] = PROMPT, span: Span = SPAN) -> list[int]:
    async with await engine.open(prompt, adapter=adapter) as seq:
        return list((await seq.generate_all(span)).token_ids)


async def test_each_answers_as_itself_beside_the_others(engine: Engine) -> None:
    names = [None, "a0", "a1", "a2"]
    alone = [await tokens(engine, name) for name in names]
    assert len({tuple(each) for each in alone}) == len(names)  # each moves what is said
    assert await asyncio.gather(*(tokens(engine, name) for name in names)) == alone


async def test_a_prefix_is_never_shared_across_adapters(engine: Engine) -> None:
    async def cached(adapter: str | None, tenant: str = "") -> int:
        async with await engine.open(PROMPT, adapter=adapter, tenant=tenant) as seq:
            return (await seq.generate_all(SPAN)).cached_tokens

    assert await cached(None) == 0
    assert await cached("a0") == 0
    assert await cached("a1") == 0
    assert await cached("a0") > 0
    assert await cached(None) > 0
    assert await cached("a0", "other") == 0


async def test_forks_scores_and_appends_keep_the_adapter(engine: Engine) -> None:
    async with await engine.open(PROMPT, adapter="a1") as seq, await engine.open(PROMPT) as base:
        child = seq.fork()[0]
        assert child.adapter == "a1"
        assert list((await child.generate_all(SPAN)).token_ids) == await tokens(engine, "a1")
        scores = [(await each.score([[5, 6]]))[0] for each in (seq, base)]
        assert max(abs(a - b) for a, b in zip(*scores, strict=True)) > 1e-2
        seq.append([9, 8])
        assert list((await seq.generate_all(SPAN)).token_ids) == await tokens(engine, "a1", [*PROMPT, 9, 8])


async def test_a_constraint_holds_with_an_adapter(engine: Engine) -> None:
    from engine.structured_output.layout import Constrained

    span = Span(Sampling(seed=1), max_tokens=20, constraint=Constrained(Regex("[a-c]{4}")))
    async with await engine.open(PROMPT, adapter="a1") as seq:
        text = (await seq.generate_all(span)).text
    assert len(text) == 4 and set(text) <= set("abc")


async def test_a_warmed_prefix_is_the_adapters(engine: Engine) -> None:
    engine.warm(PROMPT, adapter="a2")
    while (await engine.stats()).warmed_tokens < 48:
        await asyncio.sleep(0.01)
    assert await tokens(engine, None)
    async with await engine.open(PROMPT, adapter="a2") as seq:
        assert (await seq.generate_all(SPAN)).cached_tokens == 48


async def test_names_that_are_not_loaded_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidParameter, match="'b', which is not loaded; accepted: a0, a1, a2"):
        await engine.open(PROMPT, adapter="b")
    with pytest.raises(InvalidParameter, match="not loaded"):
        engine.warm(PROMPT, adapter="b")
    with pytest.raises(InvalidParameter, match="not loaded"):
        await engine.unload_adapter("b")


async def test_one_is_loaded_and_unloaded_while_others_run(engine: Engine, adapters: dict[str, str]) -> None:
    alone = await tokens(engine, "a1")
    with pytest.raises(InvalidParameter, match="loaded already"):
        await engine.load_adapter("a1", adapters["a1"])
    with pytest.raises(InvalidParameter, match="there is no directory"):
        await engine.load_adapter("new", "/nowhere/at/all")
    long = Span(GREEDY, max_tokens=60, ignore_eos=True)
    async with await engine.open(PROMPT, adapter="a1") as seq:
        with seq.generate(long) as stream:
            first = await anext(stream)
            await engine.load_adapter("new", adapters["a1"])
            await engine.unload_adapter("a1")
            with pytest.raises(InvalidParameter, match="not loaded"):
                await engine.open(PROMPT, adapter="a1")
            with pytest.raises(InvalidParameter, match="once its last sequence closes"):
                await engine.load_adapter("a1", adapters["a1"])
            rest = [token async for piece in stream for token in piece.token_ids]
        assert [*first.token_ids, *rest][: len(alone)] == alone
        assert len(first.token_ids) + len(rest) == 60
    assert await tokens(engine, "new") == alone
    await engine.load_adapter("a1", adapters["a2"])  # its memory is free now, and the name is another one's
    assert await tokens(engine, "a1") == await tokens(engine, "a2")


async def test_a_name_with_other_files_has_no_prefix_of_the_first(engine: Engine, adapters: dict[str, str]) -> None:
    await tokens(engine, "a0")
    await engine.unload_adapter("a0")
    await engine.load_adapter("a0", adapters["a2"])
    assert await tokens(engine, "a0") == await tokens(engine, "a2")


async def test_more_are_known_than_are_resident(random_model: Path, tmp_path: Path) -> None:
    made = _written(random_model, tmp_path, 5)
    async with await Engine.start(config(random_model, made, max_adapters=5, deterministic=True)) as engine:
        alone = [await tokens(engine, name) for name in made]
    few = config(random_model, made, max_adapters=2, max_host_adapters=1, pinned_adapters=("a3",), deterministic=True)
    async with await Engine.start(few) as engine:
        assert await asyncio.gather(*(tokens(engine, name) for name in made)) == alone
        found = {each.name: each for each in (await engine.stats()).adapters}
        assert sum(each.resident for each in found.values()) == 2
        assert found["a3"].resident and not found["a3"].evictions
        assert sum(each.evictions for each in found.values()) >= 3
        await engine.load_adapter("more", made["a0"])
        assert await tokens(engine, "more") == alone[0]


async def test_adapters_and_kv_take_each_others_blocks(random_model: Path, tmp_path: Path) -> None:
    """In a pool in which not all of them have room, tokens are those of a large one, to the bit."""
    made, span = _written(random_model, tmp_path, 6), Span(GREEDY, max_tokens=30, ignore_eos=True, logprobs=1)
    names = [*made, None] * 2

    async def said(engine: Engine, name: str | None, at: int) -> object:
        async with await engine.open([*PROMPT[at:], *range(5, 40)], adapter=name) as seq:
            result = await seq.generate_all(span)
            return result.token_ids, result.logprobs

    async def all_said(kv_blocks: int) -> tuple[list[object], Stats]:
        settings = config(random_model, made, max_adapters=6, kv_blocks=kv_blocks, deterministic=True)
        async with await Engine.start(settings) as engine:
            found = await asyncio.gather(*(said(engine, name, at) for at, name in enumerate(names)))
            return found, await engine.stats()

    expected, large = await all_said(400)
    assert large.adapter_blocks_idle and not any(each.evictions for each in large.adapters)
    found, small = await all_said(large.adapter_blocks_idle + 6)
    assert found == expected
    assert any(each.evictions for each in small.adapters)
    assert small.blocks_total == small.blocks_cached + small.blocks_free + small.adapter_blocks_idle


async def test_an_adapter_that_the_pool_has_no_room_for_is_refused_by_its_name(
    random_model: Path, adapters: dict[str, str]
) -> None:
    async with await Engine.start(config(random_model, {"a0": adapters["a0"]})) as engine:
        stats = await engine.stats()
    small = {"a0": adapters["a0"]}
    needed = stats.adapter_blocks_idle
    over = config(random_model, small, kv_blocks=needed)
    said = rf"'a0' takes {needed} blocks \(.* MB\) of the K/V pool's {needed} blocks \(.* MB\)"
    with pytest.raises(InvalidParameter, match=said):
        await Engine.start(over)
    async with await Engine.start(config(random_model, small, kv_blocks=needed + 2)) as engine:
        assert engine.max_model_len == 32  # in the two blocks left
        assert await tokens(engine, "a0", PROMPT[:20])
        with pytest.raises(
            InvalidParameter, match="'a1' takes .* blocks .* of which a sequence of max_model_len takes 2"
        ):
            await engine.load_adapter("a1", adapters["a1"])
        assert "a1" not in engine.adapters
        assert await tokens(engine, "a0", PROMPT[:20])


def test_pinned_ones_leave_a_slot_for_the_others(random_model: Path, adapters: dict[str, str]) -> None:
    with pytest.raises(InvalidParameter, match="pinned_adapters is a0, a1; accepted: names of adapters, fewer"):
        config(random_model, adapters, max_adapters=2, pinned_adapters=("a0", "a1"))
    with pytest.raises(InvalidParameter, match="pinned_adapters is b"):
        config(random_model, adapters, pinned_adapters=("b",))


async def test_one_that_cannot_be_loaded_ends_the_start(random_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="'bad' cannot be loaded: there is no directory"):
        await Engine.start(config(random_model, {"bad": str(tmp_path / "no")}))


async def test_a_snapshot_goes_on_with_its_adapter_alone(random_model: Path, adapters: dict[str, str]) -> None:
    whole = Span(GREEDY, max_tokens=24, ignore_eos=True)
    async with await Engine.start(config(random_model, adapters)) as engine:
        expected = await tokens(engine, "a1", span=whole)
        async with await engine.open(PROMPT, adapter="a1") as seq:
            begun = (await seq.generate_all(SPAN)).token_ids
            data = await seq.snapshot()
    async with await Engine.start(config(random_model, {"a1": adapters["a1"]})) as engine:
        async with await engine.resume(data) as seq:
            assert seq.adapter == "a1"
            assert [*begun, *(await seq.generate_all(SPAN)).token_ids] == expected
        await engine.unload_adapter("a1")
        with pytest.raises(BadSnapshot, match="'a1', which is not loaded"):
            await engine.resume(data)
        await engine.load_adapter("a1", adapters["a2"])
        with pytest.raises(BadSnapshot, match="has other files now"):
            await engine.resume(data)


async def test_preempted_sequences_keep_theirs(random_model: Path, adapters: dict[str, str]) -> None:
    names, span = [None, "a0", "a1", "a2"] * 2, Span(GREEDY, max_tokens=40, ignore_eos=True)
    async with await Engine.start(config(random_model, adapters, prefix_cache=False)) as engine:
        alone = [await tokens(engine, name, span=span) for name in names]
        resident = (await engine.stats()).adapter_blocks_idle
    tight = config(random_model, adapters, prefix_cache=False, kv_blocks=16 + resident)
    async with await Engine.start(tight) as engine:
        assert await asyncio.gather(*(tokens(engine, name, span=span) for name in names)) == alone
        assert (await engine.stats()).preemptions


@pytest.mark.parametrize("planted", [Planted, PlantedTrees])
async def test_drafts_change_no_token(
    planted: type[Planted | PlantedTrees], random_model: Path, adapters: dict[str, str]
) -> None:
    """Drafted is what one adapter says: right for its own rows, and mostly wrong for others'."""
    names, span = (None, "a0", "a1"), Span(Sampling(temperature=0.0, seed=1), max_tokens=24, ignore_eos=True)
    settings = config(random_model, adapters, deterministic=True)
    async with await Engine.start(settings) as engine:
        plain = [await tokens(engine, name, span=span) for name in names]
    proposer = planted({(tuple(PROMPT), 1, 0): tuple(plain[2])}, wrong=0.0)
    drafting = replace(settings, speculation="planted")
    async with await Engine.start(drafting, partial(build, proposers=(proposer,))) as engine:
        assert await asyncio.gather(*(tokens(engine, name, span=span) for name in names)) == plain
        found = (await engine.stats()).speculation
    assert 0 < found.accepted < found.drafted


async def test_the_fallback_leaves_adapters_alone(random_model: Path, adapters: dict[str, str]) -> None:
    async with await Engine.start(config(random_model, adapters)) as engine:
        alone = await tokens(engine, "a1")
    fallback = Fallback(EngineConfig(str(random_model), kv_blocks=60, dtype="float32"), min_confidence=0.99)
    async with await Engine.start(config(random_model, adapters), fallback=fallback) as engine:
        assert await tokens(engine, "a1") == alone
        async with await engine.open(PROMPT, adapter="a1") as seq:
            with pytest.raises(InvalidParameter, match="fallback weights have no adapter 'a1'"):
                seq.generate(Span(GREEDY, max_tokens=3, min_confidence=0.5))


async def test_a_killed_process_comes_back_with_what_was_loaded(random_model: Path, adapters: dict[str, str]) -> None:
    some = {"a0": adapters["a0"], "a2": adapters["a2"]}
    span = Span(GREEDY, max_tokens=60, ignore_eos=True)
    async with await Engine.start(config(random_model, some, runs_in="process")) as engine:
        await engine.load_adapter("late", adapters["a1"])
        expected = {name: await tokens(engine, name, span=span) for name in ("a0", "late")}
        async with await engine.open(PROMPT, adapter="a0") as one, await engine.open(PROMPT, adapter="late") as two:
            streams = [one.generate(span), two.generate(span)]
            pieces = [[*(await anext(stream)).token_ids] for stream in streams]
            await engine.unload_adapter("a0")
            await engine.unload_adapter("late")
            assert isinstance(engine._link, SupervisedLink)
            os.kill(engine._link.pid, signal.SIGKILL)
            for stream, tokens_of in zip(streams, pieces, strict=True):
                tokens_of += [token async for piece in stream for token in piece.token_ids]
        assert pieces == list(expected.values())
        with pytest.raises(InvalidParameter, match="not loaded"):
            await engine.open(PROMPT, adapter="late")
        assert await tokens(engine, "a2")


async def test_a_client_that_joins_has_them(random_model: Path, adapters: dict[str, str]) -> None:
    """As an API worker does."""
    settings = config(random_model, adapters, runs_in="process")
    async with await Engine.start(settings) as engine:
        expected = [await tokens(engine, name) for name in (None, *adapters)]
        async with Places(engine).joined(settings, 1) as other:
            assert other.adapters == engine.adapters
            assert await asyncio.gather(*(tokens(other, name) for name in (None, *adapters))) == expected


async def test_a_sequence_whose_adapter_went_before_it_came_is_closed(
    random_model: Path, adapters: dict[str, str]
) -> None:
    """As another client's unload may have it."""
    async with await Engine.start(config(random_model, adapters)) as engine:
        await engine.unload_adapter("a0")
        engine.adapters["a0"] = "as it was"
        async with await engine.open(PROMPT, adapter="a0") as seq:
            with pytest.raises(SequenceClosed):
                await seq.generate_all(SPAN)


@pytest.mark.parametrize("numerics", ["float32", "native"])
async def test_32_adapters_in_one_batch_are_each_alone_to_the_bit(
    numerics: str, random_model: Path, wide_model: Path, tmp_path: Path
) -> None:
    if numerics == "native" and cpu.library() is None:
        pytest.skip("the kernels in C++ are not built here")
    model, dtype = (wide_model, "bfloat16") if numerics == "native" else (random_model, "float32")
    made = _written(model, tmp_path, 32)
    more = {"dtype": dtype, "deterministic": True, "max_adapters": 32, "kv_blocks": 400}

    async def answers(at_once: int) -> list[object]:
        gate = asyncio.Semaphore(at_once)
        async with await Engine.start(config(model, made, **more)) as engine:

            async def one(name: str | None) -> object:
                async with gate, await engine.open(PROMPT[:30], adapter=name) as seq:
                    result = await seq.generate_all(Span(Sampling(seed=1), max_tokens=4, logprobs=3, ignore_eos=True))
                    return result.token_ids, result.logprobs

            return await asyncio.gather(*(one(name) for name in (None, *made)))

    alone = await answers(1)
    assert await answers(40) == alone
    assert len({str(each) for each in alone}) == 33


async def test_others_go_on_while_one_is_read(random_model: Path, adapters: dict[str, str]) -> None:
    """A load that hangs holds up no step."""
    async with await Engine.start(config(random_model, adapters)) as engine:
        model = engine._core._adapters.cache._model
        assert model is not None
        read, go = model.read_adapter, asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(adapter: str, base: str = "") -> Any:  # Any: the model's own
            asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
            return read(adapter, base)

        model.read_adapter = slow  # type: ignore[method-assign]  # a disk that hangs
        loading = asyncio.create_task(engine.load_adapter("slow", adapters["a1"]))
        assert await tokens(engine, "a1")
        assert not loading.done()
        go.set()
        await loading
        assert await tokens(engine, "slow") == await tokens(engine, "a1")


def test_their_memory_is_counted(random_model: Path, adapters: dict[str, str]) -> None:
    base, some = (needs_of(config(random_model, each)).weights for each in ({}, {"a1": adapters["a1"]}))
    elements = sum(each.numel() for each in load_file(Path(adapters["a1"]) / WEIGHTS).values())
    assert some - base == elements * 8  # as read, and as run, both in float32


async def test_thousands_are_known(random_model: Path, tmp_path: Path) -> None:
    """Each has files of its own, and any of them answers as itself."""
    first = write_adapter(tmp_path / "first", random_model, rank=1, targets=("v_proj",), spread=1.0)
    fields = json.loads((first / CONFIG).read_text())
    made: dict[str, str] = {}
    for at in range(2000):
        path = tmp_path / str(at)
        path.mkdir()
        os.link(first / WEIGHTS, path / WEIGHTS)
        (path / CONFIG).write_text(json.dumps({**fields, "lora_alpha": 1 + at}))
        made[f"a{at}"] = str(path)
    async with await Engine.start(config(random_model, made, max_adapters=4)) as engine:
        assert len(engine.adapters) == len(set(engine.adapters.values())) == 2000
        some = ["a0", "a999", "a1999", "a5", "a70", "a1200"]
        together = await asyncio.gather(*(tokens(engine, name) for name in some))
        assert len({tuple(each) for each in together}) >= 3
        assert [await tokens(engine, name) for name in some] == together
        assert sum(each.resident for each in (await engine.stats()).adapters) == 4
        with pytest.raises(InvalidParameter, match=r"accepted: a0, a1, a10, .* and 1980 more"):
            await engine.open(PROMPT, adapter="none")
