"""A value head: a linear read-out of the last hidden state, the probability that a sequence ends right.

It is read from a model's own directory, in TRL's format (`v_head.summary`, one output). Cobbe et al. 2021 verify
answers so. Knows nothing of requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import CheckpointError

log = logging.getLogger(__name__)

VALUE_HEAD = "value_head.safetensors"
_WEIGHT, _BIAS = "v_head.summary.weight", "v_head.summary.bias"


@dataclass(slots=True)
class ValueHead:
    """`weight` (hidden,) and `bias` (), float32, of the logit. Reads the states that a runner hands to `keep`."""

    weight: Tensor
    bias: Tensor
    _states: Tensor = field(default_factory=lambda: torch.empty(0, 0))

    @classmethod
    def read(cls, model: Path, hidden_size: int) -> ValueHead | None:
        """Returns the value head in a model's directory; None where there is none.

        Raises:
            CheckpointError: its file is damaged, or of another shape.
        """
        file = model / VALUE_HEAD
        if not file.is_file():
            return None
        try:
            tensors = load_file(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is not a whole safetensors file ({error}); copy it again.") from None
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != {_WEIGHT: (1, hidden_size), _BIAS: (1,)}:
            raise CheckpointError(
                f"{file} has {shapes}; accepted, as TRL saves them: {_WEIGHT} of (1, {hidden_size}), {_BIAS} of (1,)."
            )
        return cls(tensors[_WEIGHT][0].float(), tensors[_BIAS][0].float())

    @classmethod
    def usable(cls, model: Path, hidden_size: int) -> ValueHead | None:
        """Returns the value head as `read` does; one that cannot be read is left out with a warning."""
        try:
            return cls.read(model, hidden_size)
        except CheckpointError as error:
            log.warning("no value head is read: %s", error)
            return None

    def save(self, model: Path) -> None:
        save_file({_WEIGHT: self.weight[None].contiguous(), _BIAS: self.bias[None].contiguous()}, model / VALUE_HEAD)

    def keep(self, states: Tensor) -> None:
        """Takes the final-normed states behind a step's logits, (rows, hidden)."""
        self._states = states

    def value(self, row: int) -> float:
        """Returns the probability that a row of the newest step ends right."""
        return float(torch.sigmoid(self._states[row].float() @ self.weight + self.bias))
