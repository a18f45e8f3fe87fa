"""`python -m tests.gpu`: the tests that want a CUDA device, in several processes.

Compiling kernels takes most of the time, and processors that a GPU's machine has. Needs neither pytest-xdist nor
pytest-timeout; without hypothesis it leaves out the files that want it, and says which. Says so and ends well where
there is no device.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO

import pytest
import torch

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "tests/engine/kernels", "tests/engine/gpu", "tests/engine/model/test_triton.py",
    "tests/engine/model/test_quantized_decoder.py", "tests/engine/model/test_attention.py",
    "tests/engine/core/test_gpu_sampler.py", "tests/engine/model/adapters/test_kernels.py",
)  # fmt: skip
LEFT_OUT = re.compile("No module named 'hypothesis[.']")
NO_DEVICE = "There is no CUDA device here: none of what needs one was run, and nothing was measured."


class Every:
    """A pytest plugin: of all tests, each `count`-th from `first` on."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[self._first :: self._count]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if report.failed and LEFT_OUT.search(str(report.longrepr)):
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, "Skipped: hypothesis is not installed")
        return report


def asked_for() -> list[str]:
    return [each for each in FOLDERS if (ROOT / each).exists()]


def share(first: int, count: int) -> int:
    """Run one process's share."""
    return pytest.main(["-q", "-rsf", "--tb=short", "-p", "no:cacheprovider", *asked_for()], [Every(first, count)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--seconds", type=float, default=200, help="after which what still runs is ended")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is not None:
        return share(options.share, options.processes)
    if not torch.cuda.is_available():
        print(NO_DEVICE, flush=True)
        pytest.main(["-q", "-rs", "-m", "gpu", "-p", "no:cacheprovider", *asked_for()])
        return 0
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.gpu", "--processes", str(options.processes), "--share"]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    worst = 0
    with contextlib.ExitStack() as files:
        logs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(options.processes)]
        running = [_begun([*command, str(nth)], environment, log) for nth, log in enumerate(logs)]
        try:
            for nth, (process, log) in enumerate(zip(running, logs, strict=True)):
                try:
                    status, ended = process.wait(max(0.0, began + options.seconds - time.monotonic())), ""
                except subprocess.TimeoutExpired:
                    _end(process)
                    status, ended = 1, f"\nended after {options.seconds:.0f} s"
                log.seek(0)
                print(f"-- share {nth} of {options.processes}\n{log.read()}{ended}", flush=True)
                worst = max(worst, 0 if status == 5 else abs(status))  # 5: a share without a test
        finally:
            for process in running:
                _end(process)
    print(f"-- GPU tests: {'passed' if worst == 0 else 'FAILED'} in {time.monotonic() - began:.0f} s", flush=True)
    return worst


def _begun(command: list[str], environment: dict[str, str], log: IO[str]) -> subprocess.Popen[bytes]:
    """In a session of its own, so that what it starts is ended with it."""
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """With what compiles for it, which would run on beside the measurements."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
