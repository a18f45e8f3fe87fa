"""Trees of thoughts over number puzzles, with the bundled model: what is found is right, what is shared is shared."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from engine import GREEDY, Engine, EngineConfig, Span
from reasoning.strategy import Event
from reasoning.tree import Asking, NodeAdded, NodeScored, Reply, SearchEnded, Thought, TreeOptions, search
from reasoning.tree.problem import Search, Value
from tests.reasoning.puzzles import Left, Puzzle, holds

pytestmark = pytest.mark.slow

PEBBLE = Path(__file__).resolve().parents[2] / "models/pebble"
SOLVABLE = ((1, 4, 8, 8), 24)


@pytest.fixture
async def pebble() -> AsyncIterator[Engine]:
    config = EngineConfig(str(PEBBLE), dtype="float32", device="cpu", kv_blocks=600, threads=1, prefix_cache=False)
    async with await Engine.start(config) as engine:
        yield engine


async def solve(
    engine: Engine, options: TreeOptions, puzzle: tuple[tuple[int, ...], int] = SOLVABLE
) -> tuple[list[Event], SearchEnded]:
    asking = Asking(engine.tokenizer, variables={"enable_thinking": False})
    async with await engine.open(asking.head()) as seq:
        task = Puzzle(*puzzle, asking)
        events = [event async for event in search(seq, task, options, engine.tokenizer)]
    assert isinstance(events[-1], SearchEnded)
    return events, events[-1]


@pytest.mark.parametrize(("order", "value"), [("bfs", "likelihood"), ("dfs", "read"), ("mcts", "read")])
async def test_every_search_solves_what_its_model_can(pebble: Engine, order: Search, value: Value) -> None:
    solved = 0
    for puzzle in (((2, 3, 4), 24), ((3, 5, 7), 22), ((4, 9, 10, 13), 24))[: 3 if order == "bfs" else 2]:
        _, end = await solve(pebble, TreeOptions(search=order, value=value, temperature=0.0, nodes=100), puzzle)
        assert end.solved == holds(end.answer, *puzzle) == (end.ended == "found")
        solved += end.solved
    assert solved >= 1
    stats = await pebble.stats()
    assert (stats.blocks_used, stats.sequences) == (0, 0)


async def test_a_tree_of_five_beams_computes_each_token_once(pebble: Engine) -> None:
    before = await pebble.stats()
    events, end = await solve(pebble, TreeOptions(beam=5, temperature=0.0, value="read"))
    after = await pebble.stats()
    assert max(event.depth for event in events if isinstance(event, NodeAdded)) == 3
    assert sum(isinstance(event, NodeScored) for event in events) > 15
    assert after.prompt_tokens - before.prompt_tokens == 1 + end.read  # the shared head is one token
    assert after.step_tokens - before.step_tokens <= 1 + end.read + end.written
    assert after.recomputed_tokens == after.preemptions == 0


async def test_a_branch_that_is_a_fork_writes_what_a_fresh_sequence_writes(pebble: Engine) -> None:
    asking = Asking(pebble.tokenizer, variables={"enable_thinking": False})

    class Remembering(Puzzle):
        def read(self, state: Left, reply: Reply) -> Sequence[Thought[Left]]:
            replies[tuple(self.propose_prompt(state))] = reply.token_ids
            return super().read(state, reply)

    replies: dict[tuple[int, ...], tuple[int, ...]] = {}
    async with await pebble.open(asking.head()) as seq:
        task = Remembering(*SOLVABLE, asking)
        async for _ in search(seq, task, TreeOptions(temperature=0.0), pebble.tokenizer):
            pass
    assert len(replies) > 5
    for prompt, reply in replies.items():
        async with await pebble.open([*asking.head(), *prompt]) as fresh:
            assert (await fresh.generate_all(Span(GREEDY, 128))).token_ids == reply
