"""The order in which a tree grows: level by level, depth first, or where an upper confidence bound is highest.

Each search is an async generator that lets its caller take the events after every batch; it ends where the tree does,
at a solved state, or at a limit. Knows nothing of prompts or sequences.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator

from reasoning.tree.events import Ended
from reasoning.tree.grow import Grower
from reasoning.tree.nodes import Node
from reasoning.tree.problem import S

Grown = AsyncGenerator[None, None]


class Search:
    """Why a search ended, as far as no limit ended it."""

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
    """A state without ways on is explored, and so is one whose children all are."""
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
