"""What a step of the engine takes beside the model: wall time of whole steps, less the graph's time on the device.

Scheduling, packing, the launch, sampling, the wait for its tokens, detokenising and replies are all in it; the core is
stepped directly, with a real scheduler and greedy sequences that run to no end.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from bench.gpu import models, steps
from bench.gpu.rows import Figure, Missing
from bench.gpu.setting import Setting
from engine import GREEDY, EngineConfig, Span
from engine import messages as m
from engine.config import LoopName
from engine.core import EngineCore
from engine.detokenizer import Detokenizer
from engine.gpu.runner import GpuRunner
from engine.kv.blocks import BlockPool
from engine.loop import calm_collector
from engine.step import Step
from engine.tokenizer import Tokenizer

GOAL = 0.05  # of a step's wall time, at most
PEBBLE = Path("models/pebble")


class Pebbles:
    """Tokens' bytes, of any vocabulary, as if they were those of the bundled model."""

    strips_first_space = False

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.load(PEBBLE)
        self._count = 4000

    def visible_bytes(self, id: int, skip_special: bool) -> bytes:
        return self._tokenizer.visible_bytes(id % self._count, skip_special)


def overhead(setting: Setting) -> Iterator[Figure]:
    """Both loops, of the first model, with as many rows as there is K/V for."""
    sizes, device, name = setting.sizes, setting.device, setting.sizes.models[0]
    setting.tidy()
    decoder = models.random_decoder(name, device, layers=sizes.layers)
    spec, context = decoder.spec, sizes.engine_context
    longest = context + 4 * (sizes.engine_steps + sizes.engine_warm)
    fitting = setting.free_bytes() // models.kv_bytes(spec, steps.BLOCK) - 1
    each = -(-longest // steps.BLOCK) + 2  # some to spare, so that the scheduler holds nobody back
    rows = min(sizes.engine_rows, fitting // each)
    kv = steps.cache_for(spec, rows * each, decoder.dtype, device)
    runner = steps.runner_for(decoder, kv, device, rows=rows, context=longest)
    loops: tuple[LoopName, ...] = ("plain", "overlapped")
    for loop in loops:
        config = EngineConfig(
            "random", max_running=rows, kv_blocks=rows * each, prefix_cache=False, fixed_chunks=True,
            max_batch_tokens=max(rows + 1, sizes.most_batch_tokens), loop=loop,
        )  # fmt: skip
        walls, graphs = _stepped(setting, runner, config, rows, context, spec.vocab_size)
        yield told(f"{name}, {rows} rows, {loop}", walls, graphs, context=context, layers=spec.layers)


def told(what: str, walls: list[float], graphs: list[float], **more: object) -> Figure:
    """Seconds of steps and of their graph, as one figure: the milliseconds beside it, and their share of the step."""
    graph, wall = statistics.median(graphs), statistics.median(walls)
    beside = [1e3 * (each - graph) for each in walls]
    found = Figure(what, 1e3 * (wall - graph), "ms", min(beside), max(beside), more={"graph_ms": 1e3 * graph, **more})
    return replace(found, share=(wall - graph) / wall, goal=GOAL, most=True)


def _stepped(
    setting: Setting, runner: GpuRunner, config: EngineConfig, rows: int, context: int, vocabulary: int
) -> tuple[list[float], list[float]]:
    watched = _Watched(runner)
    tokenizer = Pebbles()
    core = EngineCore(
        config, watched, BlockPool(config.kv_blocks or 1), lambda: Detokenizer(tokenizer), (), b"bench"
    )  # fmt: skip
    most = 3 * (setting.sizes.engine_steps + setting.sizes.engine_warm)
    for nth, seq in enumerate(steps.sequences(rows, context, vocabulary)):
        id = 2 * nth + 1
        core.handle(m.Open(id, tuple(seq.tokens), "", 0, None))
        core.handle(m.Generate(id, id + 1, Span(GREEDY, max_tokens=most, ignore_eos=True), id, most))

    def step() -> float:
        start = setting.timer.now()
        core.step()
        core.take_replies()
        return setting.timer.now() - start

    while not watched.decoding(rows):
        if not core.has_work:
            raise Missing(f"K/V for {rows} rows at once")
        step()
    for _ in range(setting.sizes.engine_warm):
        step()
    calm_collector()
    walls = [step() for _ in range(setting.sizes.engine_steps)]
    core.settle()
    assert watched.last is not None
    graphs = setting.timer.times(steps.graph_of(runner, watched.last), setting.sizes.repeats)
    core.close()
    return walls, graphs


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
