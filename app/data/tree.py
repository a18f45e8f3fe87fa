"""The messages of a chat as a tree: each follows its parent, and a branch is the way from a beginning to a leaf.

An edited question is a sibling of the first one, an answer made again a sibling of the old one. Knows nothing of what
messages say.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.data.database import Row


class Tree:
    """Messages, the oldest first: rows with `id` and `parent_id`, which is None for a beginning."""

    def __init__(self, messages: Sequence[Row]) -> None:
        self.messages: dict[str, Row] = {message["id"]: message for message in messages}
        self._age = {id: age for age, id in enumerate(self.messages)}
        self._children: dict[str | None, list[str]] = {}
        for message in messages:
            self._children.setdefault(message["parent_id"], []).append(message["id"])

    def __contains__(self, id: str) -> bool:
        return id in self.messages

    def branch(self, leaf_id: str | None) -> list[Row]:
        """The messages from the beginning to this one."""
        path: list[Row] = []
        while leaf_id is not None:
            path.append(self.messages[leaf_id])
            leaf_id = path[-1]["parent_id"]
        return path[::-1]

    def siblings(self, id: str) -> list[str]:
        """Those with the same parent, it among them, the oldest first."""
        return self._children[self.messages[id]["parent_id"]]

    def newest_leaf(self, id: str) -> str:
        """Of the leaves below this message, or itself, the one that was added last."""
        newest, below = id, [id]
        while below:
            children = self._children.get(below.pop(), [])
            below += children
            newest = max(newest, *children, key=self._age.__getitem__) if children else newest
        return newest
