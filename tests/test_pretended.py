"""That the pretended device holds code to the rules of a real one, and so can fail the tests that stand on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.kernels.buffers import from_device, to_device
from engine.model.gpu_runner import Recorded
from tests.pretended import Machine, pretended

pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with pretended(monkeypatch) as made:
        yield made


def test_what_is_made_there_stays_there(machine: Machine) -> None:
    made = torch.arange(6, device="cuda").view(2, 3)[1:] * 2
    assert made.is_cuda and not made.is_cpu and made.device.type == "cuda" and made.shape == (1, 3)
    assert not made.to("cpu").is_cuda and made.tolist() == [[6, 8, 10]]
    assert machine.waited == machine.fetched == 2


def test_the_host_and_the_device_do_not_mix(machine: Machine) -> None:
    with pytest.raises(AssertionError, match="add mixes"):
        torch.ones(2, device="cuda") + torch.ones(2)
    assert (torch.ones(2, device="cuda") + torch.tensor(1)).tolist() == [2, 2], "but for one number"


def test_what_is_fetched_has_not_come_before_it_was_waited_for(machine: Machine) -> None:
    host = torch.zeros(3, dtype=torch.int32, pin_memory=True)
    host.copy_(torch.arange(3, device="cuda"), non_blocking=True)
    assert host.tolist() != [0, 1, 2] and machine.waited == 0
    torch.cuda.synchronize()
    assert host.tolist() == [0, 1, 2]
    assert from_device(torch.arange(3, device="cuda"))().tolist() == [0, 1, 2]


def test_what_is_being_sent_must_not_change(machine: Machine) -> None:
    host = torch.zeros(3, pin_memory=True)
    torch.empty(3, device="cuda").copy_(host, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    host.fill_(1)
    with pytest.raises(AssertionError, match="while it was being copied"):
        event.synchronize()


def test_a_stream_that_does_not_wait_for_another_has_not_its_copies(machine: Machine) -> None:
    side, host = torch.cuda.Stream(), torch.zeros(1, pin_memory=True)
    with torch.cuda.stream(side):
        host.copy_(torch.ones(1, device="cuda"), non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert host.tolist() != [1.0]
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [1.0]


def test_a_graph_repeats_what_was_recorded(machine: Machine) -> None:
    memory, factor = torch.ones(2, device="cuda"), [2.0]
    recorded = Recorded(lambda: (memory * factor[0]).add_(1), torch.device("cuda"))
    memory.fill_(5.0)
    factor[0] = 100.0  # of the host: a graph knows what it was
    assert recorded.replay().tolist() == [11.0, 11.0] and machine.replayed == 1


def test_a_graph_keeps_nothing_that_it_was_given(machine: Machine) -> None:
    memory = [torch.ones(2, device="cuda")]
    recorded = Recorded(lambda: torch.zeros(2, device="cuda").add_(memory[0]), torch.device("cuda"))
    assert recorded.replay().tolist() == [1.0, 1.0]
    memory.clear()
    with pytest.raises(AssertionError, match="given back"):
        recorded.replay()


@pytest.mark.parametrize("forbidden", ["item", "mask", "send"])
def test_a_graph_is_not_recorded_while_the_host_waits(machine: Machine, forbidden: str) -> None:
    memory = torch.ones(2, device="cuda")

    def compute() -> torch.Tensor:
        if forbidden == "item":
            memory[0].item()
        elif forbidden == "mask":
            return memory[memory > 0]
        else:
            return memory + torch.ones(2).to("cuda")
        return memory

    with pytest.raises(AssertionError, match="while a graph is recorded|a graph is recorded"):
        Recorded(compute, torch.device("cuda"))


def test_copies_are_counted(machine: Machine) -> None:
    to_device(torch.ones(2), torch.device("cuda"))
    assert (machine.sent, machine.fetched, machine.waited) == (1, 0, 0)
