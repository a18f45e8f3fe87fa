"""`ponder kv-store` from start to end: check the options, listen, say when ready, and keep what fits on a signal.

Serves K/V at one port and, over HTTP, `/health` and `/metrics` at another. Imports no torch.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import ByteSize, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from app.cli.route_command import ReadyServer
from app.cli.serve import bind, url
from app.config import BadSetting
from app.observability import logs
from engine.kv_cache.kv_store.block_images import BlockImages
from engine.kv_cache.kv_store.server import KVStoreServer
from engine.kv_cache.transport.peer_handshake import shared_secret

MIN_MEMORY = 1 << 20
KEEPING_S = 10.0  # to write what is in memory to the disk, when the store stops

_GAUGES = {
    "bytes": ("Bytes of blocks by tier.", "memory_bytes", "disk_bytes"),
    "bytes_limit": ("Bytes of blocks that there may be by tier.", "memory_bytes_total", "disk_bytes_total"),
    "blocks": ("Blocks by tier; one may be in both.", "memory_blocks", "disk_blocks"),
}
_COUNTERS = {
    "asked_blocks": ("Blocks that servers asked for.", "asked"),
    "put_blocks": ("Blocks that servers put.", "put"),
    "refused_blocks": ("Blocks that are larger than the memory, or not as others of their layout.", "refused"),
    "evicted_blocks": ("Blocks that left the memory.", "evicted"),
    "written_blocks": ("Blocks written to the disk.", "written"),
    "dropped_blocks": ("Blocks that left the disk, or could not be written to it.", "dropped"),
    "bad_blocks": ("Blocks that came damaged, and files that were.", "bad"),
}


@dataclass(frozen=True, slots=True)
class KVStoreOptions:
    """Options of the command, as given."""

    secret_file: str
    memory: str
    disk: str
    directory: Path | None
    host: str
    port: int
    metrics_port: int

    def budgets(self) -> tuple[int, int]:
        """Returns the bytes of memory and of disk.

        Raises:
            BadSetting: one is no size or too small, or the disk has no directory, or a directory no disk.
        """
        memory, disk = _size("--memory", self.memory), _size("--disk", self.disk)
        if memory < MIN_MEMORY:
            raise BadSetting(f"--memory is {self.memory}; accepted: 1MiB or more, such as 8GiB.")
        if disk and self.directory is None:
            raise BadSetting("--disk is set and --dir is not; accepted: a directory to write to, or --disk 0.")
        if self.directory is not None and not disk:
            raise BadSetting("--dir is set and --disk is 0; accepted: a size such as 100GiB, or no --dir.")
        return memory, disk


def _size(name: str, text: str) -> int:
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = -1
    if size < 0:
        raise BadSetting(f"{name} is {text!r}; accepted: a size such as 512MiB or 8GiB.")
    return size


class KVStoreMetrics:
    """A collector of a store's statistics, in Prometheus' format."""

    def __init__(self, server: KVStoreServer) -> None:
        self._server = server
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Reads the statistics; prometheus_client calls it."""
        stats = self._server.images.stats()
        for name, (text, *fields) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"ponder_kv_store_{name}", text, labels=("tier",))
            for tier, field in zip(("memory", "disk"), fields, strict=True):
                gauge.add_metric((tier,), getattr(stats, field))
            yield gauge
        hits = CounterMetricFamily("ponder_kv_store_hit_blocks", "Blocks that were found, by tier.", labels=("tier",))
        hits.add_metric(("memory",), stats.hits_memory)
        hits.add_metric(("disk",), stats.hits_disk)
        yield hits
        for name, (text, field) in _COUNTERS.items():
            yield CounterMetricFamily(f"ponder_kv_store_{name}", text, value=getattr(stats, field))
        connections = self._server.connections
        yield GaugeMetricFamily("ponder_kv_store_connections", "Connections of servers.", value=connections)

    def text(self) -> bytes:
        return generate_latest(self._registry)


def _app(metrics: KVStoreMetrics) -> Starlette:
    async def read_health(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def read_metrics(request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return Starlette(routes=[Route("/health", read_health), Route("/metrics", read_metrics)])


def _stop(*_: object) -> None:
    raise SystemExit(0)


def run(options: KVStoreOptions) -> None:
    """Serves until a signal. What is in memory alone is then written to the disk, where there is one.

    Raises:
        BadSetting: the options do not go together, or an address cannot be listened on.
        InvalidParameter: the secret or the directory cannot be used.
    """
    memory, disk = options.budgets()
    secret = shared_secret(options.secret_file, "--secret-file")
    listener = bind(options.host, options.metrics_port)
    with listener:
        images = BlockImages(memory, disk, options.directory)
        server = KVStoreServer(images, secret, options.host, options.port)
        logs.configure("warning", "text")
        signal.signal(signal.SIGTERM, _stop)  # uvicorn raises it again when it has ended
        try:
            ready = f"Ponder keeps K/V at {options.host}:{server.port}, metrics at " + url(
                options.host, listener.getsockname()[1]
            )
            config = uvicorn.Config(
                _app(KVStoreMetrics(server)), log_config=None, ws="none", access_log=False,
                timeout_graceful_shutdown=1, server_header=False, date_header=False,
            )  # fmt: skip
            asyncio.run(ReadyServer(config, ready).serve(sockets=[listener]))
        finally:
            server.close()
            images.close(KEEPING_S)
