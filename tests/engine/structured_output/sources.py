"""Vocabularies and schemas that the tests of constraints share. Missing ones are skipped with a reason."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.model.tokenizer import Tokenizer
from engine.structured_output.llguidance_backend import Guidance
from engine.structured_output.matcher import Matcher, Row, words
from engine.structured_output.vocabulary import Vocabulary
from tests.engine import vocabularies
from tests.engine.structured_output.bfcl import SHARED

PEBBLE = Path(__file__).parents[3] / "models/pebble"
SUITE = SHARED / "data/schemas/json_schema_test_suite"


@lru_cache(maxsize=1)
def small() -> Tokenizer:
    """420 byte-level tokens, special ones and tags; two ends of sequence."""
    return Tokenizer(vocabularies.byte_level(), {"eos_token": "<|im_end|>"}, [420])


@lru_cache(maxsize=1)
def pebble() -> Tokenizer:
    if not (PEBBLE / "tokenizer.json").is_file():
        pytest.skip(f"no bundled model at {PEBBLE}")
    return Tokenizer.load(PEBBLE)


@lru_cache(maxsize=1)
def qwen() -> Tokenizer:
    path = SHARED / "data/vocab/qwen2-tokenizer.json.gz"
    if not path.is_file():
        pytest.skip(f"no vocabulary at {path}; set PONDER_SHARED")
    return Tokenizer(gzip.decompress(path.read_bytes()).decode(), {"eos_token": "<|im_end|>"}, [151643])


SIZES = {"small": 433, "pebble": 6144, "qwen": 151936}  # the small one's logits are wider than its tokens


@lru_cache(maxsize=3)
def vocabulary(name: str) -> Vocabulary:
    tokenizer = {"small": small, "pebble": pebble, "qwen": qwen}[name]()
    return Vocabulary.of(tokenizer, SIZES[name])


@lru_cache(maxsize=3)
def guidance(name: str) -> Guidance:
    return Guidance(vocabulary(name))


def mask(matcher: Matcher, size: int) -> Row:
    row = np.full(words(size), -1, dtype=np.int32)
    matcher.fill(row)
    return row


def allowed(matcher: Matcher, size: int) -> list[int]:
    """The ids whose bit is set; none may be beyond the vocabulary."""
    bits = np.unpackbits(mask(matcher, size).view(np.uint8), bitorder="little")
    ids: list[int] = np.flatnonzero(bits).tolist()
    assert not ids or ids[-1] < size
    return ids


def accepts(matcher: Matcher, ids: list[int]) -> bool:
    """Returns whether the tokens may come one after another, and the text may then end."""
    return all(matcher.accept(id) for id in ids) and matcher.can_end()


@dataclass(frozen=True)
class Group:
    """A schema of the official suite with its instances: (what, instance, whether it is valid)."""

    file: str
    description: str
    schema: Any
    tests: tuple[tuple[str, Any, bool], ...]


@lru_cache(maxsize=1)
def suite() -> tuple[Group, ...]:
    if not SUITE.is_dir():
        pytest.skip(f"no JSON Schema test suite at {SUITE}; set PONDER_SHARED")
    return tuple(_groups())


def _groups() -> Iterator[Group]:
    for file in sorted(SUITE.glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            tests = tuple((test["description"], test["data"], test["valid"]) for test in group["tests"])
            yield Group(file.stem, group["description"], group["schema"], tests)


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
