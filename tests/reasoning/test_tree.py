"""Trees of thoughts: what they share, what they may cost, what they tell, and that nothing is left of one that is left.

The scripted model grows trees of letters, which it can neither propose well nor judge.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from pydantic import ValidationError

from engine import Engine, EngineConfig, InvalidParameter
from engine import Sequence as EngineSequence
from engine.model.value_head import ValueHead
from reasoning.strategy import Event
from reasoning.tree import (
    NodeAdded,
    NodeChosen,
    NodeMerged,
    NodePruned,
    NodeScored,
    Reply,
    SearchEnded,
    Thought,
    TreeOptions,
    search,
)

pytestmark = pytest.mark.slow

LABELS = {"a": 1.0, "b": 0.5, "c": 0.0}


class Letters:
    """A state is a word; a step adds one of the letters that the model wrote. Only `wanted` is right."""

    stop: tuple[str, ...] = ()

    def __init__(self, engine: Engine, wanted: str = "", *, writes_on: bool = False, length: int = 4) -> None:
        self.start = ""
        self.wanted = wanted
        self.writes_on = writes_on
        self.length = length
        self._encode = engine.tokenizer.encode

    def propose_prompt(self, state: str) -> Sequence[int]:
        return () if self.writes_on else self._encode(f"{state}: next\n")

    def value_prompt(self, state: str) -> Sequence[int]:
        return self._encode(f"{state}: good\n")

    def read(self, state: str, reply: Reply) -> Sequence[Thought[str]]:
        letters = [c for c in reply.text if c.isalpha()][: 1 if self.writes_on else 4]
        return [Thought(c, state + c, () if self.writes_on else tuple(self._encode(c))) for c in letters]

    def check(self, state: str) -> float | None:
        return None if not self.done(state) else float(state == self.wanted)

    def done(self, state: str) -> bool:
        return len(state) >= self.length

    def answer(self, state: str) -> str:
        return state


together = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[Engine]:
    async with await Engine.start(EngineConfig(str(model), dtype="float32", kv_blocks=1024)) as engine:
        yield engine


async def grown(engine: Engine, problem: Any, options: TreeOptions, **more: Any) -> list[Event]:
    async with await engine.open(engine.tokenizer.encode("Letters.\n")) as seq:
        events = [event async for event in search(seq, problem, options, engine.tokenizer, **more)]
        assert len(seq) == 9
    return events


def ended(events: list[Event]) -> SearchEnded:
    assert isinstance(events[-1], SearchEnded)
    return events[-1]


def small(**fields: Any) -> TreeOptions:
    return TreeOptions(**{"labels": LABELS, "step_tokens": 6, "beam": 3, "seed": 1, "temperature": 1.0, **fields})


async def assert_clean(engine: Engine) -> None:
    stats = await engine.stats()
    assert (stats.blocks_used, stats.sequences, stats.running, stats.waiting) == (0, 0, 0, 0)


ALL: list[dict[str, Any]] = [
    {"search": search_, "value": value, "writes_on": writes_on}
    for search_ in ("bfs", "dfs", "mcts")
    for value in ("read", "votes", "check", "likelihood")
    for writes_on in (False, True)
    if search_ == "bfs" or value != "likelihood"
]


@together
@pytest.mark.parametrize("how", ALL, ids=lambda how: "-".join(map(str, how.values())))
async def test_events_tell_the_whole_tree(engine: Engine, how: dict[str, Any]) -> None:
    writes_on = how["writes_on"]
    options = small(search=how["search"], value=how["value"], nodes=40)
    events = await grown(engine, Letters(engine, writes_on=writes_on), options)
    words: dict[int, str] = {}
    scored: set[int] = set()
    pruned: set[int] = set()
    chosen: list[int] = []
    parents: dict[int, int | None] = {}
    for event in events:
        match event:
            case NodeAdded(node, parent, depth, text):
                word = "" if parent is None else words[parent] + text
                assert parent not in pruned and depth == len(word) and word not in words.values()
                words[node], parents[node] = word, parent
            case NodeMerged(node, parent, text):
                assert words[parent] + text == words[node]
            case NodeScored(node, value):
                assert 0 <= value <= 1 and node not in scored
                scored.add(node)
            case NodePruned(node, _):
                pruned.add(node)
            case NodeChosen(node):
                assert parents[node] == (chosen[-1] if chosen else None)
                chosen.append(node)
    end = ended(events)
    assert len(words) == end.nodes <= 40 and scored == set(words) - {0}
    assert words[chosen[-1]] == words[end.node] == end.answer and not end.solved
    await assert_clean(engine)


@together
async def test_a_thousand_cancels_leak_no_block(engine: Engine) -> None:
    rng = random.Random(5)
    most = interrupted = 0

    async def cancelled(at: int) -> None:
        nonlocal most, interrupted
        how = ALL[at % len(ALL)]
        options = small(search=how["search"], value=how["value"], seed=at, nodes=100, depth=12, step_tokens=4)
        problem = Letters(engine, writes_on=how["writes_on"], length=12)
        task = asyncio.ensure_future(grown(engine, problem, options))
        for _ in range(rng.randrange(8)):
            sequences = (await engine.stats()).sequences  # the engine gets on by a step
            most = max(most, sequences)
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        interrupted += outcome.__class__ is asyncio.CancelledError

    for first in range(0, 1000, 20):
        await asyncio.gather(*(cancelled(at) for at in range(first, first + 20)))
        await assert_clean(engine)
    assert interrupted > 800 and most > 60  # in the midst of things


@together
async def test_who_stops_listening_frees_every_block(engine: Engine) -> None:
    for stop in range(1, 40):
        async with await engine.open(engine.tokenizer.encode("Letters.\n")) as seq:
            events = search(seq, Letters(engine), small(nodes=60), engine.tokenizer)
            for _ in range(stop):
                if await anext(events, None) is None:
                    break
            await events.aclose()
            assert (await engine.stats()).sequences == 1
    await assert_clean(engine)


@together
@pytest.mark.parametrize("order", ["bfs", "dfs", "mcts"])
async def test_a_deadline_returns_the_best_so_far(engine: Engine, order: str) -> None:
    depths: set[int] = set()
    for seconds in range(1, 40, 3):
        ticks = iter(range(10**6))
        options = small(search=order, nodes=400, depth=30, seconds=float(seconds), beam=2)
        events = await grown(engine, Letters(engine, length=50), options, clock=lambda ticks=ticks: float(next(ticks)))
        end = ended(events)
        assert end.ended == "seconds" and not end.solved
        assert end.value == max((event.value for event in events if isinstance(event, NodeScored)), default=0.0)
        depths.add(len(end.answer))
    assert len(depths) > 1 and max(depths) < 30
    await assert_clean(engine)


class Waiting(Letters):
    """Checks its states once the deadline of `seq` has passed."""

    def __init__(self, engine: Engine, seq: EngineSequence) -> None:
        super().__init__(engine)
        self._seq = seq

    async def check(self, state: str) -> float | None:  # type: ignore[override]
        while state and not self._seq.past_deadline:
            await asyncio.sleep(0.01)
        return super().check(state)


@pytest.mark.parametrize("value", ["read", "votes", "check"])
@together
async def test_the_requests_deadline_returns_the_best_so_far(engine: Engine, value: str) -> None:
    """The first steps are written, and there is no time left to value them, or to go on."""
    seq = await engine.open(engine.tokenizer.encode("Letters.\n"), deadline_s=3.0)
    options = small(value=value, depth=2 if value == "check" else 1)
    events = [event async for event in search(seq, Waiting(engine, seq), options, engine.tokenizer)]
    assert ended(events).ended == "seconds" and len(seq) == 9
    assert any(isinstance(event, NodeAdded) and event.depth == 1 for event in events)
    scored = [event for event in events if isinstance(event, NodeScored)]
    assert bool(scored) == (value == "check")
    seq.close()
    await assert_clean(engine)


@together
async def test_no_search_goes_beyond_its_tokens_or_nodes(engine: Engine) -> None:
    rng = random.Random(9)
    ends: set[str] = set()
    for at in range(44):
        how = ALL[at % len(ALL)]
        tokens, nodes = rng.choice((None, rng.randint(1, 300))), rng.randint(13, 60)
        options = small(search=how["search"], value=how["value"], seed=at, tokens=tokens, nodes=nodes)
        before = await engine.stats()
        end = ended(await grown(engine, Letters(engine, writes_on=how["writes_on"]), options))
        after = await engine.stats()
        assert end.nodes <= nodes
        assert tokens is None or end.written + end.read <= tokens
        assert after.generated_tokens - before.generated_tokens >= end.written
        ends.add(end.ended)
    assert {"tokens", "nodes", "exhausted"} <= ends


@together
async def test_a_right_answer_ends_the_search_at_once(engine: Engine) -> None:
    words = [
        event
        for event in await grown(engine, Letters(engine, length=2), small(depth=2, value="check"))
        if isinstance(event, NodeAdded) and event.depth == 2
    ]
    for order in ("bfs", "dfs", "mcts"):
        problem = Letters(engine, length=2)
        problem.check = lambda state: 1.0 if len(state) == 2 else None  # type: ignore[method-assign]  # any will do
        end = ended(await grown(engine, problem, small(depth=5, search=order, value="check")))
        assert end.solved and end.ended == "found" and len(end.answer) == 2
    assert words


async def test_a_branch_too_long_for_the_context_is_pruned(model: Path) -> None:
    config = EngineConfig(str(model), dtype="float32", kv_blocks=64, max_model_len=40)
    async with await Engine.start(config) as engine:
        events = await grown(engine, Letters(engine, length=50), small(depth=20, nodes=100, step_tokens=20))
        assert NodePruned(0, "context") in events or any(
            isinstance(event, NodePruned) and event.why == "context" for event in events
        )
        assert ended(events).ended == "exhausted"
        await assert_clean(engine)


@together
async def test_an_error_of_the_problem_comes_through_and_leaves_nothing(engine: Engine) -> None:
    problem = Letters(engine)
    problem.read = lambda state, reply: 1 // 0  # type: ignore[assignment,method-assign,return-value]  # it raises
    with pytest.raises(ZeroDivisionError):
        await grown(engine, problem, small())
    await assert_clean(engine)


@pytest.mark.parametrize("writes_on", [False, True])
async def test_the_value_head_values_states(model: Path, tmp_path: Path, writes_on: bool) -> None:
    path = tmp_path / "valued"
    shutil.copytree(model, path)
    size = json.loads((path / "config.json").read_text())["hidden_size"]
    ValueHead(torch.randn(size, generator=torch.Generator().manual_seed(1)), torch.tensor(0.0)).save(path)
    async with await Engine.start(EngineConfig(str(path), dtype="float32", kv_blocks=1024)) as engine:
        problem = Letters(engine, writes_on=writes_on)
        # a step of one token is the letter that it adds
        options = small(value="head", nodes=40, step_tokens=1 if writes_on else 6)
        words, values = {0: ""}, dict[str, float]()
        for event in await grown(engine, problem, options):
            if isinstance(event, NodeAdded) and event.parent is not None:
                words[event.node] = words[event.parent] + event.text
            elif isinstance(event, NodeScored):
                values[words[event.node]] = event.value
        asked = {word: value for word, value in values.items() if len(word) < problem.length}  # others are checked
        assert len(asked) > 2 and (
            len(set(asked.values())) > 2 or not writes_on
        )  # this model reads the last letter alone
        for word, value in asked.items():
            prompt = engine.tokenizer.encode(f"Letters.\n{word}")
            async with await engine.open([*prompt, *(() if writes_on else problem.value_prompt(word))]) as seq:
                assert await seq.value() == pytest.approx(value, abs=1e-5), word
        await assert_clean(engine)


@together
async def test_without_a_value_head_its_values_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidParameter, match="no value head"):
        await grown(engine, Letters(engine), small(value="head"))
    await assert_clean(engine)


@pytest.mark.parametrize(
    "fields",
    [
        {"beam": 0}, {"beam": 65}, {"depth": 0}, {"nodes": 1}, {"threshold": 1.0}, {"seconds": 0}, {"tokens": 0},
        {"search": "best"}, {"value": "guess"}, {"labels": {"sure": 1.0}}, {"labels": {"sure": 2.0, "no": 0.0}},
        {"value": "votes", "temperature": 0.0}, {"search": "dfs", "value": "likelihood"}, {"beam": 10, "depth": 20},
        {"width": 3},
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TreeOptions(**fields)


@together
async def test_samples_that_are_all_the_same_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidParameter, match="temperature"):
        await grown(engine, Letters(engine, writes_on=True), small(temperature=0.0))
    await assert_clean(engine)
