"""A mixture of sequences: they write one span, each token sampled from the weighted sum of their distributions.

Members need not run in the same step: each delivers its logits when it gets them, and the last one to deliver completes
the row that is sampled. So a member may be prefilled late or preempted. Knows nothing of scheduling.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.core.sampler import row_logprobs


@dataclass(slots=True, eq=False)
class Mixture:
    """`members` are sequences by id, the leader first, and `log_weights` are theirs, natural logarithms that sum to one
    as probabilities."""

    members: tuple[int, ...]
    log_weights: tuple[float, ...]
    _delivered: dict[int, Tensor] = field(default_factory=dict)  # weighted log-probabilities of the next token

    @property
    def followers(self) -> tuple[int, ...]:
        return self.members[1:]

    def completed_by(self, delivering: Set[int]) -> bool:
        """Returns whether the row is complete once the sequences `delivering` have delivered."""
        return all(id in self._delivered or id in delivering for id in self.members)

    def deliver(self, member: int, logits: Tensor) -> Tensor | None:
        """Takes a member's logits (vocabulary,) for the next token; a preempted member may deliver them again.

        Returns the mixture's log-probabilities (vocabulary,), log(sum_i w_i p_i), from the last member to deliver, and
        None from the others: RAG-Token (Lewis et al. 2020, equation 2), marginalised at each token.
        """
        self._delivered[member] = row_logprobs(logits) + self.log_weights[self.members.index(member)]
        if len(self._delivered) < len(self.members):
            return None
        rows = torch.stack([self._delivered[id] for id in self.members])  # in one order: sums depend on it
        self._delivered.clear()
        return torch.logsumexp(rows, 0)
