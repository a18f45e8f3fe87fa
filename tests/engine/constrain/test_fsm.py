"""Automata: what outlines-core alone would get wrong, expressions against Python's `re`, the process and the disk."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from engine.constrain import closed_schema, spec
from engine.constrain.fsm import FiniteStates
from engine.constrain.matcher import CompileTimeout, ConstraintRefused
from engine.constrain.regular import regular
from engine.constrain.spec import Constraint
from engine.constrain.table import Table
from engine.constrain.vocabulary import Vocabulary
from tests.engine.constrain.sources import accepts, allowed, guidance, vocabulary


@pytest.fixture(scope="module")
def automata() -> Iterator[FiniteStates]:
    backend = FiniteStates(vocabulary("small"))
    yield backend
    backend.close()


def encode(text: str) -> list[int]:
    return vocabulary("small").encode(text)


@pytest.mark.parametrize(
    "pattern, texts",
    [
        ("a|ab", ["a", "ab"]),  # the first alternative is not the only one
        ("(?:a|ab)c?", ["a", "ab", "ac", "abc"]),
        ("a*?b?", ["", "a", "aab"]),  # lazy or not, the language is the same
        ("a(?:bc)?", ["a", "abc"]),  # where the text may end, it may also go on
        ("(?:ab)*", ["", "ab", "abab"]),
        ("[^\"]*", ["", "é", "日本x🙂"]),  # characters of several tokens
        ("(?i)fox", ["FoX"]),
        ("", [""]),
    ],
)  # fmt: skip
def test_the_whole_language_of_an_expression_is_there(automata: FiniteStates, pattern: str, texts: list[str]) -> None:
    table = automata.compile(spec.Regex(pattern))
    for text in texts:
        assert accepts(table.matcher(), encode(text)), text


PIECES = st.recursive(
    st.sampled_from(["a", "b", "é", "[ab]", "[^a]", ".", "日", "a?", ""]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "*?"])).map(lambda x: f"(?:{x[0]}){x[1]}"),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(pattern=PIECES, texts=st.lists(st.text("abé日\n", max_size=5), min_size=3, max_size=6))
def test_both_backends_hold_what_pythons_re_matches(automata: FiniteStates, pattern: str, texts: list[str]) -> None:
    constraint = spec.Regex(pattern)
    for made in (automata.compile(constraint), guidance("small").compile(constraint)):
        for text in texts:
            expected = re.fullmatch(pattern, text) is not None
            assert accepts(made.matcher(), encode(text)) == expected, (pattern, text)


def test_every_state_can_be_completed(automata: FiniteStates) -> None:
    # No token writes NUL, so nothing may come behind "b" or "ce"; they must not begin.
    table = automata.compile(spec.Regex(r"a|b\x00x|c(?:d|e\x00x)"))
    matcher = table.matcher()
    assert {vocabulary("small").tokens[id] for id in allowed(matcher, 433)} == {b"a", b"c"}
    assert all(map(matcher.accept, encode("c")))
    assert {vocabulary("small").tokens[id] for id in allowed(matcher, 433)} == {b"d"}


@pytest.mark.parametrize("pattern", ["[a&&b]", "a|b[a&&b]", r"\x00", r"a\b", "(?=a)", "a(", "(a)\\1"])
def test_what_no_text_fits_or_no_automaton_holds_is_refused(automata: FiniteStates, pattern: str) -> None:
    with pytest.raises(ConstraintRefused, match="outlines-core"):
        automata.compile(spec.Regex(pattern))
    assert automata.compile(spec.Literal("a")).size > 0


@pytest.mark.parametrize(
    "constraint",
    [spec.Until("x"), spec.Grammar('start: "a"'), spec.JSON_OBJECT, spec.JsonSchema("{"), spec.Regex("a" * 9_000)],
    ids=["until", "grammar", "open", "not json", "long"],
)
def test_the_gate_says_what_it_does_not_take(automata: FiniteStates, constraint: Constraint) -> None:
    refused = automata.check(constraint)
    assert refused is not None and refused.reasons
    assert automata.check(spec.sequence("a", constraint)) is not None
    assert automata.stored(constraint) is None


# -- the process


def test_past_the_deadline_the_process_is_killed_and_another_serves_the_next() -> None:
    backend = FiniteStates(vocabulary("small"), deadline_s=0.3)
    with pytest.raises(CompileTimeout, match=r"0\.3 s"):
        backend.compile(spec.Regex(r"(?:\w{1,40}){1,40}"))
    assert backend._process is None
    assert accepts(backend.compile(spec.Literal("fox")).matcher(), encode("fox"))
    backend.close()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process's memory are enforced on Linux only")
def test_beyond_its_memory_the_process_dies_alone() -> None:
    backend = FiniteStates(vocabulary("small"), deadline_s=60.0, memory_bytes=500 << 20)
    with pytest.raises(ConstraintRefused, match="memory|size"):
        backend.compile(spec.Regex(r"(?:\w{1,400}x){1,400}"))
    assert accepts(backend.compile(spec.Literal("fox")).matcher(), encode("fox"))
    backend.close()


def test_a_closed_backend_makes_nothing_and_leaves_no_process() -> None:
    backend = FiniteStates(vocabulary("small"))
    backend.compile(spec.Literal("a"))
    process = backend._process
    backend.close()
    assert process is not None and process.poll() is not None
    with pytest.raises(ConstraintRefused, match="stopping"):
        backend.compile(spec.Literal("b"))


def test_at_rest_there_is_no_process_and_the_next_constraint_starts_one() -> None:
    backend = FiniteStates(vocabulary("small"))
    backend.compile(spec.Literal("a"))
    backend.rest()
    assert backend._process is None
    assert backend.compile(spec.Literal("b")).size > 0
    backend.close()


# -- the disk


def same(one: Table, other: Table) -> bool:
    names = ("masks", "rows", "final", "starts", "tokens", "targets")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def no_process(words: Vocabulary, folder: Path) -> FiniteStates:
    """A backend that can only read."""
    backend = FiniteStates(words, cache_dir=folder)
    backend.close()
    return backend


def test_tables_survive_the_process_that_made_them(tmp_path: Path) -> None:
    backend = FiniteStates(vocabulary("small"), cache_dir=tmp_path / "new")
    constraint = spec.JsonSchema.of({"type": "array", "items": {"enum": ["fox", "dog"]}, "maxItems": 2})
    assert backend.stored(constraint) is None
    made = backend.compile(constraint)
    backend.close()
    kept = no_process(vocabulary("small"), tmp_path / "new").stored(constraint)
    assert kept is not None and same(kept, made)
    assert accepts(kept.matcher(), encode('["fox", "dog"]'))
    assert [each.suffix for each in (tmp_path / "new").iterdir()] == [".npz"]


def test_another_vocabulary_or_another_constraint_finds_nothing(tmp_path: Path) -> None:
    backend = FiniteStates(vocabulary("small"), cache_dir=tmp_path)
    backend.compile(spec.Literal("fox"))
    backend.close()
    words = vocabulary("small")
    for other in (
        Vocabulary((*words.tokens[:-1], b"zz"), words.eos, words.encode),
        Vocabulary(words.tokens, words.eos[:1], words.encode),
    ):
        assert no_process(other, tmp_path).stored(spec.Literal("fox")) is None
    assert backend.stored(spec.Literal("dog")) is None
    assert backend.stored(spec.Literal("fox")) is not None


@pytest.mark.parametrize("damage", ["cut", "garbage", "flipped", "empty", "other"])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: str) -> None:
    backend = FiniteStates(vocabulary("small"), cache_dir=tmp_path)
    made = backend.compile(spec.choice(["fox", "dog"]))
    (file,) = tmp_path.glob("*.npz")
    whole = file.read_bytes()
    middle = len(whole) // 2
    if damage == "other":
        np.savez(file, masks=np.zeros(3))
    else:
        flipped = whole[:middle] + bytes(byte ^ 0xFF for byte in whole[middle : middle + 64]) + whole[middle + 64 :]
        file.write_bytes({"cut": whole[:middle], "garbage": b"x" * 99, "flipped": flipped, "empty": b""}[damage])
    assert backend.stored(spec.choice(["fox", "dog"])) is None
    assert same(backend.compile(spec.choice(["fox", "dog"])), made)
    kept = backend.stored(spec.choice(["fox", "dog"]))
    assert kept is not None and same(kept, made)
    backend.close()


def test_the_oldest_files_make_room(tmp_path: Path) -> None:
    backend = FiniteStates(vocabulary("small"), cache_dir=tmp_path, cache_bytes=1 << 20)
    texts = ["fox", "dog", "cat"]
    for i, text in enumerate(texts):
        backend.compile(spec.Literal(text))
        os.utime(backend._file(text), ns=(i * 10**9, i * 10**9))
    assert backend.stored(spec.Literal("fox")) is not None  # used again: now the newest
    size = backend._file("fox").stat().st_size
    smaller = FiniteStates(vocabulary("small"), cache_dir=tmp_path, cache_bytes=3 * size + 10)
    smaller.compile(spec.Literal("cow"))
    assert [backend.stored(spec.Literal(text)) is not None for text in texts] == [True, False, True]
    assert smaller.stored(spec.Literal("cow")) is not None
    smaller.close()
    backend.close()


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    backend = FiniteStates(vocabulary("small"), cache_dir=tmp_path / "file")
    assert accepts(backend.compile(spec.Literal("fox")).matcher(), encode("fox"))
    assert backend.stored(spec.Literal("fox")) is None
    backend.close()


# -- closed schemas as expressions


def schemas(depth: int = 2) -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "integer"}),
        st.just({"type": "number"}),
        st.just({"type": "null", "title": "t"}),
        st.tuples(st.integers(0, 2), st.integers(2, 4)).map(
            lambda size: {"type": "string", "minLength": size[0], "maxLength": size[1]}
        ),
        st.lists(st.one_of(st.text(max_size=3), st.integers(), st.none(), st.booleans()), min_size=1, max_size=3).map(
            lambda values: {"enum": values}
        ),
        st.text(max_size=3).map(lambda value: {"const": value, "type": "string"}),
    )
    if depth == 0:
        return leaves
    inner = schemas(depth - 1)
    names = st.lists(st.sampled_from(["a", "é", 'q"', "b\\", "n\n", "$"]), unique=True, max_size=4)
    objects = names.flatmap(
        lambda keys: st.tuples(
            st.lists(inner, min_size=len(keys), max_size=len(keys)), st.lists(st.booleans(), min_size=4, max_size=4)
        ).map(
            lambda drawn: {
                "type": "object",
                "properties": dict(zip(keys, drawn[0], strict=True)),
                "required": [key for key, needed in zip(keys, drawn[1], strict=False) if needed],
                "additionalProperties": False,
            }
        )
    )
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(2, 3)).map(
        lambda drawn: {"type": "array", "items": drawn[0], "minItems": drawn[1], "maxItems": drawn[2]}
    )
    return st.one_of(leaves, objects, arrays)


def instances(schema: Any) -> st.SearchStrategy[Any]:
    """Valid and nearly valid values of a schema, their keys in its order."""
    if "enum" in schema or "const" in schema:
        return st.sampled_from([*schema.get("enum", [schema.get("const")]), "else"])
    match schema["type"]:
        case "boolean":
            return st.booleans()
        case "integer":
            return st.one_of(st.integers(-(10**17), 10**17), st.just("1"))
        case "number":
            return st.one_of(st.integers(-99, 99), st.floats(-1e9, 1e9, allow_nan=False).map(lambda x: round(x, 6)))
        case "null":
            return st.none()
        case "string":
            return st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=5)
        case "array":
            return st.lists(instances(schema["items"]), max_size=4)
    members = {key: st.one_of(st.just(...), instances(part)) for key, part in schema["properties"].items()}
    return st.fixed_dictionaries(members).map(lambda value: {k: value[k] for k in members if value[k] is not ...})


@settings(max_examples=200, deadline=None)
@given(data=st.data(), compact=st.booleans())
def test_a_closed_schemas_expression_matches_just_its_valid_instances(data: st.DataObject, compact: bool) -> None:
    schema = data.draw(schemas())
    pattern = closed_schema.pattern(json.dumps(schema, ensure_ascii=False), compact=compact)
    for _ in range(4):
        value = data.draw(instances(schema))
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":") if compact else (", ", ": "))
        valid = Draft202012Validator(schema).is_valid(value)
        assert (re.fullmatch(pattern, text) is not None) == valid, (schema, text)


@pytest.mark.parametrize(
    "schema, why",
    [
        (True, "true"),
        ({}, "no type"),
        ({"type": ["string", "null"]}, "type"),
        ({"type": "object", "properties": {}}, "open"),
        ({"type": "object", "additionalProperties": False, "required": ["a"]}, "required"),
        ({"type": "string", "pattern": "a"}, "pattern"),
        ({"type": "integer", "minimum": 1}, "minimum"),
        ({"type": "string", "maxLength": 5000}, "Length"),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 10**6}, "Items"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 0}, "below"),
        ({"type": "array"}, "items"),
        ({"enum": []}, "enum"),
        ({"enum": [1.5]}, "decimals"),
        ({"enum": ["a"], "type": "integer"}, "type"),
        ({"$ref": "#"}, "no type"),
        ({"anyOf": [{"type": "null"}]}, "no type"),
        ({"type": "string", "format": "date"}, "format"),
        ({"type": "object", "properties": [], "additionalProperties": False}, "properties"),
    ],
)
def test_what_is_not_a_small_closed_schema_is_refused_by_name(schema: Any, why: str) -> None:
    with pytest.raises(closed_schema.NotClosed, match=why):
        closed_schema.pattern(json.dumps(schema), compact=True)


@given(text=st.text(max_size=20))
def test_an_escaped_text_matches_itself_alone(text: str) -> None:
    pattern = regular(spec.Literal(text))
    assert pattern is not None
    assert re.fullmatch(pattern, text) and not re.fullmatch(pattern, text + "x")
