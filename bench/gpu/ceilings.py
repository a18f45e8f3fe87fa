"""What the device can do at best: copy, read, and multiply. All else is held to these."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from bench.gpu.models import dtype_for
from bench.gpu.rows import Figure, rate_of
from bench.gpu.setting import Setting


def ceilings(setting: Setting) -> Iterator[Figure]:
    """Figures that other parts find by name."""
    yield from _memory(setting)
    setting.tidy()
    yield _products(setting)


def _memory(setting: Setting) -> list[Figure]:
    sizes, timer = setting.sizes, setting.timer
    source = torch.empty(sizes.copied_bytes // 2, dtype=torch.bfloat16, device=setting.device).normal_()
    target = torch.empty_like(source)
    copied = timer.times(lambda: target.copy_(source), sizes.repeats)
    read = timer.times(lambda: source.view(torch.int32).amax(), sizes.repeats)
    return [
        _rate("copy", copied_bytes(source.nbytes), copied, "GB/s", 1e9),
        _rate("read", source.nbytes, read, "GB/s", 1e9),
    ]


def _products(setting: Setting) -> Figure:
    side, dtype = setting.sizes.square, dtype_for(setting.device)
    one, two = (torch.empty(side, side, device=setting.device, dtype=dtype).normal_() for _ in range(2))
    out = torch.empty_like(one)
    seconds = setting.timer.times(lambda: torch.mm(one, two, out=out), setting.sizes.repeats)
    return _rate("matmul", matmul_flops(side, side, side), seconds, "TFLOP/s", 1e12)


def copied_bytes(nbytes: int) -> int:
    """Read and written."""
    return 2 * nbytes


def matmul_flops(rows: int, columns: int, inner: int) -> int:
    return 2 * rows * columns * inner


def _rate(what: str, amount: int, seconds: list[float], unit: str, of: float) -> Figure:
    return rate_of(what, amount / of, seconds, unit, a_second=amount / statistics.median(seconds), moved_or_made=amount)
