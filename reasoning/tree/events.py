"""What a search tells while it grows its tree. Plain data: whoever listens can draw the tree from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ponder import Event

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
