"""The engines' own counters as metrics, with queued work and its estimated cost. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from app.admission.queue_estimate import QueueEstimate
    from app.answering.model_cascade import ModelCascade
    from app.answering.model_registry import ModelRegistry
    from app.answering.served_model import ServedModel
    from app.observability.time_windows import TimeWindows
    from engine.outputs import Stats

_GAUGES = {
    "requests_running": ("Sequences in the engine's batch.", "running"),
    "requests_waiting": ("Sequences waiting for the engine.", "waiting"),
    "sequences_open": ("Open sequence handles, idle ones included.", "sequences"),
}
_BLOCKS = {
    "used": "blocks_used",
    "cached": "blocks_cached",
    "free": "blocks_free",
    "adapter_pinned": "adapter_blocks_pinned",
    "adapter_used": "adapter_blocks_used",
    "adapter_idle": "adapter_blocks_idle",
}
_COUNTERS = {
    "prompt_tokens": ("Prompt tokens computed (prefix cache hits excluded).", "prompt_tokens"),
    "generation_tokens": ("Tokens generated.", "generated_tokens"),
    "recomputed_tokens": ("Tokens computed again after a preemption.", "recomputed_tokens"),
    "prefix_cache_query_tokens": ("Prompt tokens looked up in the prefix cache.", "prefix_query_tokens"),
    "prefix_cache_hit_tokens": ("Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    "preemptions": ("Sequences that lost their KV to others.", "preemptions"),
    "engine_steps": ("Steps of the engine.", "steps"),
    "engine_step_tokens": ("Tokens through the model, all steps together.", "step_tokens"),
    "engine_step_seconds": ("Seconds spent in steps.", "step_seconds"),
    "sequences_resumed": ("Sequences that went on after a wait for a tool or the like.", "resumed"),
    "sequences_resumed_late": ("Of those, after their lease was over.", "resumed_late"),
    "resumed_tokens": ("Tokens that had K/V when such a wait began.", "resumed_tokens"),
    "resumed_reused_tokens": ("Of those, tokens that needed no computing again.", "resumed_reused_tokens"),
    "encoded_image_tokens": ("Tokens of images that the encoder has made.", "encoded_tokens"),
    "encoder_seconds": ("Seconds of encoding images.", "encoder_seconds"),
    "warmed_tokens": ("Tokens of next turns prefilled while the engine was idle.", "warmed_tokens"),
    "chunk_hit_tokens": ("Tokens of retrieved chunks whose K/V was copied from another prompt.", "chunk_hit_tokens"),
    "warmed_hit_tokens": ("Of those, tokens that a request found in the prefix cache.", "warmed_hit_tokens"),
}
_STATES = ("used", "cached", "free")
_TIERS = ("host", "disk")
_TIER_COUNTERS = {
    "kv_tier_saved_blocks": ("Blocks copied from the pool to host memory.", "saved_blocks"),
    "kv_tier_written_blocks": ("Blocks written to disk.", "written_blocks"),
    "kv_tier_passed_over_blocks": ("Blocks that were there, but were faster to compute again.", "passed_over_blocks"),
    "kv_tier_lost_blocks": ("Blocks given up with no copy left.", "lost_blocks"),
    "kv_tier_bad_blocks": ("Files of blocks that were damaged or cut short.", "bad_blocks"),
    "kv_tier_failed_writes": ("Writes to disk that failed.", "failed_writes"),
}
_TRANSFER_COUNTERS = {
    "kv_transfer_received_blocks": (
        "Blocks loaded from the server that read the prompt, or a store.",
        "received_blocks",
    ),
    "kv_transfer_received_bytes": ("Bytes of these blocks.", "received_bytes"),
    "kv_transfer_failed_loads": ("Loads that ended early: the rest was computed here.", "failed_loads"),
    "kv_transfer_sent_blocks": ("Blocks sent to servers that decode, or put at a store.", "sent_blocks"),
    "kv_transfer_layerwise_blocks": ("Of those, blocks that were sent layer by layer.", "layerwise_blocks"),
    "kv_transfer_sent_bytes": ("Bytes of the blocks sent.", "sent_bytes"),
    "kv_transfer_send_seconds": ("Seconds of sending blocks.", "send_seconds"),
    "kv_transfer_overlapped_seconds": ("Of those, while the same prompt was still being read.", "overlapped_seconds"),
    "kv_transfer_lookups": ("Prompts looked up at K/V stores.", "lookups"),
    "kv_transfer_lookup_seconds": ("Seconds of these lookups.", "lookup_seconds"),
    "kv_transfer_unsent_blocks": ("Blocks not put at a store: it was away, slow or full.", "unsent_blocks"),
    "kv_transfer_passed_over_blocks": ("Blocks not looked up, as computing seemed faster.", "passed_over_blocks"),
}
_SPECULATION_COUNTERS = {  # named as in vLLM
    "spec_decode_num_drafts": ("Drafts verified.", "rows"),
    "spec_decode_num_draft_tokens": ("Drafted tokens verified.", "drafted"),
    "spec_decode_num_accepted_tokens": ("Of those, tokens that were accepted.", "accepted"),
}
_ADAPTERS = {  # by adapter: the metric, and whether it only grows
    "adapter_sequences": ("Open sequences by adapter.", "sequences", False),
    "adapter_resident": ("1 where the adapter is ready for steps.", "resident", False),
    "adapter_loading": ("1 where the adapter is on its way there.", "loading", False),
    "adapter_opened_sequences": ("Sequences opened by adapter, forks included.", "opened", True),
    "adapter_loads": ("Times that the adapter became resident.", "loads", True),
    "adapter_evictions": ("Times that another adapter took its slot.", "evictions", True),
    "adapter_prompt_tokens": ("Prompt tokens computed by adapter.", "prompt_tokens", True),
    "adapter_generation_tokens": ("Tokens generated by adapter.", "generated_tokens", True),
}
_COST_WINDOW_S = 300.0


class EngineCounters(Collector):
    """The engines' newest statistics as metrics, labelled by model where there are several."""

    def __init__(
        self,
        models: ModelRegistry,
        queue_estimates: Mapping[str, QueueEstimate],
        windows: TimeWindows,
        price_per_hour: float | None,
    ) -> None:
        self.stats: dict[str, Stats] = {}  # by model
        self._block_bytes = {served.name: block_bytes_of(served) for served in models}
        self._queue_estimates = queue_estimates
        self._windows = windows
        self._price = price_per_hour
        self._auto = models.auto
        self._labels = ["model"] if len(models) > 1 else []

    def collect(self) -> Iterator[Metric]:
        if not self.stats:
            return
        counters = [([model] if self._labels else [], stats) for model, stats in self.stats.items()]
        for name, (text, field) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"ponder_{name}", text, labels=self._labels)
            for model, stats in counters:
                gauge.add_metric(model, getattr(stats, field))
            yield gauge
        blocks = GaugeMetricFamily("ponder_kv_blocks", "KV blocks by state.", labels=[*self._labels, "state"])
        for model, stats in counters:
            for state, field in _BLOCKS.items():
                blocks.add_metric([*model, state], getattr(stats, field))
        yield blocks
        memory = GaugeMetricFamily("ponder_kv_bytes", "Bytes of the KV pool by state.", labels=[*self._labels, "state"])
        for model, stats in counters:
            size = self._block_bytes[model[0] if model else next(iter(self.stats))]
            for state, field in _BLOCKS.items():
                memory.add_metric([*model, state], getattr(stats, field) * size)
        yield memory
        for name, (text, field, grows) in _ADAPTERS.items():
            kind = CounterMetricFamily if grows else GaugeMetricFamily
            family = kind(f"ponder_{name}", text, labels=[*self._labels, "adapter"])
            for model, stats in counters:
                for adapter in stats.adapters:
                    family.add_metric([*model, adapter.name], getattr(adapter, field))
            yield family
        states = GaugeMetricFamily(
            "ponder_state_bytes", "Bytes of recurrent states by use.", labels=[*self._labels, "state"]
        )
        for model, stats in counters:
            for state in _STATES:
                states.add_metric([*model, state], getattr(stats.states, state) * stats.states.slot_bytes)
        yield states
        name = "ponder_state_checkpoints_found"
        found = CounterMetricFamily(name, "Checkpoints of states that a sequence went on from.", labels=self._labels)
        for model, stats in counters:
            found.add_metric(model, stats.states.found)
        yield found
        for name, (text, field) in _COUNTERS.items():
            counter = CounterMetricFamily(f"ponder_{name}", text, labels=self._labels)
            for model, stats in counters:
                counter.add_metric(model, getattr(stats, field))
            yield counter
        yield from self._tiers(counters)
        yield from self._speculation(counters)
        yield from self._waits()
        if (cost := self._cost()) is not None:
            yield cost
        if self._auto is not None:
            yield self._answers(self._auto)

    def _tiers(self, counters: Sequence[tuple[list[str], Stats]]) -> Iterator[Metric]:
        """Yields metrics of the KV tiers below the pools, and of K/V exchanged with other servers."""
        labels = [*self._labels, "tier"]
        used = GaugeMetricFamily("ponder_kv_tier_bytes", "Bytes in use below the KV pool.", labels=labels)
        limit = GaugeMetricFamily("ponder_kv_tier_limit_bytes", "Bytes there may be below the KV pool.", labels=labels)
        hits = CounterMetricFamily("ponder_kv_tier_hit_blocks", "Blocks that came back to the pool.", labels=labels)
        for model, stats in counters:
            for tier in _TIERS:
                used.add_metric([*model, tier], getattr(stats.tiers, f"{tier}_bytes"))
                limit.add_metric([*model, tier], getattr(stats.tiers, f"{tier}_bytes_total"))
                hits.add_metric([*model, tier], getattr(stats.tiers, f"{tier}_hit_blocks"))
        yield from (used, limit, hits)
        for name, (text, field) in _TIER_COUNTERS.items():
            counter = CounterMetricFamily(f"ponder_{name}", text, labels=self._labels)
            for model, stats in counters:
                counter.add_metric(model, getattr(stats.tiers, field))
            yield counter
        for name, (text, field) in _TRANSFER_COUNTERS.items():
            counter = CounterMetricFamily(f"ponder_{name}", text, labels=self._labels)
            for model, stats in counters:
                counter.add_metric(model, getattr(stats.kv_transfer, field))
            yield counter

    def _speculation(self, counters: Sequence[tuple[list[str], Stats]]) -> Iterator[Metric]:
        """Yields metrics of speculative decoding. The time saved is an estimate, which may fall."""
        for name, (text, field) in _SPECULATION_COUNTERS.items():
            counter = CounterMetricFamily(f"ponder_{name}", text, labels=self._labels)
            for model, stats in counters:
                counter.add_metric(model, getattr(stats.speculation, field))
            yield counter
        at = CounterMetricFamily(
            "ponder_spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position in the draft, from 0.",
            labels=[*self._labels, "position"],
        )  # fmt: skip
        length = GaugeMetricFamily(
            "ponder_spec_decode_tokens_per_step", "Tokens of a decode with a draft: 1 and those accepted, on average.",
            labels=self._labels,
        )  # fmt: skip
        saved = GaugeMetricFamily(
            "ponder_spec_decode_saved_seconds", "Time that drafts have saved, by the time of steps without.",
            labels=self._labels,
        )  # fmt: skip
        for model, stats in counters:
            for position, accepted in enumerate(stats.speculation.accepted_at):
                at.add_metric([*model, str(position)], accepted)
            length.add_metric(model, stats.speculation.tokens_per_step)
            saved.add_metric(model, stats.speculation.saved_s)
        yield from (at, length, saved)

    def _waits(self) -> Iterator[Metric]:
        """Yields metrics of requests that were let in and are not done."""
        answers = GaugeMetricFamily("ponder_backlog_answers", "Answers let in and not ended.", labels=self._labels)
        tokens = GaugeMetricFamily("ponder_backlog_tokens", "Tokens they are likely to take yet.", labels=self._labels)
        wait = GaugeMetricFamily(
            "ponder_expected_wait_seconds", "How long a request that comes now is likely to wait.", labels=self._labels
        )
        for name, queue_estimate in self._queue_estimates.items():
            model = [name] if self._labels else []
            answers.add_metric(model, len(queue_estimate))
            tokens.add_metric(model, queue_estimate.tokens)
            wait.add_metric(model, queue_estimate.wait_s())
        yield from (answers, tokens, wait)

    @property
    def cost_per_million(self) -> float | None:
        """The cost of a million tokens, by those of the last five minutes; None without any, or without a price."""
        window = self._windows.window(_COST_WINDOW_S)
        per_s = window["prompt_tokens_per_s"] + window["generated_tokens_per_s"]
        return self._price / 3600 / per_s * 1e6 if self._price is not None and per_s else None

    def _cost(self) -> Metric | None:
        if (cost := self.cost_per_million) is None:
            return None
        return GaugeMetricFamily(
            "ponder_cost_per_million_tokens", "Of the price per hour, by the tokens read and written in five minutes.",
            value=cost,
        )  # fmt: skip

    def _answers(self, auto: ModelCascade) -> Metric:
        answers = CounterMetricFamily(
            "ponder_auto_answers", "Answers written for the model `auto`: given, or escalated to the next model.",
            labels=["model", "outcome"],
        )  # fmt: skip
        for served in auto.steps:
            for outcome, passed in (("given", True), ("escalated", False)):
                answers.add_metric([served.name, outcome], auto.counts[served.name, passed])
        return answers


def block_bytes_of(served: ServedModel) -> int:
    """Bytes of one block of the model's KV pool, which is of one K/V group."""
    from engine.model.memory import needs_of  # torch comes with it, and a worker asks for no such thing

    needs = needs_of(served.engine.config)
    return needs.block // needs.groups
