"""Material of the benchmarks of constraints: tool schemas that people wrote, the official suite, a vocabulary of 152k
tokens.

All of it is read from PONDER_SHARED, by the same code that the tests of constraints read it with. Texts are known
answers to BFCL's questions, and random walks through masks for all that those do not touch. Knows nothing of clocks.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator

from engine.model.tokenizer import Tokenizer
from engine.structured_output.matcher import Matcher, words
from engine.structured_output.vocabulary import Vocabulary
from engine.tool_parsers import ToolSpec
from tests.engine.structured_output import bfcl, sources

SIZE = sources.SIZES["qwen"]
_PACKED = "data/vocab/qwen2-tokenizer.json.gz"
# Qwen3's tags, in the place of padding in Qwen2's vocabulary.
_TAGS = {151657: "<tool_call>", 151658: "</tool_call>", 151667: "<think>", 151668: "</think>"}


@dataclass(frozen=True, slots=True)
class SchemaSample:
    """A schema with a text that is valid against it; `ids` are the text's tokens."""

    schema: str
    text: str
    ids: tuple[int, ...]


def missing() -> str | None:
    """Returns why there is nothing to measure on; None where there is."""
    for name in (_PACKED, "data/bfcl", "data/schemas/json_schema_test_suite"):
        if not (bfcl.SHARED / name).exists():
            return f"no {name} in {bfcl.SHARED}; set PONDER_SHARED"
    return None


def tokenizer_source() -> str:
    """tokenizer.json of Qwen's vocabulary."""
    source = gzip.decompress((bfcl.SHARED / _PACKED).read_bytes()).decode()
    for id, tag in _TAGS.items():
        source = source.replace(f'"[PAD{id}]"', json.dumps(tag))
    return source


def samples(tokenizer: Tokenizer, count: int) -> list[SchemaSample]:
    """Different parameter schemas of BFCL with the answer it knows, where that is valid; `count` of them at most."""
    found: dict[str, SchemaSample] = {}
    for schema, value in _answers():
        source = dumped(schema)
        if source not in found and Draft202012Validator(schema).is_valid(value):
            text = dumped(value)
            found[source] = SchemaSample(source, text, tuple(tokenizer.encode(text)))
    return Random(0).sample(list(found.values()), min(count, len(found)))


def suite_samples(tokenizer: Tokenizer, count: int) -> list[SchemaSample]:
    """Schemas of the official suite, each with its longest valid instance."""
    found: dict[str, SchemaSample] = {}
    for group in sources.suite():
        valid = [dumped(value) for _, value, ok in group.tests if ok]
        if valid and isinstance(group.schema, dict):
            text = max(valid, key=len)
            found[dumped(group.schema)] = SchemaSample(dumped(group.schema), text, tuple(tokenizer.encode(text)))
    return Random(0).sample(list(found.values()), min(count, len(found)))


def tool_sets(size: int, count: int) -> list[tuple[ToolSpec, ...]]:
    """`count` random sets of `size` tools, no name twice in a set."""
    known = {tool["name"].replace(" ", "_"): tool for tools in bfcl.tool_sets() for tool in tools}
    tools = [ToolSpec(name, tool.get("description"), tool["parameters"]) for name, tool in known.items()]
    return [tuple(Random(seed).sample(tools, size)) for seed in range(count)]


def walk(matcher: Matcher, vocabulary: Vocabulary, random: Random, length: int) -> tuple[int, ...]:
    """Tokens that a matcher takes one after another: at random, and now and then such that close open brackets."""
    row = np.zeros(words(vocabulary.size), dtype=np.int32)
    closing = [id for text in (b'"', b"}", b"]", b",", b'",', b"1") for id in vocabulary.ids.get(text, ())]
    ids: list[int] = []
    while len(ids) < length and not matcher.must_end():
        matcher.fill(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little", count=vocabulary.size)
        bits[list(vocabulary.eos)] = 0
        able = [id for id in closing if bits[id]] if random.random() < 0.3 else []
        allowed = able or np.flatnonzero(bits).tolist()
        if not allowed:
            break
        token = random.choice(allowed)
        assert matcher.accept(token), "a mask allowed what is not accepted"
        ids.append(token)
    return tuple(ids)


def bytes_vocabulary() -> Vocabulary:
    """Every byte is a token: validity does not depend on the tokens, and this is quick."""
    return Vocabulary((*(bytes([byte]) for byte in range(256)), b""), (256,), _no_ids)


def portable(vocabulary: Vocabulary) -> Vocabulary:
    """The same to send to another process, without the tokenizer, which only forced tokens are written with."""
    return Vocabulary(vocabulary.tokens, vocabulary.eos, _no_ids)


def dumped(value: Any) -> str:
    """Any: JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _no_ids(text: str) -> list[int]:
    return []


def _answers() -> list[tuple[Any, Any]]:
    """Parameters and arguments of every call that BFCL knows to answer a question. Any: JSON."""
    folder: Path = bfcl.SHARED / "data/bfcl"
    pairs = []
    for file in sorted((folder / "possible_answer").glob("*.jsonl")):
        questions = {(q := json.loads(line))["id"]: q for line in _lines(folder / file.name)}
        for answer in map(json.loads, _lines(file)):
            schemas = {
                tool["name"]: bfcl.json_schema(tool["parameters"]) for tool in questions[answer["id"]]["function"]
            }
            for call in answer["ground_truth"]:
                for name, accepted in call.items():
                    order = list(schemas[name].get("properties", {}))
                    given = {key: values[0] for key, values in accepted.items() if values and values[0] != ""}
                    if set(given) <= set(order):
                        pairs.append((schemas[name], {key: given[key] for key in order if key in given}))
    return pairs


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()
