"""Grows a search's tree: proposes thoughts, and values them.

Writes the next steps of several states at once, each on a fork of its state's branch.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from ponder import Sampling, Span, SpanResult, prefill, read_labels
from reasoning.tree.meter import Meter
from reasoning.tree.nodes import Graph, Node
from reasoning.tree.problem import Problem, Reply, S, Thought, TreeOptions

if TYPE_CHECKING:
    from ponder import Sequence as EngineSequence
    from ponder import Tokenizer


JUDGEMENT_TOKENS = 8  # of a sampled judgement
UNKNOWN = 0.5  # the value of a state of which nobody knows anything


class Valuer(Generic[S]):
    """Gives values from 0 to 1. The model is asked only where the problem's checker has no score."""

    def __init__(self, problem: Problem[S], options: TreeOptions, tokenizer: Tokenizer, meter: Meter) -> None:
        self._problem, self._options, self._meter = problem, options, meter
        self._labels = [tokenizer.encode(label) for label in options.labels]
        self._values = list(options.labels.values())

    async def value(self, graph: Graph[S], nodes: Sequence[Node[S]]) -> None:
        """Value states, in one batch. Where a limit leaves no way to, a state stays without a value."""
        await self._meter.together([self.check(node) for node in nodes])
        asked: list[Node[S]] = []
        for node in nodes:
            known = self._known(node)
            if known is None:
                asked.append(node)
            else:
                graph.score(node, known)
        judge = {"votes": self._vote, "head": self._head}.get(self._options.value, self._read)
        for node, value in zip(asked, await self._meter.together([judge(node) for node in asked]), strict=True):
            if isinstance(value, float):
                graph.score(node, value)

    async def check(self, node: Node[S]) -> None:
        """Ask the problem's checker about a state, once. Raises the checker's errors."""
        checked = self._problem.check(node.state)
        node.checked = await checked if inspect.isawaitable(checked) else checked

    def _known(self, node: Node[S]) -> float | None:
        if node.checked is not None:
            return node.checked
        if self._options.value == "likelihood":
            return math.exp(node.logprob)
        return UNKNOWN if self._options.value == "check" or node.seq is None else None

    def _asking(self, node: Node[S]) -> tuple[EngineSequence, int]:
        """A fork with the question, and its length in tokens."""
        assert node.seq is not None
        prompt = list(self._problem.value_prompt(node.state))
        (fork,) = node.seq.fork()
        try:
            fork.append(prompt)
        except BaseException:
            fork.close()
            raise
        return fork, len(prompt)

    async def _read(self, node: Node[S]) -> float | None:
        """The labels' values, weighted by how likely the model finds each."""
        fork, length = self._asking(node)
        try:
            with self._meter.aside(length, 0) as allowed:
                weights = await read_labels(fork, self._labels) if allowed else None
        finally:
            fork.close()
        if weights is None:
            return None
        total = sum(weights)
        return sum(w * v for w, v in zip(weights, self._values, strict=True)) / total if total > 0 else 0.0

    async def _head(self, node: Node[S]) -> float | None:
        """The model's value head after the steps so far; after the question for a label, where they are not in the
        branch."""
        assert node.seq is not None
        fork, length = (node.seq.fork()[0], 1) if self._problem.writes_on else self._asking(node)
        try:
            with self._meter.aside(length, 0) as allowed:
                return await fork.value() if allowed else None
        finally:
            fork.close()

    async def _vote(self, node: Node[S]) -> float | None:
        """The mean of sampled judgements; one that is no label counts as 0."""
        votes = self._options.votes
        fork, length = self._asking(node)
        sampling = Sampling(temperature=self._options.temperature, seed=self._options.seed)
        try:
            with self._meter.aside(length, 1 + votes * JUDGEMENT_TOKENS) as allowed:
                if not allowed:
                    return None
                await prefill(fork)
                replies = await asyncio.gather(
                    *(each.generate_all(Span(sampling, JUDGEMENT_TOKENS)) for each in fork.fork(votes))
                )
                self._meter.written += 1 + sum(len(reply.token_ids) for reply in replies)
        finally:
            fork.close()
        if any(reply.finish_reason == "deadline" for reply in replies):
            self._meter.reach("seconds")
            return None
        return sum(self._judged(reply.text) for reply in replies) / votes

    def _judged(self, text: str) -> float:
        said = text.strip().casefold()
        return next((v for label, v in self._options.labels.items() if said.startswith(label.casefold())), 0.0)


def text_only(tokenizer: Tokenizer) -> dict[int, float]:
    """A bias against every control token but the end of the turn: a step that stays in its branch opens no thinking
    and begins no call."""
    return dict.fromkeys(tokenizer.control_ids.difference(tokenizer.eos_token_ids), -100.0)


@dataclass(slots=True)
class Proposed(Generic[S]):
    """A step, the fork that wrote it where the problem writes on, and its log-probability where that is wanted."""

    thought: Thought[S]
    seq: EngineSequence | None = None
    logprob: float = 0.0


class Grower(Generic[S]):
    """One search's tree and means. `scope` owns every branch: closing it frees them all."""

    def __init__(
        self, seq: EngineSequence, problem: Problem[S], options: TreeOptions, tokenizer: Tokenizer, meter: Meter
    ) -> None:
        (self.scope,) = seq.fork()
        self.graph = Graph(problem, self.scope.fork()[0], options.solved_value)
        self.options = options
        self.meter = meter
        self._problem = problem
        self._tokenizer = tokenizer
        self._valuer = Valuer(problem, options, tokenizer, meter)
        bias = text_only(tokenizer) if problem.writes_on else {}
        self._sampling = Sampling(temperature=options.temperature, seed=options.seed, logit_bias=bias)

    async def expand(self, nodes: Sequence[Node[S]]) -> list[Node[S]]:
        """Next steps from every node, valued: new states alone, in order. The nodes' own branches close."""
        replies = await self.meter.together([self._propose(node) for node in nodes])
        children: list[Node[S]] = []
        new: list[tuple[EngineSequence, int]] = []
        for node, proposed in zip(nodes, replies, strict=True):
            if isinstance(proposed, Exception):
                self.graph.prune(node, "context")
                continue
            for each in proposed or ():
                child = self._child(node, each)
                if child is not None:
                    children.append(child)
                    if each.thought.kept and child.seq is not None:
                        new.append((child.seq, len(each.thought.kept)))
            node.drop()
        await self.meter.together([self._prefill(seq, length) for seq, length in new])
        await self._valuer.value(self.graph, children)
        return children

    async def check_root(self) -> None:
        """Ask the checker about the first state, which may be solved already."""
        await self.meter.together([self._valuer.check(self.graph.root)])

    def _child(self, node: Node[S], proposed: Proposed[S]) -> Node[S] | None:
        """A new node with its branch; None for a state that is there already, or one too many."""
        thought, child = proposed.thought, None
        if thought.state in self.graph or len(self.graph) < self.options.nodes:
            child = self.graph.add(node, thought)
        else:
            self.meter.reach("nodes")
        if child is None:
            if proposed.seq is not None:
                proposed.seq.close()
            return None
        child.logprob = node.logprob + proposed.logprob
        child.seq = proposed.seq
        if proposed.seq is None and node.seq is not None and not child.done:
            (child.seq,) = (self.scope if thought.afresh else node.seq).fork(scope=self.scope)
            child.seq.append(thought.kept)
        return child

    async def _propose(self, node: Node[S]) -> list[Proposed[S]]:
        """Ask one node for steps. Raises the engine's errors."""
        problem = self._problem
        samples = self.options.times(problem.writes_on)
        assert node.seq is not None
        prompt = list(problem.propose_prompt(node.state))
        with ExitStack() as closing:
            (asked,) = node.seq.fork(scope=self.scope)
            closing.callback(asked.close)
            asked.append(prompt)
            unread, end = len(prompt), len(asked)
            forks = [asked]
            if samples > 1:
                if unread > 1 and await self._prefill(asked, unread):
                    unread = 0
                forks = asked.fork(samples, scope=self.scope)
                for fork in forks:
                    closing.callback(fork.close)
            replies = await asyncio.gather(*(self._reply(fork, unread) for fork in forks))
            found: list[Proposed[S]] = []
            for fork, result in zip(forks, replies, strict=True):
                if result is not None:
                    found += self._steps(node, fork, result)
            if self.options.value == "likelihood" and not problem.writes_on:
                found = await self._likely(asked, end, found)
            if problem.writes_on:
                closing.pop_all()
                wrote = {id(each.seq) for each in found}
                for fork in {asked, *forks}:
                    if id(fork) not in wrote:
                        fork.close()
            return found

    def _steps(self, node: Node[S], fork: EngineSequence, result: SpanResult) -> list[Proposed[S]]:
        ended = result.finish_reason == "stop" and result.stop_reason is None
        thoughts = self._problem.read(node.state, Reply(result.text, result.token_ids, ended))
        if not self._problem.writes_on:
            return [Proposed(thought) for thought in thoughts]
        return [Proposed(thought, fork, sum(each.logprob for each in result.logprobs)) for thought in thoughts[:1]]

    async def _reply(self, fork: EngineSequence, unread: int) -> SpanResult | None:
        """None where the tokens do not allow one, or the request's deadline cut it and it cannot be read in part."""
        likely = self.options.value == "likelihood" and self._problem.writes_on
        span = Span(
            self._sampling, self.options.step_tokens, stop=self._problem.stop, logprobs=0 if likely else None
        )  # fmt: skip
        with self.meter.aside(unread, self.options.step_tokens) as allowed:
            if not allowed:
                return None
            result = await fork.generate_all(span)
            self.meter.written += len(result.token_ids)
        if result.finish_reason == "deadline":
            self.meter.reach("seconds")
            return result if self._problem.writes_on else None
        return result

    async def _likely(self, asked: EngineSequence, length: int, found: list[Proposed[S]]) -> list[Proposed[S]]:
        """Returns how likely each of several steps is as the first thing that the model would write."""
        if not found:
            return found
        asked.truncate(length)
        texts = [self._tokenizer.encode(each.thought.text) for each in found]
        with self.meter.aside(sum(map(len, texts)), 0) as allowed:
            if not allowed:
                return found
            scores = await asked.score(texts)
        return [Proposed(each.thought, None, sum(score)) for each, score in zip(found, scores, strict=True)]

    async def _prefill(self, seq: EngineSequence, length: int) -> bool:
        with self.meter.aside(length, 1) as allowed:
            if allowed:
                await prefill(seq)
                self.meter.written += 1
        return allowed
