"""How promising states are: by a program, or by the model, asked on throw-away forks of their branches.

Knows nothing of how states come about or which are followed.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic

from ponder import Sampling, Span, prefill, read_labels
from reasoning.tree.meter import Meter
from reasoning.tree.nodes import Graph, Node
from reasoning.tree.options import TreeOptions
from reasoning.tree.problem import Problem, S

if TYPE_CHECKING:
    from ponder import Sequence as EngineSequence
    from ponder import Tokenizer

JUDGEMENT_TOKENS = 8  # of a sampled judgement
UNKNOWN = 0.5  # the value of a state of which nobody knows anything


class Valuer(Generic[S]):
    """Gives values from 0 to 1. What the problem's checker can tell the model is not asked."""

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
        judge = self._vote if self._options.value == "votes" else self._read
        for node, value in zip(asked, await self._meter.together([judge(node) for node in asked]), strict=True):
            if isinstance(value, float):
                graph.score(node, value)

    async def check(self, node: Node[S]) -> None:
        """Ask the problem's checker about a state, once. Raises what it raises."""
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
        return sum(self._judged(reply.text) for reply in replies) / votes

    def _judged(self, text: str) -> float:
        said = text.strip().casefold()
        return next((v for label, v in self._options.labels.items() if said.startswith(label.casefold())), 0.0)
