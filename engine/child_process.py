"""Child processes of this package: started with a message on stdin, and ended with their parent.

The message is MessagePack behind its length. After it stdin stays open for as long as the parent lives.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

LENGTH_BYTES = 4
T = TypeVar("T", bound=msgspec.Struct)


def child_environment() -> Mapping[str, str]:
    """Returns the environment of a child that finds our packages where this process found them."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def start_child(module: str, start: msgspec.Struct) -> subprocess.Popen[bytes]:
    """Starts `python -m module`, which begins with `read_start`."""
    process = subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE, env=child_environment())
    data = msgspec.msgpack.encode(start)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died already: waiters get its error
        process.stdin.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
        process.stdin.flush()
    return process


def read_start(kind: type[T]) -> T:
    """Returns the message that this process was started with."""
    source = sys.stdin.buffer
    return msgspec.msgpack.decode(source.read(int.from_bytes(source.read(LENGTH_BYTES), "big")), type=kind)


def end_with_parent(stdin: int, before: Callable[[], object] = lambda: None) -> None:
    """Ends this process when its parent's end of stdin closes. Runs in a thread of a child."""
    while True:
        select.select([stdin], [], [])
        if not os.read(stdin, 1):
            before()
            os._exit(1)
