"""Measures which shapes of the kernels are fastest on the GPU that is here, and keeps them.

`python -m engine.kernels.tune [--out FOLDER] [--minutes N]` writes a file that later starts find. Each problem is timed
with every candidate on fresh random data, with nothing left of it in the second-level cache; a candidate that the
device cannot hold is passed over. Knows problems and candidates; nothing of models.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.kernels.gpu import tuned

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TuningProblem:
    """One launch that is worth a shape of its own. `run` launches it with a shape, having been made by `make` once."""

    kernel: str
    key: tuple[object, ...]
    candidates: Sequence[Shape]
    make: Callable[[], Callable[[Shape], object]]


def fastest(
    problem: TuningProblem, rule: Shape, milliseconds: Callable[[Callable[[], object]], float]
) -> tuple[Shape, dict[Shape, float]]:
    """Returns the best shape of a problem, and the time of each; the rule's where nothing is more than 2% faster."""
    run, took = problem.make(), dict[Shape, float]()
    for shape in dict.fromkeys([rule, *problem.candidates]):
        try:
            took[shape] = milliseconds(lambda shape=shape: run(shape))  # type: ignore[misc]
        except Exception as error:  # Triton and the driver have several for shapes that do not fit
            print(f"  {shape}: {type(error).__name__}", file=sys.stderr)
    best = min(took, key=lambda shape: took[shape])
    return (best if rule not in took or took[best] < 0.98 * took[rule] else rule), took


def attention_problems() -> Iterator[tuple[TuningProblem, Shape]]:
    """Yields decodes, shared prefixes and prompts, for the head sizes of models."""
    from engine.kernels.gpu.attention import padded_to, ruled

    for width, rows, quantized in itertools.product((64, 128, 256), (16, 64, 128), (False, True)):
        if width == 256 and rows == 128:
            continue
        key = (padded_to(width), rows, 1 if quantized else 2)
        candidates = [
            (rows, tile, warps, stages) for tile, warps, stages in itertools.product((32, 64), (4, 8), (2, 3, 4, 5, 6))
        ]
        rule = ruled(width, rows, key[2])
        runs = partial(_attention, width, rows, quantized)
        yield TuningProblem("attention", key, candidates, runs), rule


def _attention(
    width: int,
    rows: int,
    quantized: bool,
    *,
    device: str = "cuda",
    context: int = 4096,
    count: int = 64,
    kv_heads: int = 8,
) -> Callable[[Shape], object]:
    """`count` rows of `context` tokens, with query heads in groups of 4; as a prompt, one row of as many."""
    import numpy as np

    from engine.kernels import attention, work
    from engine.kv_cache.quantized_cache import QuantizedCache

    block, group = 16, 4
    count = 1 if rows == 128 else count
    blocks = count * context // block + 1
    tables = (torch.randperm(blocks - 1) + 1).view(count, -1).numpy()
    if rows == 64:
        tables[:] = tables[0]
    starts = np.array([0, context]) if rows == 128 else np.arange(count + 1)
    cut = work.cut(
        work.Rows(starts, np.full(count, context), tables, block),
        work.WorkLimits(group, 66, large_tile=rows if rows > 16 else 64, cascade=rows == 64),
    )
    layer = torch.randn(2, blocks, block, kv_heads, width, device=device, dtype=torch.bfloat16)
    cache: attention.Cache = layer
    if quantized:
        cache = QuantizedCache(1, blocks, block, kv_heads, width, torch.bfloat16, device).layers()[0]
        cache.store(torch.arange(blocks * block, device=device), layer.view(2, -1, kv_heads, width))
    tokens = int(starts[-1])
    query = torch.randn(tokens, kv_heads * group, width, device=device, dtype=torch.bfloat16)
    positions = torch.arange(context - tokens, context) if rows == 128 else torch.full((tokens,), context - 1)

    def moved(array: object) -> torch.Tensor:
        return torch.as_tensor(array, dtype=torch.int32, device=device)

    pieces = attention.Pieces(
        moved(cut.blocks), moved(cut.small) if len(cut.small) else None, moved(cut.large) if len(cut.large) else None,
        moved(cut.order), moved(cut.merged), moved(cut.starts), moved(cut.parts),
        torch.empty(cut.slots, kv_heads * group, width, device=device),
        torch.empty(cut.slots, kv_heads * group, device=device), rows if rows > 16 else 64,
    )  # fmt: skip
    at = moved(positions)
    return lambda shape: attention.attend_triton(query, cache, pieces, at, scale=width**-0.5, shapes={rows: shape})


def one_token_problems() -> Iterator[tuple[TuningProblem, Shape]]:
    """Yields the products of one token, for matrices of common models."""
    from engine.kernels.gpu.gemv import ruled

    for rows, width, gated in (
        (6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False), (128256, 4096, False),
        (4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False), (151936, 1024, False),
        (6144, 2560, False), (2560, 4096, False), (9728, 2560, True), (2560, 9728, False), (151936, 2560, False),
    ):  # fmt: skip
        candidates = [
            (height, columns, warps, 1)
            for height, columns, warps in itertools.product((1, 2, 4, 8, 16), (256, 512, 1024, 2048), (2, 4, 8))
            if height * columns // (32 * warps) in (16, 32, 64)
        ]
        rule = ruled(rows, width, gated=gated)
        runs = partial(_one, rows, width, gated)
        yield TuningProblem("one", (rows, width, gated), candidates, runs), rule


def _one(rows: int, width: int, gated: bool, *, device: str = "cuda") -> Callable[[Shape], object]:
    from engine.kernels import gemv
    from engine.kernels.norm import Norm

    x = torch.randn(1, width, device=device, dtype=torch.bfloat16)
    weight = torch.randn(rows * (2 if gated else 1), width, device=device, dtype=torch.bfloat16)
    norm = Norm(torch.randn(width, device=device), 1e-6)
    return lambda shape: gemv.gemv_triton(
        x, weight, norm=norm, activation="silu" if gated else None, shape=shape
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.tune", description=__doc__)
    parser.add_argument("--out", type=Path, default=tuned.own_folder(), help="a folder; default: the user's own")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no problem after so long")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no CUDA device here; there is nothing to tune.")
        return 1
    from triton.testing import do_bench

    device = torch.cuda.get_device_name()
    shapes = tuned.read(device, [asked.out])
    file = asked.out / tuned.file_name(device)
    until = time.monotonic() + 60 * asked.minutes
    for problem, rule in itertools.chain(one_token_problems(), attention_problems()):
        if time.monotonic() > until:
            print("The time is over; what is missing goes by rule.")
            break
        best, took = fastest(problem, rule, lambda run: float(do_bench(run, warmup=10, rep=40, return_mode="median")))
        name = tuned.key(problem.kernel, problem.key)
        shapes[name] = list(best)
        gain = took[rule] / took[best] if rule in took else float("nan")
        print(f"{name:40} {best} {took[best]:.4f} ms, {gain:.2f} times as fast as {rule}", flush=True)
        _write(file, device, shapes)
    return 0


def _write(file: Path, device: str, shapes: Mapping[str, Sequence[int]]) -> None:
    import triton

    file.parent.mkdir(parents=True, exist_ok=True)
    made = {"device": device, "torch": torch.__version__, "triton": triton.__version__, "shapes": shapes}
    file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
