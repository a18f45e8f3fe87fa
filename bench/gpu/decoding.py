"""Decode and prefill on a GPU, and the cost of determinism.

Decode steps run as the runner's graphs, and are compared with the time that reading their bytes takes. Prefill is a
long prompt in one step, compared with the rate of the largest matrix product. Only the device's work is timed: the step
is packed and sent beforehand, which the engine does while the device computes another step. That time is reported as
`packing_ms`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from bench.gpu import gpu_models, steps
from bench.gpu.rows import Figure, Missing, rate_of, time_of, times_faster
from bench.gpu.setting import Setting
from engine.model.model_spec import ModelSpec

GOALS = {1: 0.85, 64: 0.75}  # of the floor, by rows


def decode(setting: Setting) -> Iterator[Figure]:
    """Every model at every number of rows."""
    for name in setting.sizes.models:
        yield from decoded(setting, name, setting.sizes.batches)


def decoded(
    setting: Setting,
    name: str,
    batches: tuple[int, ...],
    *,
    quantization: gpu_models.Quantization = "none",
    deterministic: bool = False,
) -> Iterator[Figure]:
    """One model; where a batch's K/V does not fit, its contexts are as long as do."""
    sizes, device = setting.sizes, setting.device
    setting.tidy()
    decoder = gpu_models.random_decoder(
        name, device, quantization=quantization, deterministic=deterministic, layers=sizes.layers
    )
    spec, most = decoder.spec, max(batches)
    fitting = setting.free_bytes() // gpu_models.kv_bytes(spec, steps.BLOCK) - 1
    contexts = {rows: context_for(rows, sizes.context, fitting) for rows in batches}
    if contexts[most] < steps.BLOCK:
        raise Missing(f"memory for {most} rows of {name}")
    blocks = max(steps.blocks_of(rows, context) for rows, context in contexts.items())
    kv = steps.cache_for(spec, blocks, decoder.dtype, device)
    runner = steps.runner_for(decoder, kv, device, rows=most, context=sizes.context)
    weights = held_bytes(spec, quantization)
    for rows in batches:
        context = contexts[rows]
        step = steps.decode(steps.sequences(rows, context, spec.vocab_size, seed=rows))
        seconds = setting.timer.times(steps.graph_of(runner, step), sizes.repeats)
        read = weights + gpu_models.kv_bytes(spec, rows * context)
        yield time_of(
            label(name, rows) + ("" if context == sizes.context else f" of {context}"),
            seconds,
            floor_s=read / setting.ceiling("copy"),
            goal=None if deterministic or quantization != "none" else GOALS.get(rows),
            tokens_per_s=rows / statistics.median(seconds), context=context, bytes=read, layers=spec.layers,
        )  # fmt: skip


def label(name: str, rows: int) -> str:
    """The key by which other parts find a figure; its name goes on where its context is not the one asked for."""
    return f"{name}, {rows} rows"


def held_bytes(spec: ModelSpec, quantization: gpu_models.Quantization) -> int:
    """Of the weights that a step reads: at 4 bits with a bfloat16 scale for 64 of them, and logits in 8 bits."""
    whole = gpu_models.weight_bytes(spec)
    if quantization == "none":
        return whole
    head = spec.vocab_size * spec.hidden_size
    rest = whole // 2 - head
    return head + (rest if quantization == "int8" else rest // 2 + rest * 2 // 64)


def context_for(rows: int, wanted: int, blocks: int) -> int:
    """Tokens of each row, where so many blocks fit."""
    return min(wanted, blocks // rows * steps.BLOCK)


GOAL = 0.70


def prefill(setting: Setting) -> Iterator[Figure]:
    for name in setting.sizes.models:
        yield prefilled(setting, name)


def prefilled(setting: Setting, name: str, *, deterministic: bool = False) -> Figure:
    """One model."""
    sizes, device = setting.sizes, setting.device
    setting.tidy()
    decoder = gpu_models.random_decoder(name, device, deterministic=deterministic, layers=sizes.layers)
    spec, tokens = decoder.spec, sizes.prompt
    kv = steps.cache_for(spec, steps.blocks_of(1, tokens), decoder.dtype, device)
    runner = steps.runner_for(decoder, kv, device, rows=1, context=tokens, graphs=False)
    step = steps.prefill(steps.sequences(1, tokens, spec.vocab_size))
    steps.forward_of(runner, step)  # the first time there are buffers to be made
    began = setting.timer.now()
    run = steps.forward_of(runner, step)
    packing = setting.timer.now() - began
    seconds = setting.timer.times(run, max(2, sizes.repeats // 3))
    flops = gpu_models.prefill_flops(spec, tokens)
    return rate_of(
        f"{name}, {tokens} tokens", flops / 1e12, seconds, "TFLOP/s", limit=setting.ceiling("matmul") / 1e12,
        goal=None if deterministic else GOAL, ms=sorted(1e3 * each for each in seconds)[len(seconds) // 2],
        packing_ms=1e3 * packing, flops=flops, layers=spec.layers,
    )  # fmt: skip


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
