"""`ponder simulate TRACE`: a recorded trace on a fleet of simulated replicas, and what its users would see."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from app.cli.accuracy_curves import can_draw
from app.config import BadSetting, Settings
from app.routing.policies import PolicyName
from app.simulation.cost_model import CostError, SimulatedDevice, load_device
from app.simulation.fleet import FleetConfig, FleetResult, run
from app.simulation.recorded_trace import TraceError, duration_s, load_trace, scaled
from engine.config import EngineConfig
from engine.core.loop import calm_collector

PICTURES = (".png", ".svg")
_LINE_S = 5.0  # between two lines of progress, where there is no terminal
_BUCKETS = 60  # of a picture's time


@dataclass(frozen=True, slots=True)
class SimulateRequest:
    """The command's options."""

    trace: Path
    replicas: int
    router: PolicyName
    cost: str
    copies: int
    hours: float | None
    peak: float
    seed: int
    block_size: int
    max_running: int | None
    kv_tokens: int | None
    admission: bool
    price: float | None
    plot: Path | None


def simulate(request: SimulateRequest, settings: Settings, as_json: bool) -> None:
    """Runs it and prints a table, or one line of JSON.

    Raises:
        BadSetting: the trace or the cost cannot be used, or the picture cannot be drawn.
    """
    if request.plot is not None:
        _check_plot(request.plot)
    try:
        trace, device = load_trace(request.trace), load_device(request.cost, request.seed)
        config = fleet_config(request, device, settings)
        period = duration_s(trace)
        expected = round(len(trace) * request.copies * (request.hours * 3600 / period if request.hours else 1))
        calm_collector()
        began = time.process_time()
        with _Shown(expected) as shown:
            requests = scaled(trace, request.copies, request.hours, request.peak, request.seed)
            result = run(config, requests, shown.update)
        cpu_s = time.process_time() - began
    except (TraceError, CostError) as error:
        raise BadSetting(str(error)) from None
    summary = result.summary() | {"cpu_s": cpu_s, "requests_per_cpu_minute": 60 * result.requests / max(cpu_s, 1e-9)}
    if request.price is not None:
        summary["cost_per_million_tokens"] = cost_per_million(result, request.replicas, request.price)
    if request.plot is not None:
        draw(request.plot, result, f"{request.trace.name} × {request.copies} on {request.replicas} × {device.name}")
    if as_json:
        print(json.dumps(summary))
    else:
        _print(summary, request, device)


def fleet_config(request: SimulateRequest, device: SimulatedDevice, settings: Settings) -> FleetConfig:
    """Returns the fleet that the options and the server's settings describe.

    Raises:
        BadSetting: the K/V pool has no block.
    """
    running = request.max_running or settings.max_running
    engine = EngineConfig(
        device.name, block_size=request.block_size, max_batch_tokens=device.max_batch_tokens, max_running=running,
        max_waiting=settings.max_waiting, policy=settings.policy,
    )  # fmt: skip
    blocks = (request.kv_tokens or device.kv_tokens) // request.block_size
    if blocks < 1:
        raise BadSetting(
            f"The K/V pool has fewer tokens than a block of {request.block_size}; accepted: --kv-tokens of at least "
            "a block."
        )
    served = settings.model_copy(update={"max_running": running}) if request.admission else None
    return FleetConfig(
        engine, blocks, device.cost, request.replicas, request.router, device.max_model_len, served, request.seed
    )


def cost_per_million(result: FleetResult, replicas: int, price: float) -> float:
    """Returns the price of a million tokens, read and written, where a replica costs `price` an hour, busy or not."""
    tokens = result.prompt_tokens + result.output_tokens
    return price * replicas * result.seconds / 3600 / max(tokens, 1) * 1e6


def draw(path: Path, result: FleetResult, title: str) -> None:
    """Draws a run over its time: first tokens, requests, and the load of replicas; and how gaps are distributed.

    Raises:
        BadSetting: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 6.4), layout="constrained")
    (first, load), (queue, gaps) = axes
    arrivals, ttfts, line = np.array(result.arrivals), np.array(result.ttfts), result.line
    if len(arrivals):
        edges = np.linspace(0, arrivals.max() + 1e-9, _BUCKETS + 1)
        which = np.clip(np.digitize(arrivals, edges) - 1, 0, _BUCKETS - 1)
        shown = [at for at in range(_BUCKETS) if (which == at).any()]
        for percent in (50, 99):
            values = [float(np.percentile(ttfts[which == at], percent)) for at in shown]
            first.plot([edges[at] / 3600 for at in shown], values, label=f"p{percent}")
        first.set_yscale("log")
        first.legend()
    first.set(xlabel="hours", ylabel="s", title="first token, by arrival")
    hours = [at / 3600 for at in line.at]
    queue.plot(hours, line.running, label="run")
    queue.plot(hours, line.waiting, label="wait")
    queue.set(xlabel="hours", ylabel="requests", title="in the fleet")
    queue.legend()
    load.plot(hours, line.busy, label="busy")
    load.plot(hours, line.kv_used, label="K/V blocks in use")
    load.set(xlabel="hours", ylabel="share", title="replicas", ylim=(0, 1.05))
    load.legend()
    percents = np.linspace(0.5, 99.9, 200)
    gaps.plot([1000 * result.gaps.percentile(each) for each in percents], percents)
    gaps.set(xlabel="ms", ylabel="% of gaps below", title="between two tokens", xscale="log")
    for axis in axes.flat:
        axis.grid(alpha=0.25)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise BadSetting(f"{path} cannot be written: {error}.") from None
    finally:
        plt.close(figure)


def _check_plot(path: Path) -> None:
    if path.suffix not in PICTURES:
        raise BadSetting(f"--plot is {path}; accepted: a file that ends in {' or '.join(PICTURES)}.")
    if not can_draw():
        raise BadSetting("--plot needs matplotlib, which is not installed; accepted: no --plot, or matplotlib>=3.10.")


def _print(summary: dict[str, object], request: SimulateRequest, device: SimulatedDevice) -> None:
    def spread(name: str, times: float, unit: str) -> str:
        found = summary[name]
        assert isinstance(found, dict)
        return " / ".join(f"{found[each] * times:.4g}" for each in ("p50", "p99")) + f" {unit}"

    table = Table(
        title=f"{request.trace.name} × {request.copies} on {request.replicas} × {device.name}, {request.router}",
        title_justify="left", box=SIMPLE, show_header=False,
    )  # fmt: skip
    refused = f"{summary['refused']:,} refused, {summary['too_long']:,} too long"
    table.add_row("requests", f"{summary['requests']:,}: {summary['answered']:,} answered, {refused}")
    table.add_row("rate", f"{summary['requests_per_s']:.4g} requests/s, {summary['output_tokens_per_s']:.4g} tokens/s")
    table.add_row("first token, p50 / p99", spread("ttft_s", 1000, "ms"))
    table.add_row("between tokens, p50 / p99", spread("itl_s", 1000, "ms"))
    table.add_row("whole answer, p50 / p99", spread("e2e_s", 1, "s"))
    table.add_row("prefix cache", f"{summary['hit_rate']:.1%} of prompt tokens")
    table.add_row("preemptions", f"{summary['preemptions']:,} ({summary['recomputed_tokens']:,} tokens again)")
    table.add_row("replicas busy", f"{summary['utilisation']:.1%}, the busiest {summary['busiest_replica']:.1%}")
    table.add_row("most at once", f"{summary['kv_used_most']:.1%} of K/V, {summary['waiting_most']:,} waiting")
    if "cost_per_million_tokens" in summary:
        table.add_row("a million tokens", f"{summary['cost_per_million_tokens']:.4g}, in the unit of --price")
    table.add_row("simulated", f"{summary['requests_per_cpu_minute']:,.0f} requests a minute of one core")
    Console().print(table)


class _Shown(AbstractContextManager["_Shown"]):
    """Progress on standard error: a bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, expected: int) -> None:
        console = Console(stderr=True)
        self._console, self._expected, self._last = console, expected, time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                BarColumn(), TextColumn("{task.completed:,} requests"), console=console, transient=True
            )
            self._task = self._bar.add_task("", total=expected)

    def __enter__(self) -> _Shown:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=count)
        elif time.monotonic() - self._last > _LINE_S:
            self._last = time.monotonic()
            self._console.print(f"{count:,} of about {self._expected:,} requests", highlight=False)
