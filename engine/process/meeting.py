"""How a core's process and its clients meet: what it is started with, where its socket is, what clients are called.

Knows nothing of either side, so that neither loads what only the other needs.
"""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig


class Start(msgspec.Struct):
    """What the process is told first. `assemble` is "module:function"; sockets are files of `directory`."""

    config: EngineConfig
    assemble: str
    directory: str
    log_level: int


def address(directory: str) -> str:
    return f"ipc://{directory}/engine.sock"


def identity(client: int) -> bytes:
    """What a client's socket is called."""
    return b"client-%d" % client
