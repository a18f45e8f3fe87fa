"""The setting of all parts: a device, a timer, sizes, earlier figures, and the time they have."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import torch

from bench.gpu.rows import Json, Missing
from bench.gpu.timing import Timer


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of everything measured."""

    models: tuple[str, ...] = ("llama-3-8b", "qwen3-0.6b", "qwen3-4b")
    batches: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 2048
    prompt: int = 8192
    repeats: int = 15
    copied_bytes: int = 4 << 30
    square: int = 8192  # of the matmul that is a device's best
    attention: tuple[tuple[int, int], ...] = ((1, 2048), (1, 32_768), (8, 2048), (64, 2048), (256, 2048), (16, 16_384))
    # bytes that one repeat reads at least: more than the second-level cache, and so many that starting does not count
    exceed_bytes: int = 2 << 30
    sampled: tuple[int, ...] = (1, 64, 256)
    branches: int = 16
    prefix: int = 4096
    own: int = 128  # tokens of a branch after the prefix
    engine_rows: int = 256
    engine_context: int = 1024
    engine_steps: int = 40
    engine_warm: int = 8  # steps that do not count
    most_batch_tokens: int = 8192
    compared: tuple[int, ...] = (1, 64)  # rows at which whole steps stand beside a peer's
    peers_s: float = 120.0  # seconds that they have of a run that has other parts
    layers: int | None = None  # None: all


TOY = Sizes(
    models=("toy",), batches=(1, 2), context=40, prompt=17, repeats=1, copied_bytes=1 << 16, square=64,
    attention=((2, 40),), exceed_bytes=1, sampled=(2,), branches=2, prefix=256, own=16, engine_rows=2,
    engine_context=8, engine_steps=1, engine_warm=1, most_batch_tokens=64, compared=(2,),
)  # fmt: skip


@dataclass
class Setting:
    """One run. `results` are the parts that were measured so far, by name."""

    device: torch.device
    timer: Timer
    sizes: Sizes = field(default_factory=Sizes)
    until: float = float("inf")  # by the timer's clock
    results: Json = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        return self.until - self.timer.now()

    def ceiling(self, name: str) -> float:
        """`copy` and `read` in bytes a second, `matmul` in operations a second.

        Raises:
            Missing: ceilings were not measured yet.
        """
        for figure in self.results.get("ceilings", {}).get("figures", ()):
            if figure["what"] == name:
                return float(figure["more"]["a_second"])
        raise Missing("the part ceilings, which others are held to")

    def value(self, part: str, what: str) -> float | None:
        """A figure of another part, at any context it was cut to; None if it was not measured."""
        for figure in self.results.get(part, {}).get("figures", ()):
            if figure["what"] == what or figure["what"].startswith(f"{what} of "):
                return float(figure["value"])
        return None

    def free_bytes(self) -> int:
        """Of the device, but for a tenth that graphs and libraries want."""
        if self.device.type != "cuda":
            return 1 << 62
        free, total = torch.cuda.mem_get_info(self.device)
        return free - total // 10

    def tidy(self) -> None:
        """Free the memory of dropped objects."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
