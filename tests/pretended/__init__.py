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
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.pretended.device import Event, Graph, Machine, Stream, current, machine, machines
from tests.pretended.rules import DEVICE, Rules, launcher

__all__ = ["DEVICE", "Event", "Machine", "Stream", "pretended"]


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
    before = getattr(current, "stream", None)
    current.stream = stream or before
    try:
        yield
    finally:
        current.stream = before


def _synchronize(device: object = None) -> None:
    for each in (machine().default, *machine().streams):
        each.synchronize()


@contextlib.contextmanager
def pretended(patch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """While it lasts, `cuda` is there, for every thread that begins meanwhile."""
    from triton.runtime import interpreter

    machines.append(Machine())
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
        "synchronize": _synchronize,
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
    patch.setattr(interpreter.InterpretedFunction, "run", launcher(interpreter.InterpretedFunction.run))
    patch.setattr(threading.Thread, "run", run)
    try:
        with Rules():
            yield machine()
    finally:
        machines.pop()
