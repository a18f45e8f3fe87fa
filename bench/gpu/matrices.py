"""Matrix products on a GPU, beside the device's ceilings.

The products are those of a decode of one row: bfloat16 by cuBLAS and by our own kernels, int8, int4, and the whole
step. Each kind of matrix is multiplied by so many weights in turn that they exceed the second-level cache. All other
parts are compared with the ceilings (copy, read, matmul).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.gpu import gpu_models
from bench.gpu.decoding import decoded, label
from bench.gpu.gpu_models import dtype_for
from bench.gpu.rows import Figure, Missing, rate_of, time_of, times_faster
from bench.gpu.setting import Setting
from engine.model.linear import Linear

GOALS: dict[gpu_models.Quantization, float] = {"int8": 1.7, "int4": 2.8}  # times as fast as bfloat16
Way = Callable[[Tensor], Linear]  # from a weight (out, in)


def ways() -> dict[str, Way]:
    """Returns how a weight may be laid out and multiplied; a new kernel is measured by one line here."""
    from engine.kernels.gemv import gemv_triton
    from engine.kernels.matmul import multiply_triton
    from engine.kernels.quantized import linear_triton, quantize

    def quantized(bits: int, group: int) -> Way:
        def pack(weight: Tensor) -> Linear:
            made = quantize(weight, bits, group)
            return lambda x: linear_triton(x, made)

        return pack

    return {
        "torch": lambda weight: lambda x: F.linear(x, weight),
        "one": lambda weight: lambda x: gemv_triton(x, weight),
        "invariant": lambda weight: lambda x: multiply_triton(x, weight),
        "int8": quantized(8, 0),
        "int4": quantized(4, 64),
    }


def matrices(setting: Setting) -> Iterator[Figure]:
    """Each kind of matrix of the first model."""
    name, goals = setting.sizes.models[0], {str(way): goal for way, goal in GOALS.items()}
    try:
        every = ways()
    except ImportError as error:
        raise Missing(f"kernels of products: {error}") from None
    for kind, (_, out, width) in gpu_models.matrices(gpu_models.spec_of(name)).items():
        base: list[float] = []
        for way, pack in every.items():
            setting.tidy()
            nbytes = 2 * out * width
            seconds = _multiplied(setting, pack, out, width, max(1, -(-setting.sizes.exceed_bytes // nbytes)))
            what = f"{kind} {out} x {width}, {way}"
            if way == "torch":
                base = seconds
                yield time_of(what, seconds, floor_s=nbytes / setting.ceiling("copy"))
            else:
                yield times_faster(what, base, seconds, goal=goals.get(way))


def _multiplied(setting: Setting, pack: Way, out: int, width: int, copies: int) -> list[float]:
    device, dtype = setting.device, gpu_models.dtype_for(setting.device)
    layers = [pack(torch.empty(out, width, device=device, dtype=dtype).normal_(0, width**-0.5)) for _ in range(copies)]
    x = torch.empty(1, width, device=device, dtype=dtype).normal_()

    def run() -> Tensor:
        return [layer(x) for layer in layers][-1]

    return [each / copies for each in setting.timer.times(setting.timer.recorded(run), setting.sizes.repeats)]


def quantized(setting: Setting) -> Iterator[Figure]:
    """Whole steps of one row with weights of fewer bits."""
    name = setting.sizes.models[0]
    what = label(name, 1)
    plain = setting.value("decode", what)
    base = [plain / 1e3] if plain is not None else [1e-3 * next(decoded(setting, name, (1,))).value]
    for quantization, goal in GOALS.items():
        (found,) = decoded(setting, name, (1,), quantization=quantization)
        seconds = [found.least / 1e3, found.value / 1e3, found.largest / 1e3]
        yield times_faster(
            f"{what}, {quantization}", base, seconds, goal=goal, of_its_own_floor=found.share, **found.more
        )


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
