"""Joins drafts of several proposers into one token tree, of which the likeliest tokens are verified.

A prefix that several propose is one branch. Proposers that agree on a token make it likelier: it is wrong if each of
them is, as if they erred independently. Of the tokens that may follow one at most one is right, so the less likely
ones share what the likelier ones leave. Knows nothing of sequences or of time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from engine.core.token_tree import path_to, reordered
from engine.speculation.proposer import DraftTokens

MIN_LEFT = 0.02  # probability of the tokens that follow one, less likely than such as are taken to be certain

Source = tuple[str, float]  # a proposer's name, and its confidence in a token


class RatedTree(NamedTuple):
    """A token tree: `probability` (tokens,) of each token that it is right, given that those before it are; `sources`
    (tokens,) of each the proposers, with their confidence. `parents` as in `DraftTokens`."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probability: tuple[float, ...]
    sources: tuple[tuple[Source, ...], ...]

    @classmethod
    def of(cls, name: str, draft: DraftTokens, probability: Callable[[float], float]) -> RatedTree:
        """Returns one proposer's draft; `probability` is that of tokens with such a confidence."""
        known = {each: (probability(each), ((name, each),)) for each in set(draft.confidence)}
        rated = [known[each] for each in draft.confidence]
        return cls(draft.tokens, draft.parents, tuple([p for p, _ in rated]), tuple([source for _, source in rated]))

    @property
    def likely(self) -> float:
        """Returns the probability that the sequence goes on with one of its tokens."""
        if not self.parents:
            return self.probability[0]
        return min(1.0, sum(each for each, parent in zip(self.probability, self.parents, strict=True) if parent < 0))

    def chosen(self, order: Sequence[int]) -> RatedTree:
        """Returns the tokens `order`, by index; each after its parent, which is among them."""
        return RatedTree(
            tuple([self.tokens[at] for at in order]),
            reordered(self.parents, order) if self.parents else (),
            tuple([self.probability[at] for at in order]),
            tuple([self.sources[at] for at in order]),
        )

    def cut(self, count: int) -> RatedTree:
        """Returns the first `count` tokens."""
        if count >= len(self.tokens):
            return self
        return RatedTree(self.tokens[:count], self.parents[:count], self.probability[:count], self.sources[:count])

    def survival(self, trust: float) -> list[float]:
        """Returns of each token the probability that it and those before it are right, each token being as likely as
        `trust` says beside its probability."""
        if not self.parents:
            return list(accumulate(self.probability, lambda before, each: before * trust * each, initial=1.0))[1:]
        alive = [1.0] * (len(self.tokens) + 1)  # the last one is that of the sequence, before any token
        for at, (parent, probability) in enumerate(zip(self.parents, self.probability, strict=True)):
            alive[at] = alive[parent] * trust * probability
        return alive[:-1]

    def likeliest(self, count: int, trust: float, *, chain: bool) -> tuple[RatedTree, list[float]]:
        """Returns the `count` tokens that are likeliest to be reached, in that order, and their survival; with `chain`
        those of the path of which most tokens are expected to be right."""
        alive = self.survival(trust)
        if not self.parents:
            return self.cut(count), alive[:count]
        order = sorted(range(len(self.tokens)), key=lambda at: -alive[at])
        if chain:
            paths = (path_to(self.parents, at)[:count] for at in order)
            order = max(paths, key=lambda path: sum(alive[at] for at in path))
        order = order[:count]
        return self.chosen(order), [alive[at] for at in order]


def joined(trees: Sequence[RatedTree]) -> RatedTree:
    """Returns one tree of all paths of `trees`. A single one is returned as it is."""
    if len(trees) == 1:
        return trees[0]
    tokens, parents, wrong = list[int](), list[int](), list[float]()
    sources: list[tuple[Source, ...]] = []
    known: dict[tuple[int, int], int] = {}
    for tree in trees:
        place = [-1] * (len(tree.tokens) + 1)  # of each token in the joined tree; the last one is the sequence's
        above = tree.parents or range(-1, len(tree.tokens) - 1)
        each = zip(above, tree.tokens, tree.probability, tree.sources, strict=True)
        for at, (parent, token, probability, source) in enumerate(each):
            branch = place[parent], token
            node = place[at] = known.setdefault(branch, len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(branch[0])
                wrong.append(1 - probability)
                sources.append(source)
            else:
                wrong[node] *= 1 - probability
                sources[node] += source
    right = [1 - each for each in wrong]
    if parents == list(range(-1, len(parents) - 1)):
        return RatedTree(tuple(tokens), (), tuple(right), tuple(sources))
    left = dict.fromkeys(parents, 1.0)
    for node in sorted(range(len(tokens)), key=wrong.__getitem__):
        right[node] = min(right[node], left[parents[node]])
        left[parents[node]] = max(MIN_LEFT, left[parents[node]] - right[node])
    return RatedTree(tuple(tokens), tuple(parents), tuple(right), tuple(sources))
