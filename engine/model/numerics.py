"""The arithmetic of an engine: everything that a token's bits depend on beside the model's files and the request.

Plain data, compared and recorded: traces and journals keep it, so that a replay or a continuation knows whether the
same tokens can be expected. Knows nothing of torch, which `engine.builder` asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Numerics:
    """Engines of equal numerics compute the same bits for the same steps.

    Where they are `batch_invariant`, a token's bits depend on its own sequence alone: neither on the rest of a step,
    nor on the chunks or the cached part of a prompt. Elsewhere equal numerics give equal tokens up to rounding, which
    now and then decides the sampled token.
    """

    dtype: str
    kernels: str  # torch, AMX, AVX512-BF16, AVX512-VNNI, AVX2, NEON-DOTPROD, NEON, Triton; torch on so many ranks
    quantization: str
    kv_dtype: str
    device: str  # cpu, cuda
    processor: str  # the GPU's name; of a CPU the features that its kernels choose by
    threads: int  # of the CPU; 0 where bits do not depend on their number
    torch: str  # version
    batch_invariant: bool

    def differences(self, before: Numerics) -> list[str]:
        """Returns the differences from `before`, each as a few words."""
        pairs = ((each.name, getattr(before, each.name), getattr(self, each.name)) for each in fields(self))
        return [f"{name} was {was}, is {now}" for name, was, now in pairs if was != now]

    def recorded(self) -> dict[str, Any]:
        """Returns it as JSON. Any: strings, a number and a truth."""
        return asdict(self)

    @classmethod
    def restored(cls, recorded: Mapping[str, Any]) -> Numerics:
        """Restores the result of `recorded`. Any: JSON.

        Raises:
            ValueError: it is something else.
        """
        types = {"threads": int, "batch_invariant": bool}
        names = {each.name for each in fields(cls)}
        if set(recorded) != names or any(type(recorded[name]) is not types.get(name, str) for name in names):
            raise ValueError(f"These are no numerics; accepted: {', '.join(sorted(names))}.")
        return cls(**recorded)
