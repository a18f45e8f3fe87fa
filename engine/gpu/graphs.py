"""A computation recorded once and replayed: on CUDA as a graph, so that a step costs one launch and not hundreds.

Knows nothing of models. Whatever the computation reads must lie where it lay when it was recorded, and its result is
overwritten by the next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Recorded:
    """`compute`, recorded on `device`; elsewhere than on CUDA it is called again each time.

    Graphs of one `pool` (Any: torch has no public name for its type) share the memory of what they make on their way,
    so only one of them may be replayed at a time.
    """

    def __init__(self, compute: Callable[[], Tensor], device: torch.device, pool: Any = None) -> None:
        self._compute: Callable[[], Tensor] | None = compute
        self._graph: Any = None  # torch.cuda.CUDAGraph, which has no types
        self._result: Tensor | None = None
        if device.type != "cuda":
            return
        with torch.cuda.device(device):
            aside = torch.cuda.Stream(device)
            aside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(aside):  # what is compiled or chosen at a first call cannot be recorded
                compute()
            torch.cuda.current_stream(device).wait_stream(aside)
            self._graph = torch.cuda.CUDAGraph()
            # other threads, of engines that serve already, may go on allocating and waiting meanwhile
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._result = compute()
        self._compute = None

    def replay(self) -> Tensor:
        """Run it on the current stream, without waiting. Good until the next replay."""
        if self._compute is not None:
            return self._compute()
        assert self._result is not None
        self._graph.replay()
        return self._result


def pool_for(device: torch.device) -> Any:
    """Memory that several graphs may share."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
