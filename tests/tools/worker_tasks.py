"""Work for the tests of workers: it does what it is told, however bad."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from typing import Any


def answer(request: Any) -> Any:
    match request:
        case {"do": "twice", "number": number}:
            return 2 * number
        case {"do": "raise"}:
            raise KeyError("nothing like it")
        case {"do": "hang", "file": file}:
            # The child of a worker must go with it.
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            with open(file, "w") as told:
                told.write(f"{os.getpid()} {child.pid}")
            time.sleep(3600)
        case {"do": "spin"}:
            while True:
                pass
        case {"do": "crash"}:
            ctypes.string_at(0)
        case {"do": "swell"}:
            kept = []
            while True:
                kept.append(bytearray(1 << 20))
        case {"do": "swell and catch"}:
            try:
                return len(bytearray(1 << 40))
            except MemoryError:
                return "refused"
        case {"do": "flood"}:
            return "x" * (1 << 20)
        case {"do": "print"}:
            print("noise", flush=True)
            return "heard"
        case {"do": "look"}:
            return {
                "pid": os.getpid(),
                "environment": dict(os.environ),
                "descriptors": sorted(os.listdir("/proc/self/fd")) if sys.platform == "linux" else [],
            }
        case {"do": "nest"}:
            nested: list[Any] = []
            for _ in range(100_000):
                nested = [nested]
            return nested
    return None
