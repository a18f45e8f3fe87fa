"""`python -m tests.gpu`: the tests that want a CUDA device, in several processes.

Compiling kernels takes most of the time, and processors that a GPU's machine has. Needs neither pytest-xdist nor
pytest-timeout. Says so and ends well where there is no device.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "tests/engine/kernels", "tests/engine/gpu", "tests/engine/models/test_triton.py",
    "tests/engine/models/test_quantized_decoder.py", "tests/engine/test_attention.py",
    "tests/engine/test_device_sampler.py",
)  # fmt: skip
NO_DEVICE = "There is no CUDA device here: none of what needs one was run, and nothing was measured."


class Every:
    """A pytest plugin: of all tests, each `count`-th from `first` on."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[self._first :: self._count]


def asked_for() -> list[str]:
    return [each for each in FOLDERS if (ROOT / each).exists()]


def share(first: int, count: int) -> int:
    """Run one process's share."""
    return pytest.main(["-q", "-rsf", "--tb=short", "-p", "no:cacheprovider", *asked_for()], [Every(first, count)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--seconds", type=float, default=300, help="after which what still runs is ended")
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
        running = [
            subprocess.Popen([*command, str(nth)], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            for nth, log in enumerate(logs)
        ]
        for nth, (process, log) in enumerate(zip(running, logs, strict=True)):
            try:
                status, ended = process.wait(max(1.0, began + options.seconds - time.monotonic())), ""
            except subprocess.TimeoutExpired:
                process.kill()
                status, ended = 1, f"\nended after {options.seconds:.0f} s"
            log.seek(0)
            print(f"-- share {nth} of {options.processes}\n{log.read()}{ended}", flush=True)
            worst = max(worst, 0 if status == 5 else abs(status))  # 5: a share without a test
    print(f"-- GPU tests: {'passed' if worst == 0 else 'FAILED'} in {time.monotonic() - began:.0f} s", flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())
