"""Tests that any complete text that a mask allows is valid by `jsonschema`, which knows nothing of masks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from engine.structured_output import spec
from engine.structured_output.matcher import Compiled, ConstraintFailed, ConstraintRefused
from tests.engine.structured_output import bfcl, schemas, sources
from tests.engine.structured_output.walks import walk

pytestmark = pytest.mark.slow


def walks(compiled: Compiled, schema: Any, count: int, seed: int, name: str) -> Iterable[bool]:
    """For each walk, whether it was finished; one that was is valid."""
    validator = Draft202012Validator(schema)
    random = Random(seed)
    for _ in range(count):
        text = walk(compiled.matcher(), sources.vocabulary(name), random)
        if text is not None:
            value = json.loads(text.decode())
            assert validator.is_valid(value), (schema, text)
        yield text is not None


@pytest.mark.parametrize("compact", [True, False])
def test_texts_of_every_tool_schema_are_valid(compact: bool) -> None:
    finished: list[bool] = []
    for seed, schema in enumerate(bfcl.parameters()):
        compiled = sources.guidance("small").compile(spec.JsonSchema.of(schema, compact=compact))
        finished += walks(compiled, schema, 1, seed, "small")
    assert len(finished) >= 600 and sum(finished) >= 0.98 * len(finished)


def test_texts_of_every_admitted_schema_of_the_suite_are_valid() -> None:
    finished: list[bool] = []
    for seed, group in enumerate(sources.suite()):
        if "\\p{" in sources.compact(group.schema).replace("\\\\", "\\"):
            continue  # Python's `re`, with which jsonschema reads patterns, has no \\p
        try:
            compiled = sources.guidance("small").compile(spec.JsonSchema.of(group.schema))
        except ConstraintRefused:
            continue
        finished += walks(compiled, group.schema, 8, seed, "small")
    assert len(finished) >= 1_000 and sum(finished) >= 0.95 * len(finished)


def test_texts_of_random_schemas_are_valid() -> None:
    random = Random(0)
    finished: list[bool] = []
    for seed in range(700):
        schema = schemas.schema(random)
        try:
            compiled = sources.guidance("small").compile(spec.JsonSchema.of(schema))
            finished += walks(compiled, schema, 2, seed, "small")
        except ConstraintRefused:
            continue
        except ConstraintFailed:  # an intersection that nothing fits, behind a choice: told when it is reached
            continue
        except RecursionError:  # jsonschema's own, where a definition refers to itself alone
            continue
    assert len(finished) >= 800 and sum(finished) >= 0.95 * len(finished)


@pytest.mark.parametrize("name", ["pebble", "qwen"])
def test_texts_are_valid_with_real_vocabularies(name: str) -> None:
    finished: list[bool] = []
    for seed, schema in enumerate(bfcl.parameters()[:: 8 if name == "pebble" else 80]):
        compiled = sources.guidance(name).compile(spec.JsonSchema.of(schema))
        finished += walks(compiled, schema, 2, seed, name)
    assert sum(finished) >= 0.95 * len(finished) > 10
