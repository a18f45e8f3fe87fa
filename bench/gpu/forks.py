"""Branches on one prefix, read once for all of them, beside the same branches read each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bench.gpu import gpu_models, steps
from bench.gpu.attending import attended, kv_bytes, shape_of
from bench.gpu.rows import Figure, times_faster
from bench.gpu.setting import Setting

GOAL = 3.0


def forks(setting: Setting) -> Iterator[Figure]:
    """Attention alone, which has the goal, and the whole step."""
    sizes, spec = setting.sizes, shape_of(setting)
    setting.tidy()
    context = sizes.prefix + sizes.own
    branches = steps.sequences(sizes.branches, context, spec.vocab_size, shared=sizes.prefix)
    caches = max(1, -(-sizes.exceed_bytes // kv_bytes(spec, sizes.prefix + sizes.branches * sizes.own)))
    apart, together = (attended(setting, spec, branches, caches, cascade=each) for each in (False, True))
    what = f"{sizes.branches} branches on {sizes.prefix} tokens"
    yield times_faster(f"{what}, attention", apart, together, goal=GOAL, own=sizes.own)
    apart, together = (_step(setting, cascade=each) for each in (False, True))
    yield times_faster(f"{what}, step of {sizes.models[0]}", apart, together)


def _step(setting: Setting, *, cascade: bool) -> list[float]:
    sizes, device = setting.sizes, setting.device
    setting.tidy()
    context = sizes.prefix + sizes.own
    decoder = gpu_models.random_decoder(sizes.models[0], device, layers=sizes.layers)
    decoder.packed_for = decoder.packed_for.limited(lambda limits: replace(limits, cascade=cascade))
    branches = steps.sequences(sizes.branches, context, decoder.spec.vocab_size, shared=sizes.prefix)
    blocks = steps.blocks_of(sizes.branches, context, sizes.prefix)
    kv = steps.cache_for(decoder.spec, blocks, decoder.dtype, device)
    runner = steps.runner_for(decoder, kv, device, rows=sizes.branches, context=context)
    return setting.timer.times(steps.graph_of(runner, steps.decode(branches)), sizes.repeats)
