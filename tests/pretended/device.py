"""Pretends to be a device: streams, events, graphs, locked memory, and a count of what was asked of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

# Any, throughout: this stands between torch and its callers, and passes on what it does not know.


@dataclass(slots=True, eq=False)
class Copy:
    """One that is under way: to the host, which is poisoned till then, or from it, where nothing may change."""

    host: Tensor
    content: Tensor
    to_host: bool
    done: bool = False

    @torch.inference_mode()  # a device's copy ends in whatever thread waits for it
    def finish(self) -> None:
        if self.done:
            return
        self.done = True
        if self.to_host:
            self.host.copy_(self.content)
        else:
            same = torch.equal(as_bytes(self.host), as_bytes(self.content))
            assert same, "page-locked memory was written to while it was being copied"


class Stream:
    """Queues copies; all else is done at once."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.copies: list[Copy] = []
        if machines:
            machine().streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        self.follow(other.copies)

    def wait_event(self, event: Event) -> None:
        self.follow(event.copies)

    def follow(self, copies: list[Copy]) -> None:
        """Returns what comes next comes after these, too."""
        self.copies = [each for each in self.copies if not each.done]
        self.copies += [each for each in copies if not each.done and each not in self.copies]

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        machine().waits("a stream")
        for copy in self.copies:
            copy.finish()
        self.copies.clear()


class Event:
    """Holds the copies that were queued when it was recorded."""

    def __init__(self, **options: bool) -> None:
        self.copies: list[Copy] = []

    def record(self, stream: Stream | None = None) -> None:
        self.copies = list((stream or machine().stream).copies)

    def synchronize(self) -> None:
        machine().waits("an event")
        for copy in self.copies:
            copy.finish()

    def elapsed_time(self, later: Event) -> float:
        return 1.0


class Graph:
    """The calls that were made while it was recorded.

    It keeps what they made. What they were given it knows by address alone: whoever recorded it must keep that.
    """

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self._made: dict[int, Tensor] = {}  # by the address of their memory

    def calling(
        self, func: Callable[..., object], args: Any, kwargs: Any, result: object = None, *, writes: bool
    ) -> None:
        """Add a call, and what it gave: not one that only looks at a tensor in another way. `writes`: it changes what
        it is given."""
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        new = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        new = [leaf for leaf in new if leaf.untyped_storage().data_ptr() not in given]
        if not new and not writes:
            return
        self._made |= {leaf.untyped_storage().data_ptr(): leaf for leaf in new}
        given_args, given_kwargs = tree_map(self._given, (args, kwargs))
        where = tree_map(self._given, result)

        def again() -> None:
            made = func(*tree_map(_found, given_args), **tree_map(_found, given_kwargs))
            _put(made, tree_map(_found, where))

        self.calls.append(again)

    def _given(self, leaf: object) -> object:
        """Returns what stands for a tensor that was not made here."""
        if not isinstance(leaf, Tensor) or leaf.untyped_storage().data_ptr() in self._made:
            return leaf
        return Given(
            StorageWeakRef(leaf.untyped_storage()), leaf.dtype, int(leaf.storage_offset()), leaf.size(), leaf.stride()
        )

    def replay(self) -> None:
        assert self.calls, "nothing was recorded"
        machine().replayed += 1
        for call in self.calls:
            call()


@dataclass(frozen=True)
class Given:
    """A tensor by where it lies."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


def _found(leaf: object) -> object:
    if not isinstance(leaf, Given):
        return leaf
    storage = torch.UntypedStorage._new_with_weak_ptr(leaf.storage.cdata)
    assert storage is not None, "a graph reads or writes memory that was given back"
    return torch.empty(0, dtype=leaf.dtype).set_(storage, leaf.offset, leaf.size, leaf.stride)


@dataclass
class Machine:
    """The device: what it was asked to do so far, in numbers."""

    default: Stream = field(default_factory=Stream)
    streams: list[Stream] = field(default_factory=list)  # but for that one
    recording: Graph | None = None
    waited: int = 0  # times that the host waited for it
    sent: int = 0  # copies to it
    fetched: int = 0  # and from it
    replayed: int = 0  # graphs
    pinned: dict[int, Any] = field(default_factory=dict)  # address -> storage, which so keeps it; None if registered

    def counts(self) -> Counter[str]:
        """Of everything so far."""
        return Counter(waited=self.waited, sent=self.sent, fetched=self.fetched, replayed=self.replayed)

    @property
    def stream(self) -> Stream:
        """The calling thread's."""
        return getattr(current, "stream", None) or self.default

    def waits(self, what: str) -> None:
        """The host waits for the device, which it may not do while a graph is being recorded."""
        assert self.recording is None, f"{what} is waited for while a graph is recorded"
        self.waited += 1

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned


machines: list[Machine] = []
current = threading.local()


def machine() -> Machine:
    return machines[-1]


def _put(made: Any, where: Any) -> None:
    """Returns what a call gave when it was repeated goes to where it was when it was recorded."""
    for new, old in zip(tree_leaves(made), tree_leaves(where), strict=True):
        if isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():
            old.copy_(new)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
