"""Token trees of drafts (SpecInfer, Miao et al. 2024): each token with the index of the one that it follows.

A tree is two tuples: tokens, and `parents`, which is empty for a chain. -1 stands for the sequence's newest token, the
root. In preorder a token directly follows its parent or begins a branch, so a tree falls into runs that are chains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

Tree = tuple[tuple[int, ...], tuple[int, ...]]  # tokens and parents
NO_DRAFTS: Mapping[int, Tree] = MappingProxyType({})  # by sequence


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Returns the tokens on the way from the root to `node`, by index; it is the last, and -1 has none."""
    if not parents:
        return list(range(node + 1))
    path = list[int]()
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def child_of(tokens: Sequence[int], parents: Sequence[int], node: int, token: int) -> int | None:
    """Returns the index of the child of `node` that is `token`, if there is one."""
    if not parents:
        return node + 1 if node + 1 < len(tokens) and tokens[node + 1] == token else None
    below = range(node + 1, len(tokens))
    return next((at for at in below if parents[at] == node and tokens[at] == token), None)


def runs(tokens: int, parents: Sequence[int]) -> list[range]:
    """Splits a tree of so many tokens, in preorder, into runs of those that each follow the one before."""
    if not parents:
        return [range(tokens)]
    begins = [at for at, parent in enumerate(parents) if at == 0 or parent != at - 1]
    return [range(first, end) for first, end in zip(begins, [*begins[1:], len(parents)], strict=True)]


def preorder(parents: Sequence[int]) -> list[int]:
    """Returns the order of a tree's tokens in preorder; children come in their own order."""
    children: dict[int, list[int]] = {}
    for at, parent in enumerate(parents):
        children.setdefault(parent, []).append(at)
    order, ahead = list[int](), children.get(-1, [])[::-1]
    while ahead:
        order.append(ahead.pop())
        ahead += children.get(order[-1], [])[::-1]
    return order


def reordered(parents: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Returns the parents of the tokens `order` of a tree; () where they are a chain."""
    place = {-1: -1} | {old: new for new, old in enumerate(order)}
    moved = tuple(place[parents[old]] for old in order)
    return () if moved == tuple(range(-1, len(moved) - 1)) else moved
