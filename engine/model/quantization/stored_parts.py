"""The tensors that a quantised layer is stored as, taken from a checkpoint with their shapes and types checked."""

from __future__ import annotations

from torch import Tensor

from engine.errors import CheckpointError
from engine.model.loader import FLOATS, SafetensorsWeights


class StoredParts:
    """The parts of one weight (out, in): `stem` + "." + a part's name. `shape` is the weight's, once dequantised.

    Raises:
        CheckpointError: each method, where a part is missing or does not fit.
    """

    def __init__(self, weights: SafetensorsWeights, stem: str, shape: tuple[int, ...]) -> None:
        self._weights, self._stem, self.shape = weights, stem, shape

    def __contains__(self, part: str) -> bool:
        return f"{self._stem}.{part}" in self._weights

    def kind_of(self, part: str) -> str:
        """Returns safetensors' name of a part's type; nothing if the part is not there."""
        return self._weights.describe(f"{self._stem}.{part}")[1] if part in self else ""

    def shape_of(self, part: str) -> tuple[int, ...]:
        """Returns the shape of a part that has at least one dimension."""
        shape, _ = self._weights.describe(f"{self._stem}.{part}")
        if not shape:
            raise self.refuse(part, "a number", "a vector or matrix")
        return shape

    def take(self, part: str, shape: tuple[int, ...], kind: str = "") -> Tensor:
        """Reads a part of that shape and type; floats of 16 bits or more where none is given."""
        found, stored = self._weights.describe(f"{self._stem}.{part}")
        if found != shape:
            raise self.refuse(part, f"of shape {found}", f"shape {shape}, as the weight has {self.shape}")
        if stored not in ({kind} if kind else FLOATS):
            raise self.refuse(part, f"stored as {stored}", kind or ", ".join(sorted(FLOATS)))
        return self._weights.stored(f"{self._stem}.{part}")

    def per_row(self, part: str, kind: str = "") -> Tensor:
        """Reads one value, a value for each row, or one for each row and group, as (out, groups)."""
        out, (found, _) = self.shape[0], self._weights.describe(f"{self._stem}.{part}")
        taken = self.take(part, found, kind)
        if taken.numel() == 1:
            return taken.reshape(1, 1).expand(out, 1)
        if found == (out,):
            return taken[:, None]
        if len(found) != 2 or found[0] != out:
            raise self.refuse(part, f"of shape {found}", f"one value, ({out},) or ({out}, groups)")
        return taken

    def group_of(self, groups: int) -> int:
        """Returns the columns of a group."""
        width = self.shape[1]
        if not groups or width % groups:
            raise self.refuse("scales", f"{groups} groups of {width} columns", "groups of the same size")
        return width // groups

    def refuse(self, part: str, found: str, accepted: str) -> CheckpointError:
        """Returns the error for a part that does not fit."""
        return CheckpointError(f"{self._weights.place}: tensor '{self._stem}.{part}' is {found}; accepted: {accepted}.")
