"""Trees of thoughts on puzzles, against random legal search at as many states visited.

Which options are best is decided on puzzles of their own, so that those that are measured decide nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from bench.reasoning.asked import SEED, BenchQuestion, BenchRow, each, expected, row, tell
from bench.reasoning.puzzle_problem import PuzzleProblem, leads_to, random_search
from engine import Engine
from reasoning.tree import Asking, SearchEnded, TreeOptions, search

CHOOSING = 60  # puzzles, at most
TRIES = 20  # random searches of each puzzle
PAPERS = "bfs, read"  # Yao et al. 2023, with values read at once
WAYS: Mapping[str, Mapping[str, Any]] = {  # Any: the fields of TreeOptions
    PAPERS: {"value": "read"},
    "bfs, likelihood": {"value": "likelihood"},
    "bfs, likelihood, 2 samples": {"value": "likelihood", "samples": 2},
    "mcts, read, 2 samples": {"search": "mcts", "samples": 2},
    "mcts, check": {"search": "mcts", "value": "check"},
    "mcts, check, 2 samples": {"search": "mcts", "value": "check", "samples": 2},
    "mcts, check, 4 samples": {"search": "mcts", "value": "check", "samples": 4},
}


def options(way: str) -> TreeOptions:
    """B = 5 in every way: so many states are followed at once. Three steps use four numbers."""
    fields = dict(WAYS[way])
    temperature = 0.5 if fields.get("samples", 1) > 1 else 0.0
    return TreeOptions(beam=5, depth=3, nodes=200, temperature=temperature, seed=SEED, **fields)


async def searched(engine: Engine, asked: Sequence[BenchQuestion], name: str, options: TreeOptions) -> list[BenchRow]:
    """A tree, and random legal search at as many states visited as the tree took of each puzzle."""
    asking = Asking(engine.tokenizer, variables={"enable_thinking": False})

    async def one(question: BenchQuestion) -> SearchEnded:
        task = PuzzleProblem(question.numbers, question.target, asking)
        async with await engine.open(task.head) as seq:
            async for event in search(seq, task, options, engine.tokenizer):
                last = event
        assert isinstance(last, SearchEnded)
        return last

    ends = await each(asked, one, at_once=16)
    pairs = list(zip(asked, ends, strict=True))
    right = [leads_to(end.answer, q.numbers, q.target) for q, end in pairs]
    written = [float(end.written) for end in ends]
    states = sum(end.nodes - 1 for end in ends) / len(ends)
    more = {"states": states, "read": sum(end.read for end in ends) / len(ends)}
    made = tell(row(f"game24/tree: {name}", right, [end.written + end.read for end in ends], written, more))
    rng = Random(SEED)
    lucky = sum(random_search(q.numbers, q.target, end.nodes - 1, rng) for q, end in pairs for _ in range(TRIES))
    share = lucky / (TRIES * len(ends))
    chance = expected(f"game24/random legal search, states of {name}", len(ends), share, 0.0, {"states": states})
    return [made, tell(chance)]


async def chosen(engine: Engine, asked: Sequence[BenchQuestion]) -> tuple[str, list[BenchRow]]:
    """The way that solves most of the puzzles for choosing, the cheapest among equals, and the rows of all of them."""
    rows: dict[str, BenchRow] = {}
    for way in WAYS:
        (made, _) = await searched(engine, asked, f"{way} (choosing)", options(way))
        rows[way] = made
    return max(rows, key=lambda way: (rows[way].share, -rows[way].tokens)), list(rows.values())
