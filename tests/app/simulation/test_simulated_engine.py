"""Simulated engines decide as the engine does: the same commands give the same steps, preemptions and hits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import get_args

import pytest
import torch
from torch import Tensor

from app.simulation.cost_model import LinearCost, StepLoad
from app.simulation.recorded_trace import RecordedRequest, prefix_root
from app.simulation.simulated_engine import SimulatedEngine, SimulatedRequest, TokenGaps
from engine.config import EngineConfig, PolicyName
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.core.step import Step
from engine.kv_cache.block_pool import BlockPool
from engine.params import GREEDY, Span
from tests.engine.fake import Letters

SIZE = 4
HASHED = 8  # tokens of a named block
COST = LinearCost(0.004, 0.0007, 0.0002, 1e-6, 1e-7)
POLICIES = get_args(PolicyName)


@dataclass
class Steps:
    """Record of a run: each step's rows by (sequence, tokens) and its end, and when each request began and ended."""

    rows: list[list[tuple[int, int]]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    first_tokens: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    gaps: TokenGaps = field(default_factory=TokenGaps)
    counters: tuple[int, ...] = ()


class VirtualDevice:
    """Computes nothing; its steps take the time of the cost model on the clock of `done`."""

    vocab_size = 4
    queues = False

    def __init__(self) -> None:
        self.now = 0.0
        self.done = Steps()

    def run(self, step: Step) -> Tensor:
        reads = [(row.start, row.count) for row in step.rows if row.count > 1]
        decodes = [row.start + 1 for row in step.rows if row.count == 1]
        pairs = sum(start + at + 1 for start, count in reads for at in range(count))
        self.now += COST.seconds(StepLoad(sum(count for _, count in reads), len(decodes), sum(decodes), pairs))
        self.done.rows.append([(row.seq.id, row.count) for row in step.rows])
        self.done.ends.append(self.now)
        return torch.zeros(sum(max(0, row.end - max(row.start, row.logits_from)) for row in step.rows), 4)


def made_up(count: int, seed: int, *, longest: int = 60, gap_s: float = 0.05) -> list[RecordedRequest]:
    """Requests whose prompts share prefixes, are asked again, or share nothing; of three tenants and classes."""
    rng, requests, at = Random(seed), list[RecordedRequest](), 0.0
    chains: list[tuple[int, ...]] = [(0,)]
    for number in range(count):
        at += rng.expovariate(1 / gap_s)
        tokens, ids = rng.randint(1, longest), tuple[int, ...]()
        if rng.random() < 0.7:
            ids = rng.choice(chains)
            if rng.random() < 0.7 and len(ids) < longest // HASHED:
                ids = (*ids, *(100 * number + at for at in range(1, rng.randint(2, 4))))
                chains.append(ids)
            tokens = HASHED * len(ids) - rng.choice((0, 0, 1, 5))
        tenant = rng.choice(("a", "a", "b", "c"))
        requests.append(
            RecordedRequest(at, tokens, rng.randint(1, 40), ids, HASHED, tenant, rng.choice((0, 1, 2)), number=number)
        )
    return requests


def by_the_engine(config: EngineConfig, blocks: int, requests: Sequence[RecordedRequest], most: int) -> Steps:
    """Runs at most so many steps of the engine's core on a device that keeps virtual time."""
    device = VirtualDevice()
    core = EngineCore(config, device, BlockPool(blocks), Letters, (), b"secret", clock=lambda: device.now)
    told: dict[int, float] = {}
    due = list(reversed(list(enumerate(requests, 1))))
    while (due or core.has_work) and len(device.done.rows) < most:
        if not core.has_work:
            device.now = max(device.now, due[-1][1].at)
        while due and due[-1][1].at <= device.now:
            id, request = due.pop()
            ids = request.hash_ids
            names = [ids[at // HASHED] if ids else 500_000 + request.number for at in range(request.prompt_tokens)]
            core.handle(m.Open(id, tuple(names), request.tenant, request.priority, None))
            span = Span(GREEDY, max_tokens=request.output_tokens, ignore_eos=True)
            core.handle(m.Generate(id, id, span, 0, request.output_tokens))
        core.step()
        for reply in core.take_replies():
            if isinstance(reply, m.OutputPiece) and reply.output.token_ids:
                if reply.request in told:
                    device.done.gaps.add(device.now - told[reply.request], 1)
                told[reply.request] = device.now
                device.done.first_tokens.setdefault(reply.request, device.now)
                if reply.output.finish_reason is not None:
                    device.done.ended[reply.request] = device.now
                    core.handle(m.Close(reply.request))
    core.check()
    stats = core.stats()
    device.done.counters = (
        stats.preemptions, stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.recomputed_tokens,
        stats.prompt_tokens, stats.blocks_cached,
    )  # fmt: skip
    return device.done


def simulated(
    config: EngineConfig, blocks: int, requests: Sequence[RecordedRequest], most: int, *, lazy: bool
) -> tuple[Steps, list[int]]:
    """Does the same in the simulator; also returns the rows that it left out of each step."""
    done, left_out = Steps(), list[int]()

    def observe(step: Step, lazy_rows: int, seconds: float) -> None:
        done.rows.append([(row.seq.id, row.count) for row in step.rows])
        done.ends.append(engine.now)
        left_out.append(lazy_rows)

    engine = SimulatedEngine(config, blocks, COST, observe, lazy=lazy)
    asked = [
        SimulatedRequest(
            each.at,
            each.prompt_tokens,
            each.output_tokens,
            each.digests(SIZE),
            each.tail,
            each.tenant,
            each.priority,
            prefix_root(each.tenant),
        )
        for each in requests
    ]
    for request in asked:
        while engine.now < request.at and len(done.rows) < most and (engine.running or engine.waiting):
            engine.advance(engine.now + 1e-12)  # one step
        if len(done.rows) >= most:
            break
        engine.submit(request)
    while len(done.rows) < most and (engine.running or engine.waiting):
        engine.advance(engine.now + 1e-12)
    engine.check()
    done.first_tokens = {at: each.first_token_at for at, each in enumerate(asked, 1) if each.first_token_at >= 0}
    done.ended = {at: each.ended_at for at, each in enumerate(asked, 1) if each.ended_at >= 0}
    done.gaps = engine.gaps
    counters = engine.counters
    done.counters = (
        counters.preemptions, counters.prefix_query_tokens, counters.prefix_hit_tokens, counters.recomputed_tokens,
        counters.prompt_tokens, engine.pool.cached,
    )  # fmt: skip
    return done, left_out


def compare(policy: PolicyName, blocks: int, requests: Sequence[RecordedRequest], most: int) -> Steps:
    """Holds the simulator to the engine, row by row and with rows left out of its steps."""
    config = EngineConfig("none", block_size=SIZE, max_batch_tokens=32, max_running=8, policy=policy, loop="plain")
    real = by_the_engine(config, blocks, requests, most)
    plain, none = simulated(config, blocks, requests, most, lazy=False)
    assert not any(none)
    assert plain.rows == real.rows
    lazy, left_out = simulated(config, blocks, requests, most, lazy=True)
    assert sum(left_out) > len(left_out) / 4  # else there is nothing to hold to the engine
    for at, rows in enumerate(real.rows):
        assert len(lazy.rows[at]) + left_out[at] == len(rows)
        kept = iter(rows)
        assert all(row in kept for row in lazy.rows[at])  # in the engine's order
        assert [row for row in lazy.rows[at] if row[1] > 1] == [row for row in rows if row[1] > 1]
    for made in (plain, lazy):
        assert made.ends == real.ends
        assert made.first_tokens == real.first_tokens and made.ended == real.ended
        assert made.counters == real.counters
        assert made.gaps.bins == real.gaps.bins
    return real


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_are_those_of_the_engine(policy: PolicyName) -> None:
    real = compare(policy, 60, made_up(120, 3), 400)
    preemptions, _, hits, recomputed, _, _ = real.counters
    assert preemptions > 0 and hits > 0 and recomputed > 0
    assert len(real.rows) == 400


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_ten_thousand_steps_are_those_of_the_engine(policy: PolicyName) -> None:
    real = compare(policy, 48, made_up(2500, 11, gap_s=0.12), 10_000)
    assert real.counters[0] > 20 and len(real.rows) == 10_000


def test_gaps_have_their_percentiles_within_half_a_percent() -> None:
    gaps, other = TokenGaps(), TokenGaps()
    assert gaps.percentile(50) == 0.0
    for at in range(1, 101):
        (gaps if at % 2 else other).add(at / 1000, 3)
    gaps.merge(other)
    assert gaps.percentile(50) == pytest.approx(0.050, rel=0.005)
    assert gaps.percentile(99) == pytest.approx(0.099, rel=0.005)
