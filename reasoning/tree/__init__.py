"""Tree of thoughts on forks: a task as a `Problem`, `search` over it, and an event for every node."""

from reasoning.tree.nodes import NodeAdded, NodeChosen, NodeMerged, NodePruned, NodeScored, SearchEnded
from reasoning.tree.problem import Asking, Problem, Reply, Thought, TreeOptions
from reasoning.tree.search import search, tree

__all__ = [
    "Asking",
    "NodeAdded",
    "NodeChosen",
    "NodeMerged",
    "NodePruned",
    "NodeScored",
    "Problem",
    "Reply",
    "SearchEnded",
    "Thought",
    "TreeOptions",
    "search",
    "tree",
]
