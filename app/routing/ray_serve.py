"""Ray Serve application: servers that Serve starts, watches and scales, behind the router of `ponder route`.

A replica of `PonderServer` is one `ponder serve` in a process of its own, which reports its address to a named actor.
The ingress, `PonderRouter`, learns the addresses there and talks HTTP to the servers, so prompts go where their
beginning is cached. The servers report their load to Serve, whose policy is `autoscaling.desired_replicas`. Needs
`ponder[ray]`.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from starlette.applications import Starlette

from app.routing.autoscaling import ReplicaLoad, ScalingTargets, desired_replicas, read_load
from app.routing.replicas import ReplicaAddress, ReplicaSet
from app.routing.router import Router

DIRECTORY, NAMESPACE = "ponder-replicas", "ponder"
HOST = "127.0.0.1"  # servers and router are on one machine
START_S = 600.0  # for a server to load its model
BEAT_S, SILENT_S = 1.0, 10.0
_READY = re.compile(r"Ponder is ready at (http://\S+)")


class ReplicaDirectory:
    """Addresses of the servers that have said within `SILENT_S` that they are there; a named actor."""

    def __init__(self) -> None:
        self._heard: dict[tuple[str, str, str], float] = {}

    def beat(self, url: str, events: str, replay: str) -> None:
        self._heard[url, events, replay] = time.monotonic()

    def leave(self, url: str) -> None:
        self._heard = {key: at for key, at in self._heard.items() if key[0] != url}

    def addresses(self) -> list[tuple[str, str, str]]:
        since = time.monotonic() - SILENT_S
        return sorted(key for key, at in self._heard.items() if at >= since)


def _directory() -> Any:  # Any: a handle of an actor, whose methods Ray makes
    kind = ray.remote(num_cpus=0)(ReplicaDirectory)
    return kind.options(name=DIRECTORY, namespace=NAMESPACE, get_if_exists=True, lifetime="detached").remote()


def _free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return f"tcp://{HOST}:{probe.getsockname()[1]}"


class PonderServer:
    """One `ponder serve` with the given options, its own data directory unless they name one.

    Raises:
        RuntimeError: it ended before it was ready; the message ends with what it wrote.
    """

    def __init__(self, options: list[str]) -> None:
        self._data = tempfile.TemporaryDirectory(prefix="ponder-replica-")
        events, replay = _free_endpoint(), _free_endpoint()
        config = json.dumps({"endpoint": events, "replay_endpoint": replay})
        own = [] if "--data-dir" in options else ["--data-dir", self._data.name]
        fixed = ["--host", HOST, "--port", "0", "--kv-events-config", config]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "serve", *options, *own, *fixed],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._errors = deque[str](maxlen=20)
        threading.Thread(target=self._read_errors, daemon=True).start()
        assert self._process.stdout is not None
        ready = _READY.match(self._process.stdout.readline())
        if ready is None:
            self._process.wait(10)
            raise RuntimeError("The server did not start: " + "".join(self._errors))
        self._address = (ready.group(1), events, replay)
        self._directory, self._left = _directory(), threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line)
            sys.stderr.write(line)

    def _beat(self) -> None:
        while not self._left.wait(BEAT_S) and self._process.poll() is None:
            self._directory.beat.remote(*self._address)

    def check_health(self) -> None:
        """Serve asks it, and starts another replica where it raises."""
        if self._process.poll() is not None:
            raise RuntimeError("The server has ended: " + "".join(self._errors))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns a `ReplicaLoad` as Serve takes it."""
        answer = httpx.get(f"{self._address[0]}/metrics", timeout=5.0)
        load = read_load(answer.raise_for_status().text)
        return {"requests": load.requests, "kv_used": load.kv_used}

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            self._left.set()
            self._directory.leave.remote(self._address[0])
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._data.cleanup()


class ScalingPolicy:
    """`desired_replicas` of what the servers reported, as Serve's controller calls it."""

    def __init__(self, requests: float, kv_used: float) -> None:
        self._targets = ScalingTargets(requests, kv_used)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:  # Any: Serve's AutoscalingContext, and its state
        measured = context.aggregated_metrics or {}
        requests, kv_used = measured.get("requests", {}), measured.get("kv_used", {})
        loads = [ReplicaLoad(value, kv_used.get(replica, 0.0)) for replica, value in requests.items()]
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return desired_replicas(loads, context.current_num_replicas, least, most, self._targets), {}


def router_app() -> Starlette:
    """Makes the ingress' application, in its replica."""
    directory = _directory()

    async def discover() -> list[ReplicaAddress]:
        return [ReplicaAddress(*each) for each in await directory.addresses.remote()]

    return Router(ReplicaSet(()), discover=discover).app()


def build(arguments: dict[str, Any]) -> Any:  # Any: Serve's Application
    """Builds the application, also for `serve deploy` (`import_path: app.routing.ray_serve:build`).

    Args:
        arguments: `options` of `ponder serve` (a list of texts), `min_replicas`, `max_replicas`, `target_requests`,
            `target_kv_used`, `cpus` and `gpus` of a server, `upscale_delay_s` and `downscale_delay_s`.

    Raises:
        ValueError: an argument is unknown, or a target out of range.
    """
    known = {
        "options": [], "min_replicas": 1, "max_replicas": 4, "target_requests": 8.0, "target_kv_used": 0.7, "cpus": 1.0,
        "gpus": 0.0, "upscale_delay_s": 10.0, "downscale_delay_s": 300.0,
    }  # fmt: skip
    if unknown := arguments.keys() - known.keys():
        raise ValueError(f"{min(unknown)} is no argument of the application; accepted: {', '.join(known)}.")
    given: dict[str, Any] = {**known, **arguments}
    targets = {"requests": given["target_requests"], "kv_used": given["target_kv_used"]}
    ScalingTargets(**targets)
    scaling = AutoscalingConfig(
        min_replicas=given["min_replicas"], max_replicas=given["max_replicas"],
        initial_replicas=given["min_replicas"], metrics_interval_s=1.0, look_back_period_s=5.0,
        upscale_delay_s=given["upscale_delay_s"], downscale_delay_s=given["downscale_delay_s"],
        policy=AutoscalingPolicy(policy_function=ScalingPolicy, policy_kwargs=targets),
    )  # fmt: skip
    server = serve.deployment(
        name="PonderServer", autoscaling_config=scaling, graceful_shutdown_timeout_s=30.0,
        ray_actor_options={"num_cpus": given["cpus"], "num_gpus": given["gpus"]},
    )(PonderServer)  # fmt: skip

    class PonderRouter:
        def __init__(self, servers: Any) -> None:  # Any: a handle, which makes Serve deploy them
            self.servers = servers

    ingress = serve.deployment(name="PonderRouter", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=10_000)
    router = ingress(serve.ingress(router_app)(PonderRouter))
    return router.bind(server.bind(given["options"]))


def run(arguments: dict[str, Any], host: str, port: int) -> None:
    """Starts Ray on this machine, or joins the cluster of `RAY_ADDRESS`, and serves until a signal.

    Raises:
        ValueError: as `build` does.
    """
    application = build(arguments)
    ray.init(ignore_reinit_error=True, include_dashboard=False)
    serve.start(http_options={"host": host, "port": port})
    serve.run(application, route_prefix="/")
    print(f"Ponder is deployed at http://{host}:{port}", flush=True)
    try:
        threading.Event().wait()
    finally:
        serve.shutdown()
        ray.shutdown()
