"""The load's own arithmetic: traces scaled, what is wasted, what a server's processes hold."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.load.claims import _wasted
from bench.load.drive import Driven, Seen, drive, running
from bench.load.load_server import BenchServer
from bench.load.workload import AZURE, TraceRequest, at_rate, azure, mooncake
from engine.outputs import Stats

needs_traces = pytest.mark.skipif(not AZURE.exists(), reason="PONDER_SHARED has no traces")


@needs_traces
def test_a_trace_keeps_its_rhythm_and_its_sharing() -> None:
    requests = mooncake(200, 6144)
    faster = at_rate(requests, 20.0)
    assert len(faster) / faster[-1].at == pytest.approx(20.0)
    assert faster[100].at / faster[-1].at == pytest.approx(requests[100].at / requests[-1].at)
    heads = [(each.tenant, each.tokens[:64]) for each in requests]
    assert len(set(heads)) < len(heads)  # conversations that go on: the same tenant, the same beginning


@needs_traces
def test_lengths_are_scaled() -> None:
    whole, half = azure(50, 6144, scale=0.2), azure(50, 6144, scale=0.1)
    assert sum(len(each.tokens) for each in half) == pytest.approx(sum(len(each.tokens) for each in whole) / 2, rel=0.1)


def test_what_is_wasted_is_what_no_token_is_in() -> None:
    driven = Driven([], 1.0, Stats(), [Seen(2, 8, 96), Seen(1, 4, 64), Seen(0, 0, 0)])
    assert _wasted(driven, None) == pytest.approx(1 - 160 / (12 * 16))
    assert _wasted(driven, 1000) == pytest.approx(1 - 160 / 3000)


async def test_requests_are_driven_when_they_are_due() -> None:
    requests = [TraceRequest(at / 100, tuple(range(10, 30 + at)), 3 + at) for at in range(5)]
    async with running() as engine:
        driven = await drive(engine, requests)
    assert [len(each.pieces) for each in driven.outcomes] == [3, 4, 5, 6, 7]
    assert all(each.answered and each.ttft > 0 for each in driven.outcomes)
    assert driven.stats.generated_tokens == 25 and driven.stats.running == 0


def test_what_a_family_of_processes_holds() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        server = BenchServer(parent, "")
        while len(server.family()) < 2:
            pass
        held = server.held()
        parent.communicate(b"\n")
    assert held["processes"] == 2 and held["pss_mib"] > 1 and held["descriptors"] >= 6
