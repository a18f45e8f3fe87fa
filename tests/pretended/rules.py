"""Rules for torch and Triton on the tensors of a device that is not there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.pretended.device import Copy, as_bytes, machine

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


class Rules(TorchFunctionMode):
    """Checks every call of torch, and answers it for the device that is not there."""

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
    """Returns what leaves the device or comes to it."""
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
    as_bytes(host).fill_(0x55)
    machine().stream.copies.append(Copy(host, content, to_host=True))
    return host


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    near_args, near_kwargs = _near(args), _near(kwargs)
    result = func(*near_args, **near_kwargs)
    graph = machine().recording
    if graph is not None:
        graph.calling(func, near_args, near_kwargs, result, writes=_writes(func, kwargs))
    return _far(result)


def _waits(index: Any) -> bool:
    """Returns whether indexing so waits: for the number of what a mask chooses, or for the copy of an index of the
    host's."""
    tensors = [each for each in tree_leaves(index) if isinstance(each, Tensor)]
    lists = isinstance(index, list) or (isinstance(index, tuple) and any(isinstance(each, list) for each in index))
    return lists or any(each.dtype is torch.bool or not isinstance(each, Distant) for each in tensors)


_interpreting = threading.Lock()  # Triton's interpreter has one grid, and two engines a thread each


def _interpret(run: Callable[..., None], kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
    with _interpreting, torch._C.DisableTorchFunction():
        run(kernel, *args, grid=grid, warmup=False, **options)


def launcher(run: Callable[..., None]) -> Callable[..., None]:
    """Triton's launch of an interpreted kernel, of tensors on the device alone."""

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        for each in (*args, *options.values()):
            assert not isinstance(each, Tensor) or isinstance(each, Distant), f"{kernel.__name__} reads the host"
        graph = machine().recording
        if graph is None:
            _interpret(run, kernel, grid, *_near(args), **_near(options))
        else:  # which computes nothing yet
            graph.calling(_interpret, (run, kernel, grid, *_near(args)), _near(options), writes=True)

    return launch


def _writes(func: Callable[..., object], kwargs: Any) -> bool:
    """Returns whether a call changes what it is given."""
    name = _name(func)
    return "out" in kwargs or name == "__setitem__" or (name[-1] == "_" and name[-2:] != "__")
