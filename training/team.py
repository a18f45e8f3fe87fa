"""Several processes that train one model: each computes its share of a step's rows, and all add their gradients up.

On a CPU the small operations of a small model leave a second thread waiting: two processes of one thread each compute
1.6 times the tokens of one process of two threads (measured on two cores). Knows nothing of models or of data.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn


@dataclass(frozen=True, slots=True)
class Team:
    """One member's view: it is number `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its sum over the team, in place and in one message; the same bits for every
        member."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        distributed.all_reduce(flat)
        for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))


ALONE = Team()


def start(size: int, job: Callable[..., None], *arguments: object) -> None:
    """Runs `job(team, *arguments)` in `size` processes of one thread each, or right here for a team of one.

    `job` and its arguments must be picklable. Raises a member's error; the others are stopped then.
    """
    if size == 1:
        job(ALONE, *arguments)
        return
    with tempfile.TemporaryDirectory() as meeting:
        spawn(_join, (size, f"file://{meeting}/members", job, arguments), nprocs=size)


def _leave_with_parent() -> None:
    """Ends this process with the one that started it: a member left behind would go on and write checkpoints."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "members are started by `start`"
    parent.join()
    os._exit(1)


def _join(rank: int, size: int, meeting: str, job: Callable[..., None], arguments: tuple[object, ...]) -> None:
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) >= size:
        os.sched_setaffinity(0, cores[rank::size])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    try:
        job(Team(rank, size), *arguments)
    finally:
        distributed.destroy_process_group()
