"""Proposes what Medusa heads read in the target's own hidden state (Cai et al. 2024).

Head i takes the state from which the newest token was sampled, and predicts the token i places after that one: one
product for a whole draft, and no second model. Several tokens of the first heads make a tree, of which the paths of
the largest products are proposed. The published heads of a checkpoint are read as they are; heads without
an output matrix of their own share the target's.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.request import SequenceState
from engine.errors import CheckpointError
from engine.model.decoder import Decoder
from engine.model.linear import Linear
from engine.model.loader import SINGLE, SafetensorsWeights, read_json
from engine.speculation.draft_model import MIN_TEMPERATURE, request_of, sampled
from engine.speculation.proposer import NOTHING, DraftTokens, Proposer


def is_medusa(path: Path) -> bool:
    """Returns whether a directory holds Medusa heads: by its `config.json`."""
    return "medusa_num_heads" in read_json(path / "config.json")


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Residual blocks and output matrices. `first` (hidden -> heads * hidden) is the linear layer of all first blocks,
    `later` those of further blocks by head, `outputs` (hidden -> vocab) one matrix, or one a head."""

    first: Linear
    later: list[list[Linear]]
    outputs: list[Linear]

    @classmethod
    def load(cls, path: Path, base: Path, model: Decoder) -> MedusaHeads:
        """Reads the heads of `model`, which was loaded from `base`; heads without an output matrix share its own.

        Raises:
            CheckpointError: a tensor is missing or of another shape, or the heads were trained on other weights.
        """
        config = read_json(path / "config.json")
        made_for, weights_of_base = config.get("base_sha256"), base / SINGLE
        known = made_for is None or not weights_of_base.is_file()
        if not known and made_for != hashlib.sha256(weights_of_base.read_bytes()).hexdigest():
            raise CheckpointError(
                f"{path.name} has Medusa heads of other weights than this model's (base_sha256); accepted: the model "
                f"{config.get('base_model', 'they were trained on')} as it was then, or heads trained anew."
            )
        weights, vocab, hidden = SafetensorsWeights(path), model.spec.vocab_size, model.spec.hidden_size
        heads, layers = int(config["medusa_num_heads"]), int(config.get("medusa_num_layers", 1))

        def read(name: str, *shape: int) -> Tensor:
            return weights.take(name, shape).to(model.device, model.dtype)

        def linear(of: Sequence[tuple[int, int]]) -> Linear:
            names = [f"{head}.{layer}.linear" for head, layer in of]
            weight = torch.cat([read(f"{name}.weight", hidden, hidden) for name in names])
            return model.pack(weight, torch.cat([read(f"{name}.bias", hidden) for name in names]))

        own = [f"{head}.{layers}.weight" for head in range(heads)]
        outputs = (
            [model.pack(read(name, vocab, hidden), None) for name in own] if own[0] in weights else [model.lm_head]
        )
        later = [[linear([(head, layer)]) for layer in range(1, layers)] for head in range(heads)]
        return cls(linear([(head, 0) for head in range(heads)]), later, outputs)

    def logits(self, states: Tensor) -> Tensor:
        """Returns logits (heads, rows, vocab), float32, from states (rows, hidden) after the model's final norm."""
        inner = self.first(states).unflatten(1, (len(self.later), -1))
        hidden = (states[:, None] + F.silu(inner)).unbind(1)
        for linears in zip(*self.later, strict=True):
            hidden = tuple(each + F.silu(linear(each)) for each, linear in zip(hidden, linears, strict=True))
        if len(self.outputs) == 1:  # one product for all
            return self.outputs[0](torch.cat(hidden)).float().unflatten(0, (len(hidden), -1))
        return torch.stack([output(each) for each, output in zip(hidden, self.outputs, strict=True)]).float()


Choices = list[tuple[int, float]]  # tokens of one head with their probabilities
CHOICES = (3, 2, 2)  # of the first heads; one of each later one
_MIN_LIKELY = 0.01  # of a path


def likeliest_tree(choices: Sequence[Choices], budget: int) -> DraftTokens:
    """Returns the `budget` likeliest paths through the heads' choices, as Medusa's sparse trees have them."""
    tokens, confidence, parents = list[int](), list[float](), list[int]()
    ahead = [(-probability, 0, -1, nth) for nth, (_, probability) in enumerate(choices[0])]
    heapq.heapify(ahead)
    while ahead and len(tokens) < budget:
        negated, depth, parent, nth = heapq.heappop(ahead)
        token, probability = choices[depth][nth]
        tokens.append(token)
        confidence.append(probability)
        parents.append(parent)
        if depth + 1 < len(choices):
            for following, (_, each) in enumerate(choices[depth + 1]):
                if -negated * each >= _MIN_LIKELY:
                    heapq.heappush(ahead, (negated * each, depth + 1, len(tokens) - 1, following))
    chain = parents == list(range(-1, len(parents) - 1))
    return DraftTokens(tuple(tokens), tuple(confidence), () if chain else tuple(parents))


class Medusa(Proposer):
    """Drafts by `heads` from the states that the target's runner hands to `keep`."""

    name = "medusa"
    model = True

    def __init__(self, heads: MedusaHeads, choices: Sequence[int] = CHOICES) -> None:
        """`choices`: numbers of tokens of the first heads; one of each later one."""
        self._heads = heads
        self._choose = choices
        self._states = torch.empty(0, 0)
        self._newest: dict[int, tuple[int, Tensor]] = {}  # of a sequence: its length then, and the state

    def keep(self, states: Tensor) -> None:
        """Takes the final-normed states behind a step's logits, (rows, hidden)."""
        self._states = states

    def sampled(self, seq: SequenceState, row: int) -> None:
        self._newest[seq.id] = len(seq), self._states[row]

    @torch.inference_mode()
    def propose_all(self, asked: Sequence[tuple[SequenceState, int]], min_confidence: float) -> list[DraftTokens]:
        drafts = {seq.id: NOTHING for seq, _ in asked}
        ready = [(seq, budget) for seq, budget in asked if self._newest.get(seq.id, (0,))[0] == len(seq)]
        if ready:
            logits = self._heads.logits(torch.stack([self._newest[seq.id][1] for seq, _ in ready]))
            for (seq, budget), choices in zip(ready, self._choices(logits, [seq for seq, _ in ready]), strict=True):
                drafts[seq.id] = likeliest_tree(choices, budget)
        return [drafts[seq.id] for seq, _ in asked]

    def _choices(self, logits: Tensor, seqs: Sequence[SequenceState]) -> list[list[Choices]]:
        """Returns each sequence's choices by head: its sample, and the likeliest other tokens."""
        heads, rows, vocab = logits.shape
        likeliest = logits.argmax(-1).T.tolist()  # stands for the draft so far, as penalties see it
        requests = [
            request_of(seq, tuple(before[:head]))
            for head in range(heads)
            for seq, before in zip(seqs, likeliest, strict=True)
        ]
        made = sampled(logits.flatten(0, 1), requests)
        values, tokens = (each.tolist() for each in logits.topk(min(max(self._choose), vocab)))
        found = [list[Choices]() for _ in seqs]
        for at, (token, probability) in enumerate(made):
            (head, row), request = divmod(at, rows), requests[at]
            temperature = 1.0 if request is None else max(MIN_TEMPERATURE, request.sampling.temperature)
            logit = float(logits[head, row, token])
            others = [
                (other, min(1.0, probability * math.exp(min(50.0, (value - logit) / temperature))))
                for other, value in zip(tokens[head][row], values[head][row], strict=True)
                if other != token
            ]
            most = self._choose[head] if head < len(self._choose) else 1
            found[row].append([(token, probability), *others][:most])
        return found

    def forget(self, seq: SequenceState) -> None:
        self._newest.pop(seq.id, None)
