"""A long prompt in one step, beside the rate of the largest product.

Only what the device does is in it: the step is packed and sent beforehand, which the engine does while the device still
computes another. How long that takes is told beside.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu import models, steps
from bench.gpu.rows import Figure, rate_of
from bench.gpu.setting import Setting

GOAL = 0.70


def prefill(setting: Setting) -> Iterator[Figure]:
    for name in setting.sizes.models:
        yield prefilled(setting, name)


def prefilled(setting: Setting, name: str, *, deterministic: bool = False) -> Figure:
    """One model."""
    sizes, device = setting.sizes, setting.device
    setting.tidy()
    decoder = models.random_decoder(name, device, deterministic=deterministic, layers=sizes.layers)
    spec, tokens = decoder.spec, sizes.prompt
    kv = steps.cache_for(spec, steps.blocks_of(1, tokens), decoder.dtype, device)
    runner = steps.runner_for(decoder, kv, device, rows=1, context=tokens, graphs=False)
    step = steps.prefill(steps.sequences(1, tokens, spec.vocab_size))
    steps.forward_of(runner, step)  # the first time there are buffers to be made
    began = setting.timer.now()
    run = steps.forward_of(runner, step)
    packing = setting.timer.now() - began
    seconds = setting.timer.times(run, max(2, sizes.repeats // 3))
    flops = models.prefill_flops(spec, tokens)
    return rate_of(
        f"{name}, {tokens} tokens", flops / 1e12, seconds, "TFLOP/s", limit=setting.ceiling("matmul") / 1e12,
        goal=None if deterministic else GOAL, ms=sorted(1e3 * each for each in seconds)[len(seconds) // 2],
        packing_ms=1e3 * packing, flops=flops, layers=spec.layers,
    )  # fmt: skip
