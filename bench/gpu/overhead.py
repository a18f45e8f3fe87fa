"""What a step of the engine takes beside the model: wall time of whole steps, less the graph's time on the device."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

from bench.gpu.rows import Figure
from bench.gpu.setting import Setting
from bench.gpu.whole import Ready, stepped
from engine.config import LoopName

GOAL = 0.05  # of a step's wall time, at most


def overhead(setting: Setting) -> Iterator[Figure]:
    """Both loops, of the first model, with as many rows as there is K/V for."""
    sizes, name = setting.sizes, setting.sizes.models[0]
    setting.tidy()
    ready = Ready.made(setting, name, sizes.engine_rows, sizes.engine_context)
    loops: tuple[LoopName, ...] = ("plain", "overlapped")
    for loop in loops:
        walls, graphs = stepped(setting, ready, ready.rows, loop)
        what = f"{name}, {ready.rows} rows, {loop}"
        yield told(what, walls, graphs, context=ready.context, layers=ready.spec.layers)


def told(what: str, walls: list[float], graphs: list[float], **more: object) -> Figure:
    """Seconds of steps and of their graph, as one figure: the milliseconds beside it, and their share of the step."""
    graph, wall = statistics.median(graphs), statistics.median(walls)
    beside = [1e3 * (each - graph) for each in walls]
    found = Figure(what, 1e3 * (wall - graph), "ms", min(beside), max(beside), more={"graph_ms": 1e3 * graph, **more})
    return replace(found, share=(wall - graph) / wall, goal=GOAL, most=True)
