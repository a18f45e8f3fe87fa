"""Masks and sampling as a share of the step that they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from bench.gpu import gpu_models
from bench.gpu.decoding import label
from bench.gpu.rows import Figure, Missing, time_of
from bench.gpu.setting import Setting

GOAL = 0.02  # of a step, at most


def sampling(setting: Setting) -> Iterator[Figure]:
    """Rows that all have a mask, and sample with top-k, top-p and min-p at once."""
    try:
        from engine.kernels import sampling as kernels
        from engine.kernels import token_bitmask
    except ImportError as error:
        raise Missing(f"kernels of sampling: {error}") from None
    device, name = setting.device, setting.sizes.models[0]
    vocabulary = gpu_models.spec_of(name).vocab_size
    for rows in setting.sizes.sampled:
        setting.tidy()
        logits = torch.empty(rows, vocabulary, device=device).normal_(0, 3)
        bits = torch.randint(-(2**31), 2**31, (rows, -(-vocabulary // 32)), device=device).to(torch.int32)
        every = torch.arange(rows, device=device)
        asked = kernels.pack([0.8] * rows, [50] * rows, [0.95] * rows, [0.05] * rows, list(range(1, rows + 1)))
        parameters = torch.from_numpy(asked).to(device)

        def run(
            logits: Tensor = logits, bits: Tensor = bits, every: Tensor = every, parameters: Tensor = parameters
        ) -> Tensor:
            token_bitmask.apply_token_bitmask_triton(logits, bits, every)
            return kernels.sample_triton(logits, parameters)

        seconds = setting.timer.times(setting.timer.recorded(run), setting.sizes.repeats)
        step_ms = setting.value("decode", label(name, rows))
        found = time_of(f"mask and draw, {rows} rows of {vocabulary}", seconds, step_ms=step_ms, bytes=logits.nbytes)
        share = None if step_ms is None else found.value / step_ms
        yield replace(found, share=share, goal=GOAL, most=True)
