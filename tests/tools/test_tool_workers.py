"""Processes for work that may go wrong: what goes wrong in one is told, ends it, and is not felt by the next."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.workers.process_pool import ProcessPool, WorkerFailed

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and limits of address space")


@pytest.fixture
def workers() -> Iterator[ProcessPool]:
    made = ProcessPool("worker_tasks", timeout_s=1, memory_bytes=64 << 20, reply_bytes=1000, requests=5)
    yield made
    made.close()


async def works(workers: ProcessPool) -> bool:
    return await workers.ask({"do": "twice", "number": 21}) == 42


def alive(pid: int) -> bool:
    """Returns whether a process runs; one that ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_an_answer_comes_back_and_the_process_is_used_again(workers: ProcessPool) -> None:
    assert await works(workers)
    first, second = [(await workers.ask({"do": "look"}))["pid"] for _ in range(2)]
    assert first == second != os.getpid()


async def test_what_the_work_raises_is_told_and_does_not_end_it(workers: ProcessPool) -> None:
    before = (await workers.ask({"do": "look"}))["pid"]
    with pytest.raises(ValueError, match="KeyError: 'nothing like it'"):
        await workers.ask({"do": "raise"})
    assert (await workers.ask({"do": "look"}))["pid"] == before


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("spin", "longer than 1 s"),
        ("crash", "ended without an answer"),
        pytest.param("swell", "MemoryError|ended without", marks=linux),
        ("flood", "too long"),
    ],
)
async def test_what_goes_wrong_is_told_and_the_next_request_is_answered(
    workers: ProcessPool, task: str, said: str
) -> None:
    with pytest.raises((WorkerFailed, ValueError), match=said):
        await workers.ask({"do": task})
    assert await works(workers)


@linux
async def test_memory_is_limited_beyond_what_the_work_needs_to_be_there(workers: ProcessPool) -> None:
    assert await workers.ask({"do": "swell and catch"}) == "refused"


async def test_what_the_work_prints_is_no_reply(workers: ProcessPool) -> None:
    assert await workers.ask({"do": "print"}) == "heard" and await works(workers)


async def test_an_answer_that_is_nested_without_end_is_an_error(workers: ProcessPool) -> None:
    with pytest.raises((WorkerFailed, ValueError)):
        await workers.ask({"do": "nest"})
    assert await works(workers)


@linux
async def test_a_process_that_hangs_is_killed_with_its_children(workers: ProcessPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="longer than 1 s") as failed:
        await workers.ask({"do": "hang", "file": str(tmp_path / "pids")})
    assert failed.value.late
    worker, child = map(int, (tmp_path / "pids").read_text().split())
    assert not alive(worker)
    async with asyncio.timeout(20):  # its parent is gone: the system's first process waits for it
        while alive(child):
            await asyncio.sleep(0.01)


@linux
async def test_it_has_nothing_of_the_servers(
    workers: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PONDER_SECRET", "hunter2")
    with open(tmp_path / "secret", "w") as file:
        os.set_inheritable(file.fileno(), True)
        seen: dict[str, Any] = await workers.ask({"do": "look"})
    assert "PONDER_SECRET" not in seen["environment"]
    # Standard input, output and errors, the copies of the first two, and the directory that is being listed.
    assert len(seen["descriptors"]) == 6


async def test_a_process_is_replaced_after_so_many_requests(workers: ProcessPool) -> None:
    seen = [(await workers.ask({"do": "look"}))["pid"] for _ in range(6)]
    assert len(set(seen[:5])) == 1 and seen[5] != seen[0]


async def test_requests_wait_for_their_turn(workers: ProcessPool) -> None:
    answers = await asyncio.gather(*(workers.ask({"do": "twice", "number": each}) for each in range(20)))
    assert answers == [2 * each for each in range(20)]


@pytest.mark.slow
@linux
@pytest.mark.parametrize("closed", [True, False])
async def test_no_process_is_left(closed: bool) -> None:
    workers = ProcessPool("worker_tasks", timeout_s=5, memory_bytes=64 << 20)
    pid = (await workers.ask({"do": "look"}))["pid"]
    assert alive(pid)
    if closed:
        workers.close()
        with pytest.raises(WorkerFailed, match="closed"):
            await workers.ask({"do": "look"})
    else:
        del workers
        async with asyncio.timeout(10):  # the thread that asked may hold it for a moment more
            while Path(f"/proc/{pid}").exists():
                gc.collect()
                await asyncio.sleep(0)
    assert not Path(f"/proc/{pid}").exists()


async def test_work_that_cannot_start_is_a_failure() -> None:
    with pytest.raises(WorkerFailed, match="did not start"):
        await ProcessPool("no_such_module_of_ours", timeout_s=5, memory_bytes=1 << 20).ask({})
