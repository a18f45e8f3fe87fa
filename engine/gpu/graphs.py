"""A computation recorded once and replayed: on CUDA as a graph, so that a step costs one launch and not hundreds.

Knows nothing of models. Whatever the computation reads must lie where it lay when it was recorded, and its result is
overwritten by the next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Pool:
    """Memory that several graphs share, and a stream on which each is tried first: libraries keep memory for every
    stream that they have seen."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.memory: Any = torch.cuda.graph_pool_handle() if cuda else None  # Any: torch has no public name for it
        self.aside: Any = torch.cuda.Stream(device) if cuda else None


class Recorded:
    """`compute`, recorded on `device`; elsewhere than on CUDA it is called again each time.

    It keeps nothing that `compute` reads or writes: whoever records it must. Graphs of one `pool` share the memory of
    what they make on their way, so only one of them may be replayed at a time.
    """

    def __init__(self, compute: Callable[[], Tensor], device: torch.device, pool: Pool | None = None) -> None:
        self._compute: Callable[[], Tensor] | None = compute
        self._graph: Any = None  # torch.cuda.CUDAGraph, which has no types
        self._result: Tensor | None = None
        if device.type != "cuda":
            return
        with torch.cuda.device(device):
            pool = pool or Pool(device)
            pool.aside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(pool.aside):  # what is compiled or chosen at a first call cannot be recorded
                compute()
            torch.cuda.current_stream(device).wait_stream(pool.aside)
            self._graph = torch.cuda.CUDAGraph()
            # other threads, of engines that serve already, may go on allocating and waiting meanwhile
            with torch.cuda.graph(self._graph, pool=pool.memory, capture_error_mode="thread_local"):
                self._result = compute()
        self._compute = None

    def replay(self) -> Tensor:
        """Run it on the current stream, without waiting. Good until the next replay."""
        if self._compute is not None:
            return self._compute()
        assert self._result is not None
        self._graph.replay()
        return self._result
