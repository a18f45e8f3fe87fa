"""A program that launches every kernel as on a Hopper GPU, up to the point where the GPU would be needed.

Triton compiles a launch for what its arguments are: a size of 1, or of a multiple of 16, an address, a None. The
interpreter knows nothing of that, and the variants that are compiled ahead are chosen by hand; here it is the callers
that choose. Each launch is compiled by its real way; what comes out of it is whatever the memory held.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from engine.core.gpu_sampler import sample_on_device
from engine.core.sampling_types import RowSampling
from engine.kernels import blocks, experts, gated, lora, matmul, quantized, sampling, token_bitmask
from engine.kernels import logprobs as of_rows
from engine.kv_cache.quantized_cache import QuantizedCache
from engine.model import gpu_layers
from engine.model.batch import KVCache
from engine.model.decoder import Decoder, load_decoder
from engine.model.gpu_runner import GpuRunner
from engine.params import Sampling
from tests.engine.model import tiny
from tests.engine.model.stepping import Stepper

WIDE = {"hidden_size": 96, "head_dim": 32, "intermediate_size": 160, "vocab_size": 389, "num_hidden_layers": 2}
compiled: dict[str, int] = {}


class NoDevice:
    """Triton's queries of a driver before a launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def without_a_device() -> None:
    """From here on launches are compiled and go no further."""
    driver.set_active(NoDevice())
    launch = jit.JITFunction.run

    def dry(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:  # Any: Triton has no types
        assert all(0 < int(size) < 2**31 for size in grid), f"{self.__name__} is launched on {grid}"
        made = launch(self, *arguments, grid=grid, warmup=True, **options)
        compiled[self.__name__] = len(self.device_caches[0][0])
        return made

    jit.JITFunction.run = dry


def decoder(base: str, folder: Path, **changed: object) -> Decoder:
    config, model, overrides = tiny.MODELS[base]
    made = tiny.build(config, model, {**overrides, **WIDE, **changed})
    path = tiny.save(made.to(torch.bfloat16), folder / base)
    return load_decoder(path, dtype=torch.bfloat16, kernels="triton")


def run_models(folder: Path) -> None:
    """Prompts, decodes of one row and of several, a shared prefix; every kind of cache, windows, softcaps, norms; and
    the graphs of decodes and of steps with drafts."""
    for base, changed in (
        ("qwen3", {}),
        ("gemma2", {"sliding_window": 24}),
        ("olmo2", {"head_dim": None}),
        ("qwen2_moe", {}),
        ("gpt_oss", {}),
        ("ministral3", {}),
        ("cohere", {}),
        ("llama4", {"num_hidden_layers": 4}),
        ("gemma4", {"num_hidden_layers": 6, "global_head_dim": 64}),
        ("gemma4_moe", {"num_hidden_layers": 6, "global_head_dim": 64}),
    ):
        sizes = {key: value for key, value in changed.items() if value is not None}
        if base == "olmo2":
            sizes |= {"num_attention_heads": 3, "num_key_value_heads": 3}
        model = decoder(base, folder, **sizes)
        for kind in ("plain", "int8", "fp8") if base == "qwen3" else ("plain",):
            stepper = Stepper(model, [[5] * 420, [6] * 420, [7] * 30])
            shape = (model.spec.layers, 80, 16, model.spec.kv_heads, model.spec.head_dim)
            if kind == "int8":
                stepper._kv = QuantizedCache(*shape, torch.bfloat16, "cpu", "int8")
            elif kind == "fp8":
                stepper._kv = QuantizedCache(*shape, torch.bfloat16, "cpu", "fp8")
            else:
                stepper._kv = KVCache.of(model.spec, 80, 16, torch.bfloat16, "cpu")
            stepper._tables[1] = stepper._tables[0][:25] + stepper._tables[1][25:]
            for chunks in ([410, 410, 1], [2, 0, 20], [1, 1, 1], [1, 0, 0]):
                stepper.step(chunks)
            runner = GpuRunner(model, stepper._kv, model.device, max_rows=4, max_blocks=30, draft_width=4, trees=True)
            for graph in runner._graphs:
                graph.recorded.replay()


def run_the_rest() -> None:
    """Draws, log-probabilities, masks, copies, weights of all kinds and adapters, at both sides of each border."""
    told = Sampling(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1)
    for rows, vocabulary in ((1, 389), (3, 4096), (2, 70_000)):
        logits = torch.randn(rows, vocabulary)
        for draws in ([None] * rows, [RowSampling(told, 1, 0, 1, {}, {0}, logprobs=3)] * rows):
            prepare(logits, draws)
        bits = torch.full((1, -(-vocabulary // 32)), -1, dtype=torch.int32)
        token_bitmask.apply_token_bitmask_triton(logits, bits, torch.tensor([0]))
    cache = [torch.zeros(2, 2, 9, 16, 1, 32, dtype=torch.int8), torch.zeros(2, 2, 9, 16, 1)]
    blocks.copy_blocks_triton(cache, [(1, 2)])
    blocks.copy_blocks_triton(cache, [(1, 2), (2, 3), (4, 5)])
    rows_ = torch.empty(2, blocks.block_nbytes(cache), dtype=torch.uint8)
    blocks.gather_blocks_triton(cache, [1, 2], rows_)
    blocks.scatter_blocks_triton(cache, [1, 2], rows_)
    for width, height in ((512, 96), (100, 40), (256, 1)):
        for bits_, group in ((8, 0), (4, 64)):
            weight = quantized.quantize(torch.randn(height, width), bits_, group)
            for tokens in (1, 2, 3, 20, 100, 200):
                quantized.linear_triton(torch.randn(tokens, width, dtype=torch.bfloat16), weight)
            quantized.linear_triton(torch.randn(1, width, dtype=torch.bfloat16), weight, invariant=True)
    for rank in (1, 16):
        adapters = lora.pack([(torch.randn(rank, 96).bfloat16(), torch.randn(64, rank).bfloat16(), 1.0)])
        x, y = torch.randn(5, 96, dtype=torch.bfloat16), torch.zeros(5, 64, dtype=torch.bfloat16)
        lora.add_by_token_triton(y, x, adapters, torch.zeros(5, dtype=torch.int32))
        starts, which = torch.tensor([0, 1, 5], dtype=torch.int32), torch.tensor([0, -1], dtype=torch.int32)
        lora.add_by_run_triton(y, x, adapters, starts, which, 4)
    for tokens in (1, 70):
        matmul.multiply_triton(torch.randn(tokens, 64).bfloat16(), torch.randn(40, 64).bfloat16())
    gated.gated_triton(torch.randn(1, 2, dtype=torch.float16), "gelu")
    for bits_, group in ((8, 0), (4, 64)):
        opens, closes = (
            experts.expert_weights([quantized.quantize(torch.randn(*shape), bits_, group)] * 5, torch.bfloat16)
            for shape in ((80, 96), (96, 40))
        )
        for tokens in (1, 20, 300):
            chosen, weights = torch.zeros(tokens, 2, dtype=torch.int32), torch.ones(tokens, 2)
            x = torch.randn(tokens, 96, dtype=torch.bfloat16)
            experts.mix_triton(x, opens, closes, weights, chosen, "silu")


def prepare(logits: torch.Tensor, draws: Sequence[RowSampling | None]) -> None:
    """Launches a GPU's sampler."""
    sampling.sample, sampling.adjust = sampling.sample_triton, sampling.adjust_triton
    of_rows.logprobs = of_rows.logprobs_triton
    sample_on_device(logits, draws)


def main() -> int:
    gpu_layers._interpreted = lambda: True
    without_a_device()
    with tempfile.TemporaryDirectory() as folder:
        run_models(Path(folder))
    run_the_rest()
    for name, count in sorted(compiled.items()):
        print(f"{name}: {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
