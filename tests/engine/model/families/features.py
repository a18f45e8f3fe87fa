"""Drops a feature of a model, and measures by how much its logits move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.families import family_of
from engine.model.decoder import Decoder
from engine.model.loader import SafetensorsWeights, read_json
from tests.engine.model.conftest import Case
from tests.engine.model.stepping import Stepper, apart


def without(case: Case, change: Any, **options: Any) -> Decoder:
    """The case's decoder with another spec. Any: fields of ModelSpec, or a function that makes them of one; and
    arguments of Decoder."""
    config = read_json(case.path / "config.json")
    family = family_of(config)
    spec = family.spec(config)
    changed = replace(spec, **(change(spec) if callable(change) else change))
    assert changed != spec or options, "nothing is dropped"
    weights = SafetensorsWeights(case.path)
    return Decoder(
        changed, family.names(config), weights, dtype=torch.float32, device=torch.device("cpu"), **options
    )  # fmt: skip


def moved(case: Case, change: Any) -> float:
    """Distance of the logits of the longest prompt from those of transformers."""
    return apart(Stepper(without(case, change), [case.prompts[-1]]).run(300)[0], case.expected[-1])
