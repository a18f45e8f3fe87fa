"""Metrics of a router by replica, in Prometheus' format: what it sent where, what it retried, what it found cached."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily

from app.routing.replicas import ReplicaSet


class RouterMetrics:
    """Counters, and a collector of what the replicas are now."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ponder_router_{name}", text, labels, registry=self._registry)

        self.requests = counter("requests", "Requests that a replica answered, by its status.", "replica", "status")
        self.retries = counter("retries", "Requests that went to another replica after this one failed.", "replica")
        self.broken = counter("broken_streams", "Answers that a replica broke off in mid-stream.", "replica")
        self.blocks = counter("prompt_blocks", "Full blocks of prompts whose tokens were known.", "replica")
        self.matched = counter("matched_blocks", "Leading ones of these that the index had for the replica.", "replica")
        self.prefills = counter(
            "prefills", "Prompts that a server read for another one, by its status.", "replica", "status"
        )
        self.refused = counter("refused", "Requests refused early, by the objective that they would miss.", "objective")
        self._registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Reads the gauges; prometheus_client calls it."""
        gauges = {
            "replica_up": "Whether a replica's last health check found it.",
            "replica_draining": "Whether an operator takes a replica out.",
            "in_flight": "Requests that a replica answers now.",
            "cached_blocks": "KV blocks that a replica's events have told of.",
        }
        made = {
            name: GaugeMetricFamily(f"ponder_router_{name}", text, labels=("replica",)) for name, text in gauges.items()
        }
        for each in self._replicas.replicas.values():
            blocks = self._replicas.index.blocks(each.name)
            for gauge, value in zip(made.values(), (each.up, each.draining, each.in_flight, blocks), strict=True):
                gauge.add_metric((each.name,), float(value))
        yield from made.values()

    def text(self) -> bytes:
        return generate_latest(self._registry)
