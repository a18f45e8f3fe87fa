"""Cost of a step in seconds, from its rows alone: fitted to measured steps, or a roofline of published figures.

A step is described by five counts. A linear cost is fitted to steps that an engine ran (`fit`, non-negative least
squares), and how they differ from it can be drawn beside it. A roofline (Williams, Waterman and Patterson 2009) is the
longer of the time to compute and the time to read and write, each at a share of what the device's maker publishes.
Knows nothing of sequences, schedulers or devices.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

import numpy as np

from engine.config import GPU_STEP_TOKENS

FEATURES = ("step", "prefill_token", "decode", "context_token", "prefill_pair")
LIMITS = ("kv_tokens", "max_batch_tokens", "max_model_len")
_USED_SHARE = 0.92  # of a GPU's memory, as the engine uses
_PASSES = 3  # of a fit, each without the steps that the one before explains worst
_BINS, _QUANTILES = 16, 128  # of a variation
_OUTLIERS = 4.0  # times the median relative error, beyond which a step was disturbed by other work on the machine


class CostError(ValueError):
    """A file of costs cannot be read; the message names it and what would be accepted."""


class StepLoad(NamedTuple):
    """Counts of a step: tokens of prefills, rows that decode, tokens of K/V that these attend to, and pairs of a query
    and a key in prefills."""

    prefill_tokens: int
    decodes: int
    context: int
    pairs: int


class CostModel(Protocol):
    """Gives the seconds of a step."""

    def seconds(self, load: StepLoad) -> float: ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of a step, of each prefill token, of each row that decodes, of each token of K/V that a decode attends
    to, and of each pair of a query and a key in a prefill."""

    step: float
    prefill_token: float
    decode: float
    context_token: float
    prefill_pair: float

    def seconds(self, load: StepLoad) -> float:
        return (
            self.step + self.prefill_token * load[0] + self.decode * load[1] + self.context_token * load[2]
            + self.prefill_pair * load[3]
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepVariation:
    """Ratios of measured to fitted seconds: quantiles of them for the steps between two `edges`, in fitted seconds.
    There is one row of `ratios` more than edges."""

    edges: tuple[float, ...]
    ratios: tuple[tuple[float, ...], ...]


@dataclass(slots=True)
class ResampledCost:
    """A linear cost, times a ratio drawn from those of measured steps about as long (residual bootstrap, Efron 1979).

    The same steps differ on a machine. The high percentiles of gaps, and the chunks of a policy that learns from steps,
    go by how much. Draws depend on `seed` and on their number so far.
    """

    cost: LinearCost
    variation: StepVariation
    seed: int = 0
    _random: Random = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def seconds(self, load: StepLoad) -> float:
        fitted = self.cost.seconds(load)
        ratios = self.variation.ratios[bisect_right(self.variation.edges, fitted)]
        return fitted * ratios[int(self._random.random() * len(ratios))]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder that its roofline needs; weights and K/V have 2 bytes a number."""

    name: str
    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_model_len: int

    @property
    def weight_bytes(self) -> int:
        return 2 * self.parameters

    @property
    def kv_bytes(self) -> int:
        """Returns the bytes of a token's keys and values, all layers together."""
        return 4 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """The longer of computing and of moving bytes, at shares of the device's peaks, after a fixed part of a step.

    Prefills read the weights once a step and each key from the device's caches, which hold it for a tile of queries.
    """

    shape: ModelShape
    flops_per_s: float
    bytes_per_s: float
    compute_share: float = 1.0
    memory_share: float = 1.0
    step_s: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        shape, tokens = self.shape, load.prefill_tokens + load.decodes
        pairs = load.context + load.pairs
        flops = 2 * shape.parameters * tokens + 4 * shape.layers * shape.heads * shape.head_dim * pairs
        moved = shape.weight_bytes + shape.kv_bytes * (load.context + tokens)
        compute_s = flops / (self.flops_per_s * self.compute_share)
        return self.step_s + max(compute_s, moved / (self.bytes_per_s * self.memory_share))


# Llama 3.1 8B, as its config.json says.
LLAMA_3_8B = ModelShape("Llama 3.1 8B", 8_030_261_248, 32, 32, 8, 128, 131_072)
# NVIDIA H200 Tensor Core GPU datasheet (SXM, 2024): dense BF16 without sparsity, memory bandwidth and size.
H200_FLOPS, H200_BYTES_PER_S, H200_BYTES = 989e12, 4.8e12, 141_000_000_000
PRESETS: dict[str, RooflineCost] = {
    "h200": RooflineCost(LLAMA_3_8B, H200_FLOPS, H200_BYTES_PER_S),
    # Shares that this engine's kernels reached on an H200 (bench/results/2026-11-26-gpu-nvidia-h200.json): 225.2 ms for
    # a prefill of 8,192 tokens, 4.68 ms for one decode and 16.5 ms for 256, and the host's 2.4 ms beside these.
    "h200-measured": RooflineCost(LLAMA_3_8B, H200_FLOPS, H200_BYTES_PER_S, 0.628, 0.737, 0.0024),
}


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A fit, with its relative errors on steps that it has not seen: of the median step, and of all seconds."""

    cost: LinearCost
    steps: int
    held_out_steps: int
    median_error: float
    total_error: float


def fit(samples: Sequence[tuple[StepLoad, float]]) -> LinearCost:
    """Fits a linear cost to steps and their seconds. Relative errors count, so that short steps count as much as long
    ones; steps that other work on the machine disturbed are left out after each pass.

    Raises:
        ValueError: there are fewer steps than parts.
    """
    if len(samples) < len(FEATURES):
        raise ValueError(f"there are {len(samples)} steps; accepted: at least {len(FEATURES)}.")
    counts = np.array([(1, *load) for load, _ in samples], dtype=np.float64)
    seconds = np.array([each for _, each in samples])
    kept = np.ones(len(seconds), dtype=bool)
    parts = np.zeros(len(FEATURES))
    for _ in range(_PASSES):
        parts = _non_negative(counts[kept] / seconds[kept, None], np.ones(int(kept.sum())))
        errors = np.abs(counts @ parts / seconds - 1)
        kept = errors <= _OUTLIERS * max(float(np.median(errors)), 1e-6)
    return LinearCost(*map(float, parts))


def fit_held_out(samples: Sequence[tuple[StepLoad, float]], every: int = 5) -> FittedCost:
    """Fits a cost to all but each `every`-th step, and measures it on those."""
    held = list(samples[::every])
    cost = fit([each for at, each in enumerate(samples) if at % every])
    errors = [abs(cost.seconds(load) / seconds - 1) for load, seconds in held]
    total = sum(cost.seconds(load) for load, _ in held) / sum(seconds for _, seconds in held) - 1
    return FittedCost(cost, len(samples) - len(held), len(held), float(np.median(errors)), total)


def variation_of(samples: Sequence[tuple[StepLoad, float]], cost: LinearCost) -> StepVariation:
    """Returns how steps differ from their fitted cost, in bins of as many steps each."""
    fitted = np.array([cost.seconds(load) for load, _ in samples])
    ratios = np.array([seconds for _, seconds in samples]) / fitted
    edges = np.quantile(fitted, np.linspace(0, 1, _BINS + 1)[1:-1])
    at = np.searchsorted(edges, fitted, side="right")
    middles = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    rows = [ratios[at == each] for each in range(_BINS)]
    return StepVariation(
        tuple(map(float, edges)),
        tuple(tuple(map(float, np.quantile(row if len(row) else ratios, middles))) for row in rows),
    )


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """A device with a model: the cost of its steps, the tokens of its K/V pool, of a step and of a sequence."""

    name: str
    cost: CostModel
    kv_tokens: int
    max_batch_tokens: int
    max_model_len: int


def load_device(name: str, seed: int = 0) -> SimulatedDevice:
    """Returns a preset, or reads a file that `device_json` wrote. `seed` is of its steps' variation, if it has one.

    Raises:
        CostError: there is no such preset or file, or the file has no costs.
    """
    if (preset := PRESETS.get(name)) is not None:
        shape = preset.shape
        free = _USED_SHARE * H200_BYTES - shape.weight_bytes
        return SimulatedDevice(
            name, preset, int(free) // shape.kv_bytes, GPU_STEP_TOKENS, shape.max_model_len
        )  # fmt: skip
    try:
        found = json.loads(Path(name).read_text("utf-8"))
        parts = [float(found["cost"][each]) for each in FEATURES]
        limits = [int(found[each]) for each in LIMITS]
        variation = None if found.get("variation") is None else _variation(**found["variation"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        accepted = f"{', '.join(PRESETS)}, or a JSON file with `cost` ({', '.join(FEATURES)}) and {', '.join(LIMITS)}"
        raise CostError(
            f"{name} is no cost of steps ({type(error).__name__}: {error}); accepted: {accepted}."
        ) from None
    if not all(np.isfinite(each) and each >= 0 for each in parts) or not sum(parts):
        raise CostError(f"{name} has costs {parts}; accepted: numbers of seconds, 0 or more, not all of them 0.")
    if min(limits) < 1:
        raise CostError(f"{name} has limits {limits}; accepted: {', '.join(LIMITS)} of 1 or more.")
    cost = LinearCost(*parts)
    return SimulatedDevice(name, cost if variation is None else ResampledCost(cost, variation, seed), *limits)


def _variation(edges: Sequence[float], ratios: Sequence[Sequence[float]]) -> StepVariation:
    found = StepVariation(tuple(map(float, edges)), tuple(tuple(map(float, row)) for row in ratios))
    rising = list(found.edges) == sorted(found.edges)
    if not rising or len(found.ratios) != len(found.edges) + 1 or not all(found.ratios):
        raise ValueError("the variation needs rising edges, and one row of ratios more than edges, none empty")
    if not all(np.isfinite(each) and each > 0 for row in found.ratios for each in row):
        raise ValueError("a ratio of the variation is not above 0")
    return found


def device_json(device: SimulatedDevice) -> dict[str, object]:
    """Returns what `load_device` reads.

    Raises:
        ValueError: its cost is of another kind.
    """
    limits = {each: getattr(device, each) for each in LIMITS}
    if isinstance(device.cost, ResampledCost):
        return {"cost": asdict(device.cost.cost), "variation": asdict(device.cost.variation), **limits}
    if not isinstance(device.cost, LinearCost):
        raise ValueError(f"the cost is a {type(device.cost).__name__}; accepted: LinearCost, ResampledCost.")
    return {"cost": asdict(device.cost), **limits}


def _non_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Solves min |a x - b| with x >= 0 (Lawson and Hanson 1974, chapter 23). Columns are scaled, as counts of pairs and
    of steps differ by many orders of magnitude."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    x, active = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(3 * a.shape[1]):
        gradient = np.where(active, -np.inf, a.T @ (b - a @ x))
        if gradient.max() <= 1e-10 * len(b):
            break
        active[gradient.argmax()] = True
        while True:
            solved = np.zeros_like(x)
            solved[active] = np.linalg.lstsq(a[:, active], b, rcond=None)[0]
            low = active & (solved <= 0)
            if not low.any():
                x = solved
                break
            step = np.min(x[low] / np.maximum(x[low] - solved[low], 1e-300))
            x = x + step * (solved - x)
            active &= x > 1e-15
    return x / scale
