"""Host memory from which steps are copied to a device: one is written while the other travels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BUFFERS = 2


class Staging:
    """Page-locked on CUDA. Grows to the largest step."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32) for _ in range(_BUFFERS)]
        self._sent: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._turn = 0

    def take(self, size: int) -> NDArray[np.int32]:
        """Room for `size` numbers. Waits until what was in it before has been copied."""
        self._turn = (self._turn + 1) % _BUFFERS
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()
        if self._buffers[self._turn].numel() < size:
            self._buffers[self._turn] = torch.empty(2 * size, dtype=torch.int32, pin_memory=self._cuda)
        return self._buffers[self._turn].numpy()

    def send(self, size: int, into: Tensor) -> None:
        """Begin to copy the first `size` of what was taken last."""
        into[:size].copy_(self._buffers[self._turn][:size], non_blocking=True)
        if self._cuda:
            event = self._sent[self._turn]
            if event is None:
                event = self._sent[self._turn] = torch.cuda.Event()
            event.record()
