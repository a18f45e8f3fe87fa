"""Kernels compile with no GPU at hand: here one of each file, by `make kernels` all of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def listed(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: kernels imported under the interpreter cannot be compiled."""
    pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "engine.kernels.ahead", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_kernel_is_compiled_for_three_generations() -> None:
    done = listed("--only", "mask fp32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 compiled and fit, 0 did not" in done.stdout


def test_one_kernel_of_each_file_is_compiled_for_hopper() -> None:
    """`make kernels` compiles all of them, for all."""
    done = listed("--sample", "--capability", "90")
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in (
        "attention",
        "qkv",
        "norm",
        "gated",
        "one token",
        "matmul",
        "quantized",
        "lora",
        "sampling",
        "blocks",
        "experts",
    ):
        assert f"\n{kernel} " in done.stdout


def test_asking_for_no_kernel_fails() -> None:
    assert listed("--only", "there is none of this name").returncode == 1
