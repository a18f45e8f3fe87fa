"""Collectives of a group of ranks over gloo, with counts of the bytes that they carry.

A group is a process group of its own, and none is the process's default: several engines, and in tests several ranks,
share a process. Gloo's sockets are on the loopback interface. Knows tensors, and nothing of models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import Work

from engine.errors import RankDied

_NEVER = timedelta(days=3650)  # ranks wait for the next step; one that dies closes its sockets, which ends a wait
_CONNECT = timedelta(seconds=60)
_c10d: Any = torch.distributed  # Any: torch has no types of these classes
Store = Any  # by which ranks find each other


def file_store(path: Path) -> Store:
    """Returns a store in a file, for ranks in several processes."""
    return _c10d.FileStore(str(path))


def thread_store() -> Store:
    """Returns a store in memory, for ranks in threads of one process."""
    return _c10d.HashStore()


class RankGroup:
    """The ranks of one group, of which this is number `rank`. Every rank calls the same collectives in the same order;
    they raise RankDied where another rank is gone.

    `nbytes` counts, by collective, the bytes that this rank sends in it: of an all-reduce over n ranks 2 (n - 1) / n
    of the tensor, as a ring sends them (Patarasuk & Yuan 2009).
    """

    def __init__(self, store: Store, name: str, rank: int, size: int) -> None:
        """Connects the ranks; `store` is the same for all, and `name` the group's own."""
        self.rank, self.size = rank, size
        self.nbytes = Counter[str]()
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _NEVER
        store.set_timeout(_CONNECT)
        try:
            self._gloo = _c10d.ProcessGroupGloo(_c10d.PrefixStore(name, store), rank, size, options)
        except RuntimeError as error:
            raise RankDied(f"Rank {rank} of {size} could not connect to the others: {error}") from error

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' `x`, in place."""
        self._count("all_reduce", 2 * x.nbytes * (self.size - 1) // self.size)
        _finish(self._gloo.allreduce([x]))
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Returns rank 0's `x`, in place."""
        self._count("broadcast", x.nbytes * (self.size - 1) if self.rank == 0 else 0)
        options = _c10d.BroadcastOptions()
        options.rootRank = 0
        _finish(self._gloo.broadcast([x], options))
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Returns the `x` of each rank at rank 0, of one shape; nothing elsewhere."""
        self._count("gather", x.nbytes if self.rank else 0)
        options = _c10d.GatherOptions()
        options.rootRank = 0
        found = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        _finish(self._gloo.gather([found] if found else [], [x.contiguous()], options))
        return found

    def exchange(self, x: Tensor, to: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends the first `to[0]` rows of `x` to rank 0, the next `to[1]` to rank 1 and so on (all-to-all). Returns the
        rows that each rank sends here, of which there are `received`, one below the other."""
        self._count("all_to_all", x.element_size() * x.shape[1:].numel() * (sum(to) - to[self.rank]))
        out = x.new_empty(sum(received), *x.shape[1:])
        _finish(self._gloo.alltoall_base(out, x.contiguous(), list(received), list(to)))
        return out

    def send(self, x: Tensor, to: int) -> Work:
        """Sends `x`, which must not change until the result has been given to `finish`."""
        self._count("send", x.nbytes)
        sent: Work = self._gloo.send([x], to, 0)
        return sent

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fills `x` with what rank `source` sends."""
        _finish(self._gloo.recv([x], source, 0))
        return x

    def shift(self, x: Tensor, arriving: Tensor) -> tuple[Work, Work]:
        """Sends `x` to the next rank of a ring, while `arriving` is filled with what the previous one sends. Neither
        may be touched until both results have been given to `finish`."""
        sent = self.send(x, (self.rank + 1) % self.size)
        return sent, self._gloo.recv([arriving], (self.rank - 1) % self.size, 0)

    def finish(self, sent: Sequence[Work]) -> None:
        """Waits until all of it has been received."""
        for each in sent:
            _finish(each)

    def _count(self, collective: str, nbytes: int) -> None:
        self.nbytes[collective] += nbytes


def _finish(work: Work) -> None:
    try:
        work.wait()
    except RuntimeError as error:  # gloo's only error
        raise RankDied(f"A rank of the model is gone: {error}") from error
