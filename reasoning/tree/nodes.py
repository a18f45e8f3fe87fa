"""Graph of a search, and the events that report it.

A node has the scores of a state, and the path to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal

from ponder import Event
from reasoning.tree.problem import Problem, S, Thought

if TYPE_CHECKING:
    from ponder import Sequence as EngineSequence


Why = Literal["beam", "threshold", "hopeless", "context"]
Ended = Literal["found", "exhausted", "depth", "tokens", "nodes", "seconds"]


@dataclass(frozen=True, slots=True)
class NodeAdded(Event):
    """The root has no parent and the id 0."""

    node: int
    parent: int | None
    depth: int
    text: str


@dataclass(frozen=True, slots=True)
class NodeMerged(Event):
    """A step led to a state that is there already, as `node`."""

    node: int
    parent: int
    text: str


@dataclass(frozen=True, slots=True)
class NodeScored(Event):
    node: int
    value: float  # 0 to 1


@dataclass(frozen=True, slots=True)
class NodePruned(Event):
    """Not followed: outside the beam, below the threshold, known to be hopeless, or too long for the context."""

    node: int
    why: Why


@dataclass(frozen=True, slots=True)
class NodeChosen(Event):
    """Of the path to the answer, from the root on."""

    node: int


@dataclass(frozen=True, slots=True)
class SearchEnded(Event):
    """The last event. `solved`: by the checker or, where it says nothing, by a finished state's value."""

    node: int
    answer: str
    solved: bool
    ended: Ended
    value: float
    nodes: int
    written: int  # tokens that the model wrote
    read: int  # tokens of prompts that it read
    seconds: float


@dataclass(slots=True, eq=False)
class Node(Generic[S]):
    """`seq` is its branch, until the node is left behind. `logprob` sums those of the steps that lead here.

    `checked` is the checker's score; None where it says nothing.
    """

    id: int
    state: S
    parent: Node[S] | None
    depth: int
    done: bool
    seq: EngineSequence | None
    logprob: float = 0.0
    value: float | None = None
    checked: float | None = None
    children: list[Node[S]] = field(default_factory=list)
    pruned: bool = False
    visits: int = 0
    total: float = 0.0  # of the values of nodes visited below

    def path(self) -> list[Node[S]]:
        """From the root to here."""
        above = [] if self.parent is None else self.parent.path()
        return [*above, self]

    def drop(self) -> None:
        """Leave the branch: its blocks go back, unless other branches share them."""
        if self.seq is not None:
            self.seq.close()
            self.seq = None


class Graph(Generic[S]):
    """All nodes, each state once. Changes become events, queued until `take_events` takes them."""

    def __init__(self, problem: Problem[S], seq: EngineSequence, solved_value: float) -> None:
        self.problem = problem
        self._solved_value = solved_value
        self._by_state: dict[S, Node[S]] = {}
        self._events: list[Event] = []
        self.root = Node(0, problem.start, None, 0, problem.done(problem.start), seq)
        self._by_state[self.root.state] = self.root
        self._events.append(NodeAdded(0, None, 0, ""))

    def __len__(self) -> int:
        return len(self._by_state)

    def __contains__(self, state: S) -> bool:
        return state in self._by_state

    def __iter__(self) -> Iterator[Node[S]]:
        return iter(self._by_state.values())

    def add(self, parent: Node[S], thought: Thought[S]) -> Node[S] | None:
        """The new node; None where the state is there already."""
        known = self._by_state.get(thought.state)
        if known is not None:
            self._events.append(NodeMerged(known.id, parent.id, thought.text))
            return None
        done = self.problem.done(thought.state)
        node = Node(len(self), thought.state, parent, parent.depth + 1, done, None)
        self._by_state[node.state] = node
        parent.children.append(node)
        self._events.append(NodeAdded(node.id, parent.id, node.depth, thought.text))
        return node

    def score(self, node: Node[S], value: float) -> None:
        node.value = value
        self._events.append(NodeScored(node.id, value))

    def prune(self, node: Node[S], why: Why) -> None:
        node.pruned = True
        node.drop()
        self._events.append(NodePruned(node.id, why))

    def take_events(self) -> list[Event]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    def solved(self, node: Node[S]) -> bool:
        """Returns whether a finished state answers the task: by its checker or, where that says nothing, by its
        value."""
        if node.checked is not None:
            return node.done and node.checked >= 1.0
        return node.done and (node.value or 0.0) >= self._solved_value

    def best(self) -> Node[S]:
        """The answer so far: a solved state, else one that is finished and not wrong, else the best, deepest, first."""

        def rank(node: Node[S]) -> tuple[bool, bool, float, int, int]:
            finished = node.done and node.checked != 0.0
            return self.solved(node), finished, node.value or 0.0, node.depth, -node.id

        return max(self, key=rank)
