"""Searches a tree of thoughts (Yao et al. 2023): BFS, DFS and MCTS over forks of a sequence.

A round proposes steps, values the states they lead to, keeps the best and repeats. Each search is an async generator
that lets its caller take the events after every batch; it ends where the tree does, at a solved state, or at a limit. A
program calls `search`; `tree` is the strategy, which answers with the search's result. Closing the generator frees
every branch.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ponder import Event, InvalidParameter, Piece, Spent, Yields, empty_thinking, prefill, refuse_fields, strategy
from ponder import StrategyContext as Context
from reasoning.tree.grow import Grower
from reasoning.tree.meter import Meter
from reasoning.tree.nodes import Ended, Node, NodeChosen, SearchEnded
from reasoning.tree.problem import Problem, S, TreeOptions
from reasoning.tree.writing import Writing

if TYPE_CHECKING:
    from ponder import Sequence as EngineSequence
    from ponder import Tokenizer


Grown = AsyncGenerator[None, None]


class Search:
    """Searches a tree until it is solved, exhausted, or a limit ends it."""

    ended: Ended = "exhausted"


async def bfs(grower: Grower[S], search: Search) -> Grown:
    """Yao et al. 2023, ToT-BFS: the best `beam` states of each level are followed, all in one batch."""
    graph, options = grower.graph, grower.options
    level = [graph.root]
    for _ in range(options.depth):
        children = await grower.expand(level)
        if any(map(graph.solved, children)):
            search.ended = "found"
            yield
            return
        open_ = _worth(grower, children)
        for node in open_[options.beam :]:
            graph.prune(node, "beam")
        level = open_[: options.beam]
        yield
        if grower.meter.over or not level:
            return
    search.ended = "depth"


async def dfs(grower: Grower[S], search: Search) -> Grown:
    """ToT-DFS: the best child first, and back where a state has no child above the threshold."""
    graph, options = grower.graph, grower.options
    stack = [graph.root]
    deepest = False
    while stack and not grower.meter.over:
        node = stack.pop()
        if node.depth >= options.depth:
            deepest = True
            node.drop()
            continue
        children = await grower.expand([node])
        if any(map(graph.solved, children)):
            search.ended = "found"
            yield
            return
        stack += reversed(_worth(grower, children))
        yield
    search.ended = "depth" if deepest else "exhausted"


async def mcts(grower: Grower[S], search: Search) -> Grown:
    """UCT (Kocsis, Szepesvári 2006), with a state's value in the place of a random play-out.

    A round descends to up to `beam` different leaves and expands them in one batch.
    """
    graph, options = grower.graph, grower.options
    graph.root.visits = 1
    while not grower.meter.over:
        leaves: list[Node[S]] = []
        while len(leaves) < options.beam and (leaf := _descend(graph.root, options.exploration)) is not None:
            leaves.append(leaf)
            for node in leaf.path():
                node.visits += 1  # a visit without reward: the next descent of this round goes elsewhere
            leaf.pruned = True
        if not leaves:
            return
        children = await grower.expand(leaves)
        for leaf in leaves:
            leaf.pruned = False
            for node in leaf.path():
                node.visits -= 1
        for child in children:
            for node in child.path():
                node.visits += 1
                node.total += child.value or 0.0
        if any(map(graph.solved, children)):
            search.ended = "found"
            yield
            return
        _worth(grower, children)
        for leaf in leaves:
            _exhaust(leaf)
        for child in children:
            if child.depth >= options.depth and not child.pruned:
                child.drop()
                child.pruned = True
                _exhaust(child)
        yield


def _descend(root: Node[S], exploration: float) -> Node[S] | None:
    """The leaf where the bound is highest at every step; None where all is explored."""
    node = root
    while node.children:
        ways = [child for child in node.children if not child.pruned]
        if not ways:
            return None
        above = math.log(max(node.visits, 1))
        node = max(ways, key=lambda child: _bound(child, above, exploration))
    return None if node.pruned or node.done else node


def _bound(node: Node[S], above: float, exploration: float) -> float:
    if not node.visits:
        return math.inf
    return node.total / node.visits + exploration * math.sqrt(above / node.visits)


def _exhaust(node: Node[S] | None) -> None:
    """A state without ways on is explored, and so is one with all children explored."""
    while node is not None and all(child.pruned for child in node.children):
        node.pruned = True
        node = node.parent


def _worth(grower: Grower[S], children: list[Node[S]]) -> list[Node[S]]:
    """Those to follow, the best first. The others are pruned, or finished and wrong."""
    graph, threshold = grower.graph, grower.options.threshold
    follow: list[Node[S]] = []
    for node in children:
        value = node.value or 0.0
        if node.done:
            node.pruned = True
            node.drop()
        elif node.checked == 0.0:
            graph.prune(node, "hopeless")
        elif value < threshold:
            graph.prune(node, "threshold")
        else:
            follow.append(node)
    return sorted(follow, key=lambda n: -(n.value or 0.0))


_ORDERS = {"bfs": bfs, "dfs": dfs, "mcts": mcts}


async def search(
    seq: EngineSequence,
    problem: Problem[S],
    options: TreeOptions,
    tokenizer: Tokenizer,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[Event, None]:
    """Yields every event, up to `SearchEnded` with the best answer so far, also at a limit.

    `seq` is the prefix of every branch, one token at least; it is not changed.

    Raises:
        InvalidParameter: several samples are asked for at temperature 0, or `value` is the head of a model without one.
        EngineError: as the engine raises it; a branch that does not fit the context is pruned instead.
    """
    if options.times(problem.writes_on) > 1 and options.temperature == 0:
        raise InvalidParameter("temperature", "temperature is 0, where all samples are the same; accepted: above 0.")
    meter = Meter(options.tokens, options.seconds, clock)
    await meter.together([prefill(seq)])
    grower = Grower(seq, problem, options, tokenizer, meter)
    try:
        how = Search()
        await grower.check_root()
        if grower.graph.solved(grower.graph.root):
            how.ended = "found"
        elif not meter.over:
            async with aclosing(_ORDERS[options.search](grower, how)) as growing:
                async for _ in growing:
                    for event in grower.graph.take_events():
                        yield event
        for event in grower.graph.take_events():
            yield event
        best = grower.graph.best()
        for node in best.path():
            yield NodeChosen(node.id)
        yield SearchEnded(
            node=best.id,
            answer=problem.answer(best.state),
            solved=grower.graph.solved(best),
            ended="found" if how.ended == "found" else meter.ended or how.ended,
            value=best.value or 0.0,
            nodes=len(grower.graph),
            written=meter.written,
            read=meter.read,
            seconds=meter.seconds,
        )
    finally:
        grower.scope.close()


@strategy("tree", TreeOptions, takes_checker=lambda _: True)
async def tree(seq: EngineSequence, context: Context, options: TreeOptions) -> Yields:
    """Searches among partial solutions: proposes steps, judges where they lead, and follows the best.

    Without a problem of its own, the steps are lines of the answer, judged by the model as it goes along; a finished
    answer is scored by the request's checker, where there is one. The path that is chosen is the answer: nothing is
    thought beside it. If no path ends before the search does, the best one is written on, unless time or tokens are
    used up.

    Raises:
        InvalidParameter: the options go beyond the quota, the model has no value head for `value`, or the span has a
            constraint, which steps cannot keep to.
    """
    refuse_fields(context, "a tree of steps", "constraint", "stop", "logprobs")
    if options.value == "head" and not context.value_head:
        message = "value is 'head', and the model has no value head that is read; accepted: read, votes, check,"
        raise InvalidParameter("value", f"{message} likelihood.")
    writes_on = context.problem is None or context.problem.writes_on
    quota, wide = context.quota, options.beam * options.times(writes_on)
    if options.nodes > quota.nodes:
        raise InvalidParameter("nodes", f"nodes is {options.nodes}; accepted: at most {quota.nodes}.")
    if wide > quota.branches:
        raise InvalidParameter("beam", f"beam × samples is {wide}; accepted: at most {quota.branches} at once.")
    if options.seed is None:
        options = options.model_copy(update={"seed": context.span.sampling.seed})
    head: list[int] = []
    if context.problem is None and context.markers is not None and not context.closed:
        head = empty_thinking(context.tokenizer, context.markers, opened=context.opened)
    writing = Writing(context, list(options.labels), len(head)) if context.problem is None else None
    problem: Problem[Any] = writing or context.problem
    if head:
        seq.append(head)
        yield Piece("thinking", "", len(head), tuple(head))
    async with aclosing(search(seq, problem, options, context.tokenizer)) as events:
        async for event in events:
            yield event
            ended = event
    assert isinstance(ended, SearchEnded)
    if writing is None:  # nobody wrote the answer to a problem of its own
        tokens = tuple(context.tokenizer.encode(ended.answer))
        pieces = [Piece("answer", ended.answer, len(tokens), tokens, finish_reason="stop")]
    else:
        tokens = writing.chosen[0]
        pieces = writing.pieces("length" if ended.ended in ("tokens", "seconds") else None)
    yield Spent(max(0, ended.written - len(tokens)), ended.read)
    seq.append(tokens)
    for piece in pieces:
        yield piece
    if writing is not None and pieces[-1].finish_reason is None:
        async with aclosing(writing.rest(seq)) as rest:
            async for piece in rest:
                yield piece
