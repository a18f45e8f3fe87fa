"""Host memory that a GPU copies to and from by itself, of as many bytes as are asked for.

torch's own page-locked memory comes in powers of two: that of a tier would be up to twice what it may have. So this is
ordinary memory, registered with the driver.
"""

from __future__ import annotations

import contextlib
import logging

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def lock(memory: Tensor) -> bool:
    """Page-lock a tensor's memory; where that is refused it says so, and copies take longer. What is locked has to be
    unlocked before it is given back.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        _forget_error()
        log.warning(
            "%d bytes of host memory could not be page-locked (CUDA error %d): copies of K/V hold up steps",
            memory.nbytes, code,
        )  # fmt: skip
    return not code


def unlock(memory: Tensor) -> None:
    """Nothing may be copied to or from it any more."""
    code = int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
    if code:
        _forget_error()
        log.warning("host memory could not be unlocked (CUDA error %d)", code)


def _forget_error() -> None:
    """CUDA remembers what failed until somebody asks, and torch asks after each kernel: that one would seem to fail."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
