"""Tests an engine's record of its arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig
from engine.model.numerics import Numerics

pytestmark = pytest.mark.slow

NUMERICS = Numerics("bfloat16", "AMX", "none", "auto", "cpu", "AVX512", 0, "2.13", batch_invariant=True)


def test_numerics_are_the_same_again_from_json() -> None:
    assert Numerics.restored(json.loads(json.dumps(NUMERICS.recorded()))) == NUMERICS


@pytest.mark.parametrize("changed", [{"threads": "0"}, {"threads": True}, {"dtype": None}, {"more": 1}])
def test_other_json_is_no_numerics(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="accepted: batch_invariant"):
        Numerics.restored({**NUMERICS.recorded(), **changed})


def test_differences_name_what_was_and_what_is() -> None:
    assert NUMERICS.differences(NUMERICS) == []
    now = replace(NUMERICS, kernels="torch", batch_invariant=False)
    assert now.differences(NUMERICS) == ["kernels was AMX, is torch", "batch_invariant was True, is False"]


@pytest.mark.parametrize("runs_in", ["thread", "process"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "float32"}, {"dtype": "float32", "kernels": "torch", "batch_invariant": False, "threads": 1}),
        ({"dtype": "float32", "deterministic": True}, {"batch_invariant": True}),
        ({"dtype": "bfloat16", "kernels": "torch"}, {"kernels": "torch", "batch_invariant": False}),
        ({"dtype": "bfloat16", "kv_dtype": "int8"}, {"kernels": "torch", "kv_dtype": "int8"}),
    ],
    ids=str,
)
async def test_an_engine_tells_what_it_computes_with(
    random_model: Path, runs_in: Any, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = EngineConfig(str(random_model), device="cpu", kv_blocks=64, threads=1, runs_in=runs_in, **options)
    async with await Engine.start(config) as engine:
        told = engine.numerics.recorded()
        assert {name: told[name] for name in expected} == expected
        assert told["processor"] and told["torch"] and told["device"] == "cpu"
