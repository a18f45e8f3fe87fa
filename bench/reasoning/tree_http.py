"""A tree of thoughts on forks, against the same tree run branch after branch through the HTTP API: no forks there.

The peer is a plain program on `/v1/completions`: it sends whole prompts as token ids, one request after another, and
reads a judgement from the log-probabilities of one token; with the server's prefix cache, without it, and once more
with all requests of a level sent at once. All grow the tree breadth first and greedily, and it is checked that it is
the same one. Beside them the least that the tree
needs: every token of it computed once.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import httpx
import uvicorn

from app.cli.serve import bind
from app.config import load_settings
from app.server import create_app
from bench.reasoning.asked import MODELS, SEED, questions
from bench.reasoning.puzzle_problem import Left, PuzzleProblem
from engine import Engine, EngineConfig
from reasoning.tree import Asking, NodeAdded, NodeScored, Reply, Thought, TreeOptions, search

T = TypeVar("T")
Json = dict[str, Any]  # Any: plain JSON
OPTIONS = TreeOptions.model_validate({"beam": 5, "depth": 3, "temperature": 0.0, "value": "read", "seed": SEED})
DTYPE: Literal["float32"] = (
    "float32"  # in bfloat16 other batches round otherwise, and judgements that are near each other change places
)
NEAR = 1e-3  # that a value may differ by
LOGPROBS = 20


@dataclass(slots=True)
class Grown:
    """A tree as it was grown: its nodes' states in order with their values, and the tokens that it took."""

    values: dict[tuple[int, ...], float] = field(default_factory=dict)
    asked: list[tuple[int, ...]] = field(default_factory=list)  # prompts, of steps and of values
    written: int = 0
    seconds: float = 0.0
    computed: int = 0  # tokens that went through the model
    prefilled: int = 0  # of these, tokens of prompts

    def same(self, other: Grown) -> bool:
        """Returns whether the states are the same, found in the same order, and the values as good as."""
        return list(self.values) == list(other.values) and all(
            abs(value - other.values[state]) <= NEAR for state, value in self.values.items()
        )

    def least(self) -> int:
        """Tokens that must go through the model: every position of the prompts once, however many share it, and every
        token written.
        """
        positions = {prompt[:end] for prompt in self.asked for end in range(1, len(prompt) + 1)}
        return len(positions) + self.written


class _Noting(PuzzleProblem):
    """Notes every prompt, whole, and every token written."""

    def __init__(self, numbers: Sequence[int], target: int, asking: Asking, grown: Grown) -> None:
        super().__init__(numbers, target, asking)
        self._grown = grown

    def propose_prompt(self, state: Left) -> Sequence[int]:
        self._grown.asked.append(tuple(self.wholes(state)[0]))
        return super().propose_prompt(state)

    def value_prompt(self, state: Left) -> Sequence[int]:
        self._grown.asked.append(tuple(self.wholes(state)[1]))
        return super().value_prompt(state)

    def read(self, state: Left, reply: Reply) -> Sequence[Thought[Left]]:
        self._grown.written += len(reply.token_ids)
        return super().read(state, reply)


async def on_forks(engine: Engine, numbers: Sequence[int], target: int) -> Grown:
    """The tree by `reasoning.tree`."""
    grown = Grown()
    asking = Asking(engine.tokenizer, variables={"enable_thinking": False})
    task = _Noting(numbers, target, asking, grown)
    nodes: dict[int, tuple[int, ...]] = {0: task.start.key}
    before, began = await engine.stats(), time.perf_counter()
    async with await engine.open(task.head) as seq:
        async for event in search(seq, task, OPTIONS, engine.tokenizer):
            match event:
                case NodeAdded(node, parent, _, text) if parent is not None:
                    nodes[node] = tuple(sorted(int(number) for number in text.partition("=")[2].split()))
                case NodeScored(node, value):
                    grown.values[nodes[node]] = value
    grown.seconds = time.perf_counter() - began
    await _counted(engine, grown, before)
    return grown


async def over_http(
    engine: Engine, client: httpx.AsyncClient, numbers: Sequence[int], target: int, *, at_once: bool = False
) -> Grown:
    """The same tree, request after request, or all of a level `at_once`. `engine` is the server's, for its counters."""
    grown = Grown()
    tokenizer = engine.tokenizer
    asking = Asking(tokenizer, variables={"enable_thinking": False})
    task = _Noting(numbers, target, asking, grown)
    labels = {tokenizer.token_text(tokenizer.encode(label)[0]): value for label, value in OPTIONS.labels.items()}
    known = {task.start}
    before, began = await engine.stats(), time.perf_counter()

    async def complete(prompt: Sequence[int], **more: Any) -> Json:  # Any: plain JSON
        body = {"model": "default", "prompt": prompt, "temperature": 0, **more}
        reply = await client.post("/v1/completions", json=body)
        reply.raise_for_status()
        choice: Json = reply.json()["choices"][0]
        return choice

    async def propose(state: Left) -> Json:
        return await complete(task.wholes(state)[0], max_tokens=OPTIONS.step_tokens, logprobs=0)

    async def value(state: Left) -> float:
        checked = task.check(state)
        if checked is not None:
            return checked
        completed = await complete(task.wholes(state)[1], max_tokens=1, logprobs=LOGPROBS)
        top: dict[str, float] = completed["logprobs"]["top_logprobs"][0]
        weights = {label: math.exp(top.get(label, -math.inf)) for label in labels}
        return sum(weights[label] * labels[label] for label in labels) / (sum(weights.values()) or 1.0)

    level = [task.start]
    for _ in range(OPTIONS.depth):
        children: list[Left] = []
        steps = await _all(at_once, [propose(state) for state in level])
        for state, completed in zip(level, steps, strict=True):
            count = len(completed["logprobs"]["tokens"])
            for thought in task.read(
                state, Reply(completed["text"], (0,) * count, completed["finish_reason"] == "stop")
            ):
                if thought.state not in known:
                    known.add(thought.state)
                    children.append(thought.state)
        values = await _all(at_once, [value(child) for child in children])
        grown.values |= {child.key: value for child, value in zip(children, values, strict=True)}
        if any(task.done(child) and grown.values[child.key] >= 1 for child in children):
            break
        open_ = [child for child in children if not task.done(child)]
        level = sorted(open_, key=lambda child: -grown.values[child.key])[: OPTIONS.beam]
    grown.seconds = time.perf_counter() - began
    await _counted(engine, grown, before)
    return grown


async def _all(at_once: bool, jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    return await asyncio.gather(*jobs) if at_once else [await job for job in jobs]


async def _counted(engine: Engine, grown: Grown, before: Any) -> None:  # Any: the engine's counters
    after = await engine.stats()
    grown.computed = after.step_tokens - before.step_tokens
    grown.prefilled = after.prompt_tokens - before.prompt_tokens


@asynccontextmanager
async def served(*, prefix_cache: bool) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    """`ponder serve`'s app with the bundled model, on a free port of this machine."""
    model = str(MODELS / "pebble")
    with tempfile.TemporaryDirectory() as data:
        settings = load_settings(
            model=model, data_dir=data, sandbox=False, dtype=DTYPE, prefix_cache=prefix_cache, speculation="off"
        )  # computed tokens are counted, and a draft's would be among them
        async with await Engine.start(settings.engine_config()) as engine:
            listener = bind("127.0.0.1", 0)
            web = uvicorn.Server(uvicorn.Config(create_app(engine, settings), log_config=None))
            serving = asyncio.create_task(web.serve(sockets=[listener]))
            while not web.started:
                await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            try:
                async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                    yield engine, client
            finally:
                web.should_exit = True
                await serving


async def compared(n: int) -> list[Json]:
    """For each of `n` puzzles the figures of every way. The ways take turns, and a first puzzle that warms them is left
    out.

    Every way has an engine of its own, and every puzzle is new to it.
    """
    made: list[Json] = []
    async with (
        await Engine.start(EngineConfig(str(MODELS / "pebble"), dtype=DTYPE)) as engine,
        served(prefix_cache=True) as (cached, client),
        served(prefix_cache=False) as (uncached, other),
        served(prefix_cache=True) as (beside, crowd),
    ):
        for at, question in enumerate(questions("game24", n + 1)):
            forks = await on_forks(engine, question.numbers, question.target)
            trees = {
                "forks": forks,
                "http": await over_http(cached, client, question.numbers, question.target),
                "http, no prefix cache": await over_http(uncached, other, question.numbers, question.target),
                "http, a level at once": await over_http(
                    beside, crowd, question.numbers, question.target, at_once=True
                ),
            }
            if not at:
                continue
            ways = {
                name: {
                    "seconds": tree.seconds, "computed": tree.computed, "prefilled": tree.prefilled,
                    "written": tree.written, "same": forks.same(tree),
                }
                for name, tree in trees.items()
            }  # fmt: skip
            made.append({"ways": ways, "states": len(forks.values), "least": forks.least()})
    return made


def summary(made: Sequence[Json]) -> Json:
    """Ratios of sums over the trees that came out the same in every way."""
    same = [each for each in made if all(way["same"] for way in each["ways"].values())]

    def total(way: str, what: str) -> float:
        return sum(float(each["ways"][way][what]) for each in same)

    return {
        "puzzles": len(made),
        "same_trees": len(same),
        "seconds_a_tree": {way: total(way, "seconds") / len(same) for way in made[0]["ways"]},
        "prefilled_a_tree": {way: total(way, "prefilled") / len(same) for way in made[0]["ways"]},
        "written_a_tree": {way: total(way, "written") / len(same) for way in made[0]["ways"]},
        "times_as_fast_as": {
            way: total(way, "seconds") / total("forks", "seconds") for way in made[0]["ways"] if way != "forks"
        },
        "computed_over_least": {
            way: total(way, "computed") / sum(each["least"] for each in same) for way in made[0]["ways"]
        },
    }
