"""A Redis server for tests, Debian's, in a temporary directory behind a Unix socket."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class RedisServer:
    """May be ended and started again, empty."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder / "redis.sock"
        self.address = f"unix://{self._socket}?db=0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = ["redis-server", "--port", "0", "--unixsocket", str(self._socket), "--dir", str(self._folder)]
        self._process = subprocess.Popen([*command, "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL)
        from redis import Redis
        from redis.exceptions import RedisError

        until = time.monotonic() + 20
        with Redis.from_url(self.address) as client:
            while True:
                try:
                    client.ping()
                    return
                except (RedisError, OSError):
                    assert time.monotonic() < until and self._process.poll() is None, "Redis does not start"
                    time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
            self._socket.unlink(missing_ok=True)


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """Runs a server; skips where there is none."""
    if shutil.which("redis-server") is None:
        pytest.skip("no Redis server is installed here (Debian: apt install redis-server)")
    if importlib.util.find_spec("redis") is None:
        pytest.skip("the client of Redis is not installed here (pip install 'ponder[redis]')")
    folder = Path(tempfile.mkdtemp(prefix="ponder-redis-"))
    server = RedisServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
