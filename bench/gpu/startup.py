"""Measures how long it takes until a model's first token: kernels are compiled, graphs recorded.

`python -m bench.gpu.startup MODEL ROWS CONTEXT` prints it as JSON; the part runs that in processes of their own, once
with no compiled kernel on the disk and once with all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from bench.gpu import gpu_models, steps
from bench.gpu.rows import Figure, Missing, time_of
from bench.gpu.setting import Setting

GOAL_S = 30.0
ROWS = 64  # rows of an engine's graphs by default


def startup(setting: Setting) -> Iterator[Figure]:
    """Of the first model, its weights made and not read."""
    name, context = setting.sizes.models[0], setting.sizes.context
    if setting.device.type != "cuda":
        phases = started(name, 2, context, setting.device)
        yield _figure(f"{name}, in this process", phases)
        return
    setting.tidy()
    with tempfile.TemporaryDirectory() as folder:
        for what in ("nothing compiled", "all compiled"):
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "bench.gpu.startup", name, str(ROWS), str(context)],
                    capture_output=True, text=True, env=os.environ | {"TRITON_CACHE_DIR": folder},
                    timeout=max(1.0, min(180.0, setting.left_s)),
                )  # fmt: skip
            except subprocess.TimeoutExpired as late:
                raise Missing(f"time, a start had {late.timeout:.0f} s") from None
            if done.returncode:
                raise RuntimeError(done.stderr[-400:])
            yield _figure(f"{name}, {what}", json.loads(done.stdout.strip().splitlines()[-1]))


def _figure(what: str, phases: dict[str, float]) -> Figure:
    whole = phases["graphs"] + phases["prompt"]
    found = time_of(what, [whole], floor_s=GOAL_S, parts_s=phases)
    return replace(found, share=whole / GOAL_S, goal=1.0, most=True)


@torch.inference_mode()
def started(name: str, rows: int, context: int, device: torch.device) -> dict[str, float]:
    """Seconds of making the weights, of graphs with the kernels that they want, and of a first prompt."""
    before = time.perf_counter()
    decoder = gpu_models.random_decoder(name, device)
    blocks = steps.blocks_of(rows, context)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 62
    blocks = min(blocks, free * 3 // 4 // gpu_models.kv_bytes(decoder.spec, steps.BLOCK))
    kv = steps.cache_for(decoder.spec, blocks, decoder.dtype, device)
    _wait(device)
    weights = time.perf_counter()
    runner = steps.runner_for(decoder, kv, device, rows=rows, context=context)
    _wait(device)
    graphs = time.perf_counter()
    runner.run(steps.prefill(steps.sequences(1, min(context, 512), decoder.spec.vocab_size)))
    _wait(device)
    return {"weights": weights - before, "graphs": graphs - weights, "prompt": time.perf_counter() - graphs}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(json.dumps(started(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), torch.device("cuda"))))
