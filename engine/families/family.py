"""The declaration of a family of checkpoints. Plain data; knows nothing of any family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.model.loader import Json
from engine.model.model_spec import ModelSpec, WeightNames


@dataclass(frozen=True, slots=True)
class Family:
    """One family of checkpoints: the names that select it, the reader of its config.json, the names of its weights."""

    model_type: str
    architectures: tuple[str, ...]
    spec: Callable[[Json], ModelSpec]
    names: Callable[[Json], WeightNames] = field(default=lambda config: WeightNames())
    sees: bool = False  # it reads images, not the text of a model with vision alone
