"""The program in a worker's process: it imports one module, then answers requests with that module's `answer`.

Requests and replies are JSON, each with its length before it. Standard library only, and nothing of ours but the
module. Knows nothing of its callers, or of the requests' meaning.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import struct
import sys
from typing import Any, BinaryIO

LENGTH = struct.Struct(">I")
READY = b"R"
_ERROR = 1000  # characters of an error that are sent


def main(settings: dict[str, Any]) -> None:
    """Serves until there are no more requests.

    `settings` has the `module`, `memory_bytes` beyond its own at the start, and `cpu_s` of the processor for a request.
    """
    heard, said = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for each in (0, 1):  # output that the module prints is not a reply
        os.dup2(nowhere, each)
    os.close(nowhere)
    answer = importlib.import_module(settings["module"]).answer
    _limit_memory(settings["memory_bytes"])
    said.write(READY)
    said.flush()
    while (request := received(heard)) is not None:
        _limit_processor(settings["cpu_s"])
        try:
            reply = {"value": answer(request)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:_ERROR]}
        said.write(framed(reply))
        said.flush()


def framed(message: Any) -> bytes:
    content = json.dumps(message).encode()
    return LENGTH.pack(len(content)) + content


def received(stream: BinaryIO, max_bytes: int = (1 << 32) - 1) -> Any:
    """The next message, None at the end of them.

    Raises:
        ValueError: it is too long, broken off, or no JSON.
    """
    head = stream.read(LENGTH.size)
    if not head:
        return None
    if len(head) < LENGTH.size or (size := LENGTH.unpack(head)[0]) > max_bytes:
        raise ValueError("a message is too long or broken off")
    content = stream.read(size)
    if len(content) < size:
        raise ValueError("a message is broken off")
    return json.loads(content)


def _limit_memory(more_bytes: int) -> None:
    """Address space, from the present use on; where the system reports it and has such a limit."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (taken + more_bytes,) * 2)
        with open("/proc/self/oom_score_adj", "w") as file:  # the first to go when the machine's memory runs out
            file.write("1000")


def _limit_processor(seconds: float) -> None:
    """Of one request: the caller may be gone, and nobody would end an endless one."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        most = math.ceil(used.ru_utime + used.ru_stime + seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
