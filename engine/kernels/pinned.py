"""Copies small tensors to a GPU without waiting for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, of the CPU, on `device`: through page-locked memory to a GPU, where the copy is queued alone.

    torch keeps that memory until the copy is done, so nobody has to hold it.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def from_device(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the host; what is returned waits for it, and gives it."""
    if not tensor.is_cuda:
        return lambda: tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> Tensor:
        arrived.synchronize()
        return host

    return wait
