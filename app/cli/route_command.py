"""`ponder route` from start to end: check the options, listen, say when ready, and drain on a signal.

`ponder deploy ray` hands the same router to Ray Serve.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

import uvicorn
import yaml

from app.cli.serve import bind, url
from app.config import BadSetting
from app.observability import logs
from app.routing.disaggregation import NO_OBJECTIVES, Objectives
from app.routing.policies import PolicyName
from app.routing.replicas import ReplicaAddress, ReplicaSet
from app.routing.router import MIN_REMOTE_TOKENS, Router
from app.wire import Patience, connections_allowed, protocol_of, raise_file_limit


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Options of the command, as given."""

    replicas: tuple[str, ...]
    host: str
    port: int
    policy: PolicyName | None
    shared_state: bool
    health_s: float
    drain_s: int
    admin_key: str | None
    prefills: tuple[str, ...] = ()
    objectives: Objectives = NO_OBJECTIVES
    min_remote_tokens: int = MIN_REMOTE_TOKENS
    both: tuple[str, ...] = ()

    def addresses(self) -> list[ReplicaAddress]:
        """
        Raises:
            BadSetting: a replica is none, is there twice, or lacks what the policy needs.
        """
        try:
            found = [ReplicaAddress.parse(each) for each in self.replicas]
            found += [ReplicaAddress.prefill(each, "both") for each in self.both]
            prefills = [ReplicaAddress.prefill(each) for each in self.prefills]
        except ValueError as error:
            raise BadSetting(str(error)) from None
        if not found:
            raise BadSetting("There is no --replica or --both; accepted: at least one server that answers requests.")
        urls = [each.url for each in (*found, *prefills)]
        if twice := [each for each in urls if urls.count(each) > 1]:
            raise BadSetting(f"The replica {twice[0]} is there twice; accepted: each once.")
        if self.policy == "prefix_aware" and (blind := [each.url for each in found if each.events is None]):
            raise BadSetting(
                f"policy is prefix_aware, and {blind[0]} has no K/V events; accepted: {blind[0]},tcp://HOST:PORT for "
                "each replica (--kv-events-config on its side), or another policy."
            )
        return [*found, *prefills]

    def resolved_policy(self, addresses: list[ReplicaAddress]) -> PolicyName:
        if self.policy is not None:
            return self.policy
        answering = [each for each in addresses if each.role != "prefill"]
        return "prefix_aware" if all(each.events is not None for each in answering) else "least_loaded"


class ReadyServer(uvicorn.Server):
    """uvicorn, which says when it accepts connections."""

    def __init__(self, config: uvicorn.Config, ready: str) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._ready, flush=True)


def run(options: RouteOptions) -> None:
    """Routes until a signal; a second one ends the answers that go on.

    Raises:
        BadSetting: the options do not go together, or the address cannot be listened on.
    """
    logs.configure("warning", "text")
    addresses = options.addresses()
    policy = options.resolved_policy(addresses)
    replicas = ReplicaSet(addresses, policy, options.shared_state, options.health_s)
    listener = bind(options.host, options.port)
    patience = Patience(connections_allowed(None, raise_file_limit()))
    config = uvicorn.Config(
        Router(
            replicas, options.admin_key, objectives=options.objectives, min_remote_tokens=options.min_remote_tokens
        ).app(), log_config=None, ws="none", http=protocol_of(patience),
        access_log=False, timeout_graceful_shutdown=options.drain_s, server_header=False, date_header=False,
    )  # fmt: skip
    address = url(options.host, listener.getsockname()[1])
    with listener:
        asyncio.run(ReadyServer(config, f"Ponder routes at {address} by {policy}").serve(sockets=[listener]))


def ray_config(arguments: dict[str, Any], host: str, port: int) -> str:
    """Returns Ray Serve's configuration of the application, as YAML for `serve deploy`."""
    application = {
        "name": "ponder", "route_prefix": "/", "import_path": "app.routing.ray_serve:build", "args": arguments,
    }  # fmt: skip
    config = {"http_options": {"host": host, "port": port}, "applications": [application]}
    return yaml.safe_dump(config, sort_keys=False)


def deploy_on_ray(arguments: dict[str, Any], host: str, port: int) -> None:
    """Deploys the application and waits for a signal.

    Raises:
        BadSetting: Ray Serve is not installed, or an argument is out of range.
    """
    try:
        from app.routing import ray_serve
    except ModuleNotFoundError as error:
        raise BadSetting(f"Ray Serve is not installed ({error}); accepted: pip install 'ponder[ray]'.") from None
    try:
        ray_serve.run(arguments, host, port)
    except ValueError as error:
        raise BadSetting(str(error)) from None
