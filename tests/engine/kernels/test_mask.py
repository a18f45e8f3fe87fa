"""The mask kernel and its twin against a loop over bits; the kernel interpreted, compiled ahead, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from engine.kernels.mask import forbid_torch, forbid_triton

SHAPES = [(1, 5, 1), (4, 64, 2), (3, 1000, 3), (7, 2049, 4), (3, 151_936, 2)]  # rows, vocabulary, constrained rows


def case(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Logits, bits and rows, and what must come out, by a loop."""
    n, vocabulary, m = shape
    generator = torch.Generator().manual_seed(hash(shape) % 1000)
    logits = torch.randn(n, vocabulary, generator=generator).to(dtype)
    bits = torch.randint(-(2**31), 2**31, (m, -(-vocabulary // 32)), generator=generator).to(torch.int32)
    if vocabulary > 2000:  # few tokens are forbidden, as within a string
        bits[0] = torch.where(torch.arange(bits.shape[1]) % 9 == 0, bits[0], -1)
    if vocabulary > 100_000:
        bits[-1, 20:] = 0  # few tokens are allowed, as within a key
    rows = torch.randperm(n, generator=generator)[:m]
    wanted = logits.clone()
    for i, row in enumerate(rows.tolist()):
        words = [word & 0xFFFFFFFF for word in bits[i].tolist()]
        forbidden = [t for t in range(vocabulary) if not words[t // 32] >> (t % 32) & 1]
        wanted[row, forbidden] = float("-inf")
    return logits.to(device), bits.to(device), rows.to(device), wanted.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_twin_forbids_where_a_bit_is_zero(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    logits, bits, rows, wanted = case(shape, dtype, "cpu")
    for _ in range(3):  # a mask that comes again may be remembered
        again = logits.clone()
        forbid_torch(again, bits, rows)
        assert torch.equal(again, wanted)


INTERPRETED = """
import torch
from engine.kernels.mask import forbid_triton
from tests.engine.kernels.test_mask import SHAPES, case
for shape in SHAPES[:-1]:
    logits, bits, rows, wanted = case(shape, torch.float32, "cpu")
    forbid_triton(logits, bits, rows)
    assert torch.equal(logits, wanted), shape
print("same")
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from engine.kernels.mask_triton import forbid_kernel
for capability in (80, 90, 100):
    signature = {"logits": "*fp32", "bits": "*i32", "rows": "*i64", "vocabulary": "i32", "logits_stride": "i64",
                 "bits_stride": "i64", "block": "constexpr"}
    source = ASTSource(forbid_kernel, signature, {"block": 1024})
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert "st.global" in made.asm["ptx"], capability
print("compiled")
"""


def in_a_process(program: str, **environment: str) -> str:
    """Triton reads its environment when it is imported, so each way of running it has a process of its own."""
    pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")
    settings = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1", **environment}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_kernel_interpreted_does_the_same() -> None:
    assert in_a_process(INTERPRETED, TRITON_INTERPRET="1") == "same"


def test_the_kernel_compiles_ahead_for_three_generations() -> None:
    assert in_a_process(COMPILED) == "compiled"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_on_a_gpu_does_the_same(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    logits, bits, rows, wanted = case(shape, dtype, "cuda")
    forbid_triton(logits, bits, rows)
    assert torch.equal(logits, wanted)
    twin, bits, rows, wanted = case(shape, dtype, "cuda")
    forbid_torch(twin, bits, rows)
    assert torch.equal(twin, wanted)
