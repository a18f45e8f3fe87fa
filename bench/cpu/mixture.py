"""Decoding of one row through layers of a mixture, against the bytes of the experts that it chooses.

The layers have Qwen3-30B-A3B's published shape and random weights, and every step chooses other experts. The floor of a
step is the bytes that it reads, of attention's matrices, routers, chosen experts and K/V, over the memory's bandwidth,
measured between the steps. The vocabulary is small, so that the logits count for little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.cpu.steps import laid_step
from engine.config import QuantizationName
from engine.families import family_of
from engine.model.decoder import Decoder
from engine.model.loader import Weights
from engine.model.model_spec import ModelSpec

CONTEXT = 512
BITS = {"none": 16.0, "int8": 8.0, "int4": 4.5}  # of a weight; 4 bits have a scale of 16 for 32 columns
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 1024, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip


class RepeatedWeights(Weights):
    """Weights of any name and shape; those of one shape are the same numbers, packed apart."""

    def __init__(self) -> None:
        super().__init__(Path("random"))
        self._made: dict[tuple[int, ...], Tensor] = {}

    def names(self) -> Iterable[str]:
        return ()

    def parameters(self) -> int:
        return 0

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if "gate.weight" in name:  # routers differ, so layers choose other experts
            return torch.randn(shape)
        if shape not in self._made:
            self._made[shape] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape).mul_(0.02).bfloat16()
        return self._made[shape]


def step_bytes(spec: ModelSpec, quantization: str) -> float:
    """Returns the bytes that a step of one row reads, of the matrices and the K/V."""
    experts = spec.experts
    assert experts is not None
    heads, sides = spec.heads * spec.head_dim, 2 * spec.kv_heads * spec.head_dim
    rounded = spec.hidden_size * (2 * heads + sides)
    rounded += experts.per_token * 3 * spec.hidden_size * experts.intermediate_size
    exact = 4 * experts.count * spec.hidden_size + 2 * CONTEXT * sides
    head = spec.vocab_size * spec.hidden_size * (2 if quantization == "none" else 1)
    return head + spec.layers * (rounded * BITS[quantization] / 8 + exact)


def measured(quantization: QuantizationName, layers: int, threads: int, turns: int) -> dict[str, Any]:
    """Returns the best and the median step and bandwidth of so many turns, with ratios to the floor, as plain JSON.

    With one thread the clock is the thread's processor time, which others on the machine trouble less.
    """
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    config = {**CONFIG, "num_hidden_layers": layers}
    family = family_of(config)
    decoder = Decoder(
        family.spec(config), family.names(config), RepeatedWeights(),
        dtype=torch.bfloat16, device=torch.device("cpu"), quantization=quantization,
    )  # fmt: skip
    batch, kv = laid_step(decoder, 1, CONTEXT, 1)
    nbytes, read = step_bytes(decoder.spec, quantization), torch.ones(1 << 26)
    steps, sums = list[float](), list[float]()
    for _ in range(turns):
        for _ in range(8):
            batch.token_ids.random_(decoder.spec.vocab_size)
            start = clock()
            decoder.forward(batch, kv)
            steps.append(clock() - start)
        start = clock()
        read.sum()
        sums.append(clock() - start)
    found: dict[str, Any] = {"layers": layers, "threads": threads, "clock": clock.__name__, "bytes": nbytes}
    for name, of in (("best", min), ("median", statistics.median)):
        step, bandwidth = of(steps), read.nbytes / of(sums)
        ratio = step * bandwidth / nbytes
        found[name] = {"ms": 1e3 * step, "read_gb_per_s": bandwidth / 1e9, "to_floor": ratio}
    return found
