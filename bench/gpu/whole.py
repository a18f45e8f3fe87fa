"""The whole engine on a GPU, and its overhead over the device's own time.

Steps are timed by a clock, with scheduling, packing, the launch, sampling, the wait for tokens, detokenising and
replies. The core is stepped directly, with a real scheduler and greedy sequences that run to no end. A peer's steps
include all of that too, and are compared with these; the part `overhead` is the time that they take beside the graph.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from torch import Tensor

from bench.gpu import gpu_models, steps
from bench.gpu.decoding import label
from bench.gpu.rows import Figure, Missing, time_of
from bench.gpu.setting import Setting
from engine import GREEDY, EngineConfig, Span
from engine.config import LoopName
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.core.loop import calm_collector
from engine.core.step import Step
from engine.kv_cache.block_pool import BlockPool
from engine.model.detokenizer import Detokenizer
from engine.model.gpu_runner import GpuRunner
from engine.model.model_spec import ModelSpec
from engine.model.tokenizer import Tokenizer

PEBBLE = Path("models/pebble")
LAST = 9  # steps that count: their rows are as long as those of the last, with the timed graph


def whole(setting: Setting) -> Iterator[Figure]:
    """Every model, at the rows at which a peer is asked, too."""
    for name in setting.sizes.models:
        yield from _of_model(setting, name)


def _of_model(setting: Setting, name: str) -> Iterator[Figure]:
    sizes = setting.sizes
    setting.tidy()
    ready = ReadyEngine.made(setting, name, max(sizes.compared), sizes.context)
    for rows in sizes.compared:
        if rows <= ready.rows:
            walls, graphs = stepped(setting, ready, rows, "overlapped")
            yield time_of(label(name, rows), walls, floor_s=statistics.median(graphs), context=sizes.context)


@dataclass(frozen=True)
class ReadyEngine:
    """A model that may be stepped with up to `rows` rows, which have `blocks` each."""

    runner: GpuRunner
    spec: ModelSpec
    rows: int
    context: int
    blocks: int
    ids: Iterator[int] = field(default_factory=lambda: count(1))  # one runner never runs the same id twice

    @classmethod
    def made(cls, setting: Setting, name: str, rows: int, context: int) -> ReadyEngine:
        """With as many of `rows` as there is memory for.

        Raises:
            Missing: there is none for a single one.
        """
        sizes, device = setting.sizes, setting.device
        decoder = gpu_models.random_decoder(name, device, layers=sizes.layers)
        longest = context + 4 * (sizes.engine_steps + sizes.engine_warm)
        fitting = setting.free_bytes() // gpu_models.kv_bytes(decoder.spec, steps.BLOCK) - 1
        blocks = -(-longest // steps.BLOCK) + 2  # some to spare, so that the scheduler delays nobody
        rows = min(rows, fitting // blocks)
        if rows < 1:
            raise Missing(f"memory for one row of {name}")
        kv = steps.cache_for(decoder.spec, rows * blocks, decoder.dtype, device)
        runner = steps.runner_for(decoder, kv, device, rows=rows, context=longest)
        return cls(runner, decoder.spec, rows, context, blocks)


def stepped(setting: Setting, ready: ReadyEngine, rows: int, loop: LoopName) -> tuple[list[float], list[float]]:
    """Seconds of the last steps of `rows` decodes, and of the last one's graph by itself."""
    sizes, watched, tokenizer = setting.sizes, _Watched(ready.runner), Pebbles()
    blocks = rows * ready.blocks
    config = EngineConfig(
        "random", max_running=rows, kv_blocks=blocks, prefix_cache=False, fixed_chunks=True,
        max_batch_tokens=max(rows + 1, sizes.most_batch_tokens), loop=loop,
    )  # fmt: skip
    core = EngineCore(config, watched, BlockPool(blocks), lambda: Detokenizer(tokenizer), (), b"bench")
    try:
        most = 3 * (sizes.engine_steps + sizes.engine_warm)
        for seq in steps.sequences(rows, ready.context, ready.spec.vocab_size):
            id, request = next(ready.ids), next(ready.ids)
            core.handle(m.Open(id, tuple(seq.tokens), "", 0, None))
            core.handle(m.Generate(id, request, Span(GREEDY, max_tokens=most, ignore_eos=True), id, most))

        def step() -> float:
            start = setting.timer.now()
            core.step()
            core.take_replies()
            return setting.timer.now() - start

        while not watched.decoding(rows):
            if not core.has_work:
                raise Missing(f"K/V for {rows} rows at once")
            step()
        for _ in range(sizes.engine_warm):
            step()
        with _calm():
            walls = [step() for _ in range(sizes.engine_steps)]
        core.settle()
        assert watched.last is not None
        graph = steps.graph_of(ready.runner, watched.last)
        return walls[-LAST:], setting.timer.times(graph, sizes.repeats)
    finally:
        core.close()


@contextlib.contextmanager
def _calm() -> Iterator[None]:
    """As the engine serves; afterwards the collector finds dropped objects again, gigabytes of K/V among them."""
    thresholds = gc.get_threshold()
    calm_collector()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


class Pebbles:
    """Tokens' bytes, of any vocabulary, as if they were those of the bundled model."""

    strips_first_space = False

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.load(PEBBLE)
        self._count = 4000

    def visible_bytes(self, id: int, skip_special: bool) -> bytes:
        return self._tokenizer.visible_bytes(id % self._count, skip_special)


class _Watched:
    """A runner that remembers the last step."""

    def __init__(self, runner: GpuRunner) -> None:
        self.vocab_size, self.queues = runner.vocab_size, runner.queues
        self.last: Step | None = None
        self._runner = runner

    def run(self, step: Step) -> Tensor:
        self.last = step
        return self._runner.run(step)

    def decoding(self, rows: int) -> bool:
        return self.last is not None and self.last.tokens == len(self.last.rows) == rows


GOAL = 0.05  # of a step's wall time, at most


def overhead(setting: Setting) -> Iterator[Figure]:
    """Both loops, of the first model, with as many rows as there is K/V for."""
    sizes, name = setting.sizes, setting.sizes.models[0]
    setting.tidy()
    ready = ReadyEngine.made(setting, name, sizes.engine_rows, sizes.engine_context)
    loops: tuple[LoopName, ...] = ("plain", "overlapped")
    for loop in loops:
        walls, graphs = stepped(setting, ready, ready.rows, loop)
        what = f"{name}, {ready.rows} rows, {loop}"
        yield step_figure(what, walls, graphs, context=ready.context, layers=ready.spec.layers)


def step_figure(what: str, walls: list[float], graphs: list[float], **more: object) -> Figure:
    """Seconds of steps and of their graph, as one figure: the milliseconds beside it, and their share of the step."""
    graph, wall = statistics.median(graphs), statistics.median(walls)
    beside = [1e3 * (each - graph) for each in walls]
    found = Figure(what, 1e3 * (wall - graph), "ms", min(beside), max(beside), more={"graph_ms": 1e3 * graph, **more})
    return replace(found, share=(wall - graph) / wall, goal=GOAL, most=True)
