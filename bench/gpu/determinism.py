"""What it costs that a request's bits depend on nothing beside it: the same steps, with and without."""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.decoding import decoded
from bench.gpu.prefill import prefilled
from bench.gpu.rows import Figure, times_faster
from bench.gpu.setting import Setting


def deterministic(setting: Setting) -> Iterator[Figure]:
    """Of the first model. A share of 0.8 means that a step takes a quarter longer."""
    name = setting.sizes.models[0]
    batches = tuple(rows for rows in setting.sizes.batches if rows <= 64)
    for found in decoded(setting, name, batches, deterministic=True):
        plain = setting.value("decode", found.what)
        base = [plain / 1e3] if plain is not None else [found.value / 1e3]
        if plain is not None:
            yield times_faster(f"{found.what}, deterministic", base, [found.value / 1e3])
    found = prefilled(setting, name, deterministic=True)
    plain = setting.value("prefill", found.what)
    if plain is not None:
        amount = found.more["flops"] / 1e12
        yield times_faster(f"{found.what}, deterministic", [amount / plain], [amount / found.value])
