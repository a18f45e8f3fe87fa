"""A stateful property test of scheduler, block pool and core, on a device that checks its own cache.

Any order of opening, warming, appending, generating, forking, scoring, truncating, cancelling and closing, in a pool
far too small for it, must give every span the same tokens as a fresh run, and leave nothing behind. So must it if the
core is lost at any time and another one goes on with what the journal has.
"""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.config import EngineConfig, LoopName
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.ipc.sequence_journal import SequenceJournal
from engine.kv_cache.block_pool import BlockPool
from engine.params import GREEDY, Span
from engine.speculation.speculator import Speculator
from engine.speculation.suffix import SuffixProposer
from tests.engine.fake import FakeRunner, Letters, PlantedProposer, next_token

tokens = st.lists(st.integers(1, 2), min_size=1, max_size=14)  # a small alphabet: prefixes meet often
pick = st.integers(0, 1000)  # which of the sequences that a rule applies to


class CoreMachine(RuleBasedStateMachine):
    """Drives a core as a careful client does; `expected` mirrors each sequence's tokens."""

    core: EngineCore  # from `start` on
    wrong: int | None = None  # in 256 drafted tokens; None: no drafts
    trees = True  # whether they are verified; else their best paths

    @initialize(
        blocks=st.integers(5, 14),
        size=st.sampled_from([1, 2, 4, 4]),
        budget=st.integers(1, 9),
        running=st.integers(1, 5),
        prefix_cache=st.booleans(),
        loop=st.sampled_from(get_args(LoopName)),
        wrong=st.sampled_from([None, 0, 30, 128, 256]),
    )
    def start(
        self, blocks: int, size: int, budget: int, running: int, prefix_cache: bool, loop: LoopName, wrong: int | None
    ) -> None:
        self.now = 0.0
        self.wrong = wrong
        config = EngineConfig(
            "fake", block_size=size, max_batch_tokens=budget, max_running=running, prefix_cache=prefix_cache, loop=loop
        )
        self.begin(blocks, config)

    def begin(self, blocks: int, config: EngineConfig) -> None:
        self.blocks = blocks
        self.config = config
        self.limit = blocks * config.block_size
        self.journal = SequenceJournal(lambda: self.now)
        self.make_core()
        self.ids = iter(range(1, 10**6))
        self.expected: dict[int, list[int]] = {}
        self.parents: dict[int, int] = {}
        self.spans: dict[int, tuple[int, int]] = {}  # request -> (sequence, tokens left)
        self.stops: dict[int, tuple[str, ...]] = {}  # of every request so far
        self.texts: dict[int, str] = {}
        self.prompts: set[int] = set()  # requests whose prompt's log-probabilities are still to come
        self.scores: dict[int, tuple[int, list[list[float]]]] = {}

    def make_core(self) -> None:
        if hasattr(self, "core"):
            self.core.close()
        self.pool = BlockPool(self.blocks)
        queues = self.config.loop == "auto"  # which is the overlapped loop then, of a device that nothing waits for
        self.runner = FakeRunner(self.pool, self.config.block_size, queues=queues)
        self.core = EngineCore(
            self.config, self.runner, self.pool, Letters, (0,), b"secret", lambda: self.now,
            speculator=self.make_speculator(),
        )  # fmt: skip

    def make_speculator(self) -> Speculator | None:
        if self.wrong is None:
            return None
        proposers = PlantedProposer(self.wrong), SuffixProposer(gram=2)
        return Speculator(proposers, ("planted", "suffix"), 5, trees=self.trees)

    def send(self, command: m.Command) -> None:
        self.journal.sent(command)
        self.core.handle(command)

    def usable(self, pick: int) -> int:
        """A sequence on which nothing runs; a new one when there is none."""
        busy = {s for s, _ in (*self.spans.values(), *self.scores.values())}
        free = sorted(self.expected.keys() - busy)
        return free[pick % len(free)] if free else self.new([1, 2, 1, 2, 1], "", 0)

    @rule(tokens=tokens, tenant=st.sampled_from(["", "", "other"]), priority=st.integers(0, 2))
    def open(self, tokens: list[int], tenant: str, priority: int) -> None:
        self.new(tokens, tenant, priority)

    def new(self, tokens: list[int], tenant: str, priority: int) -> int:
        sequence = next(self.ids)
        tokens = tokens[: self.limit - 1] or [1]
        self.send(m.Open(sequence, tuple(tokens), tenant, priority, None))
        self.expected[sequence] = list(tokens)
        return sequence

    @rule(tokens=tokens, tenant=st.sampled_from(["", "", "other"]), priority=st.integers(0, 2))
    def warm(self, tokens: list[int], tenant: str, priority: int) -> None:
        self.send(m.Warm(tuple(tokens[: self.limit - 1]), tenant, priority))

    @rule(pick=pick, added=tokens)
    def append(self, pick: int, added: list[int]) -> None:
        sequence = self.usable(pick)
        added = added[: self.limit - len(self.expected[sequence])]
        self.send(m.Append(sequence, tuple(added)))
        self.expected[sequence] += added

    def seen_by(self, sequence: int) -> list[int]:
        """Returns the tokens that the model sees of a sequence."""
        return self.expected[sequence]

    def start_span(self, sequence: int, count: int, prompt: bool, stop: tuple[str, ...] = ()) -> None:
        count = min(count, self.limit - len(self.expected[sequence]))
        if count > 0 and self.expected[sequence]:
            request = next(self.ids)
            span = Span(GREEDY, max_tokens=count, stop=stop, prompt_logprobs=0 if prompt else None)
            self.send(m.Generate(sequence, request, span, 0, count))
            self.spans[request] = (sequence, count)
            self.stops[request] = stop
            self.texts[request] = ""
            if prompt:
                self.prompts.add(request)

    @rule(
        picks=st.lists(pick, min_size=1, max_size=4),
        count=st.integers(1, 20),
        prompt=st.booleans(),
        stop=st.sampled_from([(), (), ("bc",), ("dd", "cbb")]),
    )
    def generate(self, picks: list[int], count: int, prompt: bool, stop: tuple[str, ...]) -> None:
        for pick in picks:
            self.start_span(self.usable(pick), count, prompt, stop)

    @rule(
        pick=pick,
        candidates=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=3),
    )
    def score(self, pick: int, candidates: list[list[int]]) -> None:
        sequence = self.usable(pick)
        prefix = self.expected[sequence]
        if 0 < len(prefix) <= self.limit - 3:
            request = next(self.ids)
            self.send(m.Score(sequence, request, tuple(map(tuple, candidates))))
            right = [[float(next_token(prefix + c[:i]) == t) for i, t in enumerate(c)] for c in candidates]
            self.scores[request] = (sequence, right)

    @rule(pick=pick, first=st.integers(0, 3), n=st.integers(1, 3), count=st.integers(0, 6))
    def fork(self, pick: int, first: int, n: int, count: int) -> None:
        """Fork after `first` tokens more, so that there is K/V to share, and let parent and children go on at once."""
        sequence = self.usable(pick)
        if first:
            self.settle(sequence, first)
        children = [next(self.ids) for _ in range(n)]
        self.send(m.Fork(sequence, tuple(children), sequence))
        for child in children:
            self.expected[child] = self.expected[sequence].copy()
            self.parents[child] = sequence
        for each in (sequence, *children) if count else ():
            self.start_span(each, count, False)

    def settle(self, sequence: int, count: int) -> None:
        """Generate and wait for it."""
        self.start_span(sequence, count, False)
        while any(s == sequence for s, _ in self.spans.values()):
            self.step(1)

    @rule(pick=pick, share=st.floats(0, 1), before=st.integers(0, 5), added=tokens, after=st.integers(0, 5))
    def truncate(self, pick: int, share: float, before: int, added: list[int], after: int) -> None:
        """Cut a sequence that has K/V, and let it grow another way."""
        sequence = self.usable(pick)
        if before:
            self.settle(sequence, before)
        length = int(len(self.expected[sequence]) * share)
        self.send(m.Truncate(sequence, length))
        del self.expected[sequence][length:]
        added = added[: self.limit - length]
        self.send(m.Append(sequence, tuple(added)))
        self.expected[sequence] += added
        if after:
            self.start_span(sequence, after, False)

    @rule(pick=pick, ttl=st.floats(0, 10))
    def hold(self, pick: int, ttl: float) -> None:
        self.send(m.Hold(self.usable(pick), ttl))

    @precondition(lambda self: self.spans or self.scores)
    @rule(pick=pick)
    def cancel(self, pick: int) -> None:
        running = [*self.spans, *self.scores]
        request = running[pick % len(running)]
        sequence, _ = self.spans.get(request) or self.scores[request]
        self.spans.pop(request, None)
        self.scores.pop(request, None)  # later replies are dropped, as by a handle
        self.send(m.Cancel(sequence, request))
        self.send(m.Truncate(sequence, len(self.expected[sequence])))

    @precondition(lambda self: len(self.expected) > 3)
    @rule(pick=pick)
    def close(self, pick: int) -> None:
        sequence = sorted(self.expected)[pick % len(self.expected)]
        self.send(m.Close(sequence))
        self.core.settle()
        self.read()
        closed = {sequence}
        while grown := {c for c, p in self.parents.items() if p in closed} - closed:
            closed |= grown
        for gone in closed:
            self.expected.pop(gone, None)
        assert not any(s in closed for s, _ in (*self.spans.values(), *self.scores.values()))

    @precondition(lambda self: self.spans or self.scores)
    @rule()
    def crash(self) -> None:
        """The core is lost between two steps, and the journal is replayed to a fresh one."""
        suspects = self.journal.crashed()
        self.make_core()
        for command in self.journal.commands():
            self.core.handle(command)
        for request in suspects:
            self.spans.pop(request, None)
            self.scores.pop(request, None)

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.now += 1.0
            self.core.step()
            self.read()

    def read(self) -> None:
        for reply in self.core.take_replies():
            self.journal.heard(reply)
            match reply:
                case m.OutputPiece() | m.Scored() if reply.request not in {*self.spans, *self.scores}:
                    continue
                case m.OutputPiece():
                    sequence, left = self.spans[reply.request]
                    assert (reply.output.prompt_logprobs is not None) == (reply.request in self.prompts)
                    self.prompts.discard(reply.request)
                    assert len(reply.output.prompt_logprobs or self.expected[sequence]) == len(self.expected[sequence])
                    for token in reply.output.token_ids:
                        assert token == next_token(self.seen_by(sequence))
                        self.texts[reply.request] += Letters().push([token])
                        self.expected[sequence].append(token)
                        left -= 1
                    self.spans[reply.request] = (sequence, left)
                    if reply.output.finish_reason is not None:
                        if reply.output.finish_reason == "length":
                            assert left == 0
                        text, found = self.texts[reply.request], reply.output.stop_reason
                        if isinstance(found, str):
                            assert text.endswith(found)
                            text = text[:-1]
                        elif reply.output.finish_reason == "stop":
                            assert next_token(self.seen_by(sequence)) == 0
                        assert not any(each in text for each in self.stops[reply.request])
                        del self.spans[reply.request]
                case m.Scored():
                    _, right = self.scores.pop(reply.request)
                    assert [[float(lp > -0.1) for lp in c] for c in reply.logprobs] == right
                case m.Closed():
                    self.spans.pop(reply.request, None)
                    self.scores.pop(reply.request, None)

    @invariant()
    def pool_agrees_with_tables(self) -> None:
        if hasattr(self, "core"):
            self.core.check()
            assert not self.runner.races

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(3000):  # no deadlock: everything that was asked for ends
            if not self.core.has_work:
                break
            self.step(1)
        assert not self.core.has_work and not self.spans and not self.scores
        for sequence in list(self.expected):
            self.send(m.Close(sequence))
        self.core.check()
        assert self.pool.used == 0, "blocks leaked"
        assert self.core.stats().sequences == 0


CoreMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50)
TestCore = pytest.mark.slow(CoreMachine.TestCase)
