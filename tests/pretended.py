"""A CUDA device that is not there: the engine's own way to a GPU, run on the CPU and held to a GPU's rules.

Tensors "on" it are tensors of the CPU that know better: `is_cuda` is true of them, an operation that mixes them with
the host's is refused, and each way of reading one is counted as a wait. Kernels are interpreted. Copies to page-locked
memory arrive when they have been waited for and not before; what is being copied from must not change until then. A
CUDA graph is what was called while it was recorded, with the very arguments and at the very addresses: what a step
passes in another way, a replay does not see. Not shown so: races between streams, and what kernels do on hardware.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

# Any, throughout: this stands between torch and its callers, and passes on what it does not know.

DEVICE = torch.device("cuda", 0)
MAKERS = (
    torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor, torch.randn, torch.rand,
    torch.randint, torch.as_tensor, torch.empty_strided,
)  # fmt: skip
READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select", "equal", "cpu"}
ABOUT_HOST = {"numpy", "__array__", "pin_memory", "is_pinned"}


class Distant(Tensor):
    """A tensor on the device that is not there."""


@dataclass(slots=True, eq=False)
class Copy:
    """One that is under way: to the host, which is poisoned till then, or from it, where nothing may change."""

    host: Tensor
    content: Tensor
    to_host: bool
    done: bool = False

    def finish(self) -> None:
        if self.done:
            return
        self.done = True
        if self.to_host:
            self.host.copy_(self.content)
        else:
            same = torch.equal(_bytes(self.host), _bytes(self.content))
            assert same, "page-locked memory was written to while it was being copied"


class Stream:
    """What is queued: the copies, as all else is done at once."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.copies: list[Copy] = []
        if _machine:
            machine().streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        self.follow(other.copies)

    def wait_event(self, event: Event) -> None:
        self.follow(event.copies)

    def follow(self, copies: list[Copy]) -> None:
        """What comes next comes after these, too."""
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
    """What was queued when it was recorded."""

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

    def calling(self, func: Callable[..., object], args: Any, kwargs: Any, result: object = None) -> None:
        """Add a call, and what it gave: not one that only looks at a tensor in another way."""
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        new = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        new = [leaf for leaf in new if leaf.untyped_storage().data_ptr() not in given]
        if not new and not _writes(func, kwargs):
            return
        self._made |= {leaf.untyped_storage().data_ptr(): leaf for leaf in new}
        given_args, given_kwargs = tree_map(self._given, (args, kwargs))
        where = tree_map(self._given, result)

        def again() -> None:
            made = func(*tree_map(_found, given_args), **tree_map(_found, given_kwargs))
            _put(made, tree_map(_found, where))

        self.calls.append(again)

    def _given(self, leaf: object) -> object:
        """What stands for a tensor that was not made here."""
        if not isinstance(leaf, Tensor) or leaf.untyped_storage().data_ptr() in self._made:
            return leaf
        return Given(
            StorageWeakRef(leaf.untyped_storage()), leaf.dtype, leaf.storage_offset(), leaf.size(), leaf.stride()
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


def _writes(func: Callable[..., object], kwargs: Any) -> bool:
    """Whether a call changes what it is given."""
    name = _name(func)
    return func is _interpret or "out" in kwargs or name == "__setitem__" or (name[-1] == "_" and name[-2:] != "__")


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
        return getattr(_current, "stream", None) or self.default

    def waits(self, what: str) -> None:
        """The host waits for the device, which it may not do while a graph is being recorded."""
        assert self.recording is None, f"{what} is waited for while a graph is recorded"
        self.waited += 1

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned


_machine: list[Machine] = []
_current = threading.local()


def machine() -> Machine:
    return _machine[-1]


class Rules(TorchFunctionMode):
    """What every call of torch goes through."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = _name(func)
        if name == "__get__":
            return _attribute(func, *args)
        if func in MAKERS:
            return _made(func, args, kwargs)
        if name in ("to", "copy_", *ABOUT_HOST, *READS) and isinstance(args[0], Tensor):
            moved = _moved(name, func, args, kwargs)
            if moved is not NotImplemented:
                return moved
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(isinstance(each, Distant) for each in tensors):
            return func(*args, **kwargs)
        if name in ("__getitem__", "__setitem__"):
            if _waits(args[1]):
                machine().waits("an index")
            tensors = [args[0], *(each for each in args[2:] if isinstance(each, Tensor))]
        for each in tensors:
            assert isinstance(each, Distant) or each.dim() == 0, f"{name} mixes the device's tensors with the host's"
        return _called(func, args, kwargs)


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _near(value: Any) -> Any:
    """The same memory as what it is: a tensor of the CPU."""
    return tree_map(lambda leaf: leaf.as_subclass(Tensor) if isinstance(leaf, Distant) else leaf, value)


def _far(value: Any) -> Any:
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
        return value
    return tree_map(lambda leaf: leaf.as_subclass(Distant) if isinstance(leaf, Tensor) else leaf, value)


def _attribute(func: Any, tensor: Tensor, *rest: Any) -> Any:
    name = func.__self__.__name__
    if isinstance(tensor, Distant):
        if name in ("is_cuda", "is_cpu"):
            return name == "is_cuda"
        if name == "device":
            return DEVICE
        return _far(func(_near(tensor), *rest))
    return func(tensor, *rest)


def _made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pinned = kwargs.pop("pin_memory", False)
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "cuda":
        made = func(*args, **kwargs)
        return machine().pin(made) if pinned else made
    if func in (torch.tensor, torch.as_tensor):
        assert machine().recording is None, "a graph is recorded, and numbers of the host are copied meanwhile"
        machine().sent += 1
        machine().waits("a copy")
    return _called(func, args, {**kwargs, "device": "cpu"})


def _moved(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What leaves the device or comes to it."""
    tensor, here = args[0], isinstance(args[0], Distant)
    if name in READS:
        if here:
            machine().waits(name)
            machine().fetched += 1
            return func(*_near(args), **_near(kwargs))
        return NotImplemented
    if name in ABOUT_HOST:
        assert not here, f"{name} of a tensor on the device"
        if name == "pin_memory":
            return machine().pin(tensor.clone())
        return machine().is_pinned(tensor) if name == "is_pinned" else NotImplemented
    if name == "copy_":
        source = args[1]
        blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if isinstance(source, Distant) == here:
            return NotImplemented
        _begin(source if here else tensor, blocking, here)
        if here:
            _watch(source, blocking)
            return _called(func, (tensor, source), {})
        return _arriving(tensor, _near(source), blocking)
    places = [leaf for leaf in (*args[1:], kwargs.pop("device", None)) if isinstance(leaf, str | torch.device)]
    if not places:
        return NotImplemented
    to_device = torch.device(places[0]).type == "cuda"
    dtypes = [leaf for leaf in (*args[1:], kwargs.get("dtype")) if isinstance(leaf, torch.dtype)]
    if to_device == here:
        return func(tensor, *dtypes)
    blocking = not kwargs.get("non_blocking")
    _begin(_near(tensor), blocking, to_device)
    if to_device:
        _watch(tensor, blocking)
        return _called(torch.clone, (func(tensor, *dtypes),), {})
    machine().waits("a copy")
    return func(_near(tensor), *dtypes).clone()


def _begin(host: Tensor, blocking: bool, to_device: bool) -> None:
    if to_device:
        machine().sent += 1
    else:
        machine().fetched += 1
    if machine().recording is not None:
        assert not blocking and machine().is_pinned(host), "a graph is recorded, and a copy of it waits"


def _watch(source: Tensor, blocking: bool) -> None:
    if blocking or not machine().is_pinned(source):
        machine().waits("a copy")
    else:
        machine().stream.copies.append(Copy(source, source.clone(), to_host=False))


def _arriving(host: Tensor, source: Tensor, blocking: bool) -> Tensor:
    if blocking or not machine().is_pinned(host):
        machine().waits("a copy")
        return host.copy_(source)
    content = source.clone()
    _bytes(host).fill_(0x55)
    machine().stream.copies.append(Copy(host, content, to_host=True))
    return host


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    near_args, near_kwargs = _near(args), _near(kwargs)
    result = func(*near_args, **near_kwargs)
    graph = machine().recording
    if graph is not None:
        graph.calling(func, near_args, near_kwargs, result)
    return _far(result)


def _put(made: Any, where: Any) -> None:
    """What a call gave when it was repeated goes to where it was when it was recorded."""
    for new, old in zip(tree_leaves(made), tree_leaves(where), strict=True):
        if isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():
            old.copy_(new)


def _waits(index: Any) -> bool:
    """Whether indexing so waits: for the number of what a mask chooses, or for the copy of an index of the host's."""
    tensors = [each for each in tree_leaves(index) if isinstance(each, Tensor)]
    lists = isinstance(index, list) or (isinstance(index, tuple) and any(isinstance(each, list) for each in index))
    return lists or any(each.dtype is torch.bool or not isinstance(each, Distant) for each in tensors)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def _interpret(run: Callable[..., None], kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
    with torch._C.DisableTorchFunction():
        run(kernel, *args, grid=grid, warmup=False, **options)


def _launcher(run: Callable[..., None]) -> Callable[..., None]:
    """Triton's launch of an interpreted kernel, of tensors on the device alone."""

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        for each in (*args, *options.values()):
            assert not isinstance(each, Tensor) or isinstance(each, Distant), f"{kernel.__name__} reads the host"
        graph = machine().recording
        if graph is None:
            _interpret(run, kernel, grid, *_near(args), **_near(options))
        else:  # which computes nothing yet
            graph.calling(_interpret, (run, kernel, grid, *_near(args)), _near(options))

    return launch


def _register(address: int, nbytes: int, flags: int) -> int:
    machine().pinned[address] = None
    return 0


def _unregister(address: int) -> int:
    del machine().pinned[address]
    return 0


@contextlib.contextmanager
def _record(graph: Graph, pool: object = None, capture_error_mode: str = "global") -> Iterator[None]:
    assert machine().recording is None, "two graphs are recorded at once"
    machine().recording = graph
    try:
        yield
    finally:
        machine().recording = None


@contextlib.contextmanager
def _on(stream: Stream | None) -> Iterator[None]:
    before = getattr(_current, "stream", None)
    _current.stream = stream or before
    try:
        yield
    finally:
        _current.stream = before


@contextlib.contextmanager
def pretended(patch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """While it lasts, `cuda` is there, for every thread that begins meanwhile."""
    from triton.runtime import interpreter

    _machine.append(Machine())
    begin, make_generator = threading.Thread.run, torch.Generator

    def run(thread: threading.Thread) -> None:
        with Rules():
            begin(thread)

    properties = SimpleNamespace(multi_processor_count=4, name="A device that is not there", total_memory=1 << 24)
    stands_for: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": _record,
        "stream": _on,
        "device": lambda device: contextlib.nullcontext(),
        "set_device": lambda device: None,
        "current_stream": lambda device=None: machine().stream,
        "synchronize": lambda device=None: [each.synchronize() for each in (machine().default, *machine().streams)],
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 1 << 20,
        "mem_get_info": lambda device=None: (1 << 24, 1 << 24),
        "graph_pool_handle": lambda: (0, 1),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=_register, cudaHostUnregister=_unregister),
    }
    patch.setattr(torch, "Generator", lambda device=None: make_generator())
    for name, what in stands_for.items():
        patch.setattr(torch.cuda, name, what)
    patch.setattr(interpreter.InterpretedFunction, "run", _launcher(interpreter.InterpretedFunction.run))
    patch.setattr(threading.Thread, "run", run)
    try:
        with Rules():
            yield machine()
    finally:
        _machine.pop()
