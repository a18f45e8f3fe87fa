"""Tests the promises of every matcher: masks, ends, rollback, forks and forced runs."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.structured_output import spec
from engine.structured_output.matcher import Compiled, Matcher
from engine.structured_output.spec import Constraint
from tests.engine.structured_output.sources import SIZES, accepts, allowed, compact, guidance, mask, vocabulary

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["c", "fahrenheit", "f"]},
        "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "near": {"type": "object", "properties": {"é": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
VALUES = [
    {"city": 'Zürich 🙂 \n\t"\\', "unit": "fahrenheit", "days": [], "near": {}},
    {"city": "", "days": [1, -20, 0], "near": {"é": True}},
    {"city": "}{][,:", "unit": "f", "days": [3]},
]
CALL = spec.sequence('\n{"name": "get_weather", "arguments": ', spec.JsonSchema.of(WEATHER), "}\n")
CASES: dict[str, tuple[Constraint, list[str]]] = {
    "schema": (spec.JsonSchema.of(WEATHER), [compact(value) for value in VALUES]),
    "spaced": (spec.JsonSchema.of(WEATHER), [json.dumps(value, ensure_ascii=False) for value in VALUES]),
    "call": (CALL, [f'\n{{"name": "get_weather", "arguments": {compact(value)}}}\n' for value in VALUES]),
    "calls": (
        spec.sequence("[", spec.Repeat(spec.JsonSchema.of(WEATHER), ", "), "]"),
        [f"[{compact(VALUES[0])}]", "[" + ", ".join(map(compact, VALUES)) + "]"],
    ),
    "choice": (spec.choice(["yes", "yesterday", "no", "né"]), ["yes", "yesterday", "no", "né"]),
    "regex": (spec.Regex(r"(?:a|ab)(?:c{0,2}|日+)?"), ["a", "ab", "abc", "abcc", "acc", "a日日"]),
    "optional": (
        spec.sequence("x", spec.Optional(spec.Literal("yz")), spec.Repeat(spec.Literal("!"), "")),
        ["x!", "xyz!!"],
    ),
    "empty": (spec.Optional(spec.Literal("fox")), ["", "fox"]),
}


@cache
def compiled(name: str, of: str = "small") -> Compiled:
    return guidance(of).compile(CASES[name][0])


def encode(text: str, of: str = "small") -> list[int]:
    return vocabulary(of).encode(text)


cases = pytest.mark.parametrize("name", CASES)


@cases
def test_instances_are_taken_and_end(name: str) -> None:
    for text in CASES[name][1]:
        matcher = compiled(name).matcher()
        assert accepts(matcher, encode(text)), text
        assert matcher.accept(vocabulary("small").eos[1]) and not matcher.can_end()


@cases
def test_mask_bit_equals_accept_for_every_token(name: str) -> None:
    size = SIZES["small"]
    for text in CASES[name][1]:
        matcher = compiled(name).matcher()
        for token in [*encode(text), vocabulary("small").eos[0], None]:
            bits = set(allowed(matcher, size))
            twin = matcher.fork()
            for id in range(size):
                taken = twin.accept(id)
                assert taken == (id in bits), (text, id)
                if taken:
                    twin.rollback(1)
            assert token is None or matcher.accept(token)


@pytest.mark.parametrize("of", ["pebble", "qwen"])
def test_mask_bit_equals_accept_with_real_vocabularies(of: str) -> None:
    random = Random(0)
    words = vocabulary(of)
    for text in CASES["call"][1]:
        matcher = compiled("call", of).matcher()
        for token in [*encode(text, of), words.eos[0]]:
            bits = set(allowed(matcher, words.size))
            some = random.sample(sorted(bits), min(20, len(bits)))
            for id in {*some, *random.sample(range(words.size), 40), *words.eos, token}:
                twin = matcher.fork()
                assert twin.accept(id) == (id in bits), (text, id)
            assert matcher.accept(token)


def test_ids_outside_the_vocabulary_do_no_harm() -> None:
    matcher = compiled("choice").matcher()
    assert not any(matcher.accept(id) for id in (SIZES["small"], 10**9, -1))
    assert accepts(matcher, encode("yes"))


@pytest.mark.parametrize("text", ["<think>", "</tool_call>", "<|im_end|>", "<|im_start|>", "<bos>"])
def test_a_string_may_hold_the_text_of_a_control_token_but_never_the_token(text: str) -> None:
    matcher = compiled("schema").matcher()
    assert all(map(matcher.accept, encode('{"city":"')))
    ids = encode(text)
    assert all(vocabulary("small").tokens[id] for id in ids)
    silent = [id for id, token in enumerate(vocabulary("small").tokens) if not token]
    assert not set(silent).intersection(allowed(matcher, SIZES["small"])) and not any(map(matcher.accept, silent))
    assert all(map(matcher.accept, ids))


def test_no_more_than_one_space_and_only_after_a_comma_or_a_colon() -> None:
    good = '{"city": "", "days": [1, 2]}'
    assert accepts(compiled("schema").matcher(), encode(good))
    wrong = ['{ "city"', '{"city" :', '{"city":  "', '{"city":\n', '{"city":"" ,', '{"city":"",  "', " "]
    wrong += ['{"city":"","days":[ 1', '{"city":"","days":[1 ]', '{"city":"","days":[1]} ']
    for bad in wrong:
        assert not all(map(compiled("schema").matcher().accept, encode(bad))), bad


def test_keys_keep_the_order_of_the_schema() -> None:
    assert accepts(compiled("schema").matcher(), encode('{"city":"","unit":"c","days":[]}'))
    for bad in (
        '{"unit":"c","city":"","days":[]}',
        '{"city":"","days":[],"unit":"c"}',
        '{"city":"","city":"","days":[]}',
    ):
        assert not accepts(compiled("schema").matcher(), encode(bad))


def test_a_compact_schema_has_no_space_between_its_parts() -> None:
    schema = spec.JsonSchema.of(WEATHER, compact=True)
    made = guidance("small").compile(schema)
    assert accepts(made.matcher(), encode('{"city":"a b","days":[]}'))
    assert not accepts(made.matcher(), encode('{"city": "a b","days":[]}'))


def test_what_must_end_allows_only_ends() -> None:
    for text, must in (("yes", False), ("yesterday", True), ("no", True)):
        matcher = compiled("choice").matcher()
        assert not matcher.must_end()
        assert accepts(matcher, encode(text)) and matcher.must_end() == must
    ended = compiled("choice").matcher()
    assert accepts(ended, [*encode("no")]) and ended.accept(vocabulary("small").eos[0])
    assert not ended.must_end() and not ended.can_end() and ended.forced() == [] and not ended.accept(5)


def test_tokens_of_the_same_text_are_all_allowed() -> None:
    from engine.structured_output.llguidance_backend import Guidance
    from engine.structured_output.vocabulary import Vocabulary

    tokens = (b"", *(bytes([byte]) for byte in range(256)), b"ab", b"a", b"ab")
    words = Vocabulary(tokens, (0,), lambda text: [byte + 1 for byte in text.encode()])
    matcher = Guidance(words).compile(spec.Regex("abc?")).matcher()
    assert allowed(matcher, words.size) == [ord("a") + 1, 257, 258, 259]
    for id in (257, 259):
        twin = matcher.fork()
        assert twin.accept(id) and twin.can_end()


# -- forced runs


@cases
def test_forced_tokens_can_be_accepted_one_by_one_and_nothing_else_could_come(name: str) -> None:
    words = vocabulary("small")
    for text in CASES[name][1]:
        matcher = compiled(name).matcher()
        for token in encode(text):
            before = mask(matcher, words.size)
            twin, other = matcher.fork(), matcher.fork()
            forced = twin.forced()
            assert all(map(twin.accept, forced))
            run = b"".join(words.tokens[id] for id in forced)
            for id in allowed(other, words.size) if forced else ():  # whatever else is allowed writes the same text
                assert run.startswith(words.tokens[id]) or words.tokens[id].startswith(run)
            assert np.array_equal(mask(matcher, words.size), before)
            assert matcher.accept(token)


BODY = '{"name": "get_weather", "arguments": {"city":'
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("of", ["small", "pebble", "qwen"])
def test_forced_tokens_are_those_of_the_tokenizer(of: str) -> None:
    constraint = spec.sequence('{"name": "get_weather", "arguments": ', spec.JsonSchema.of(SCHEMA), "}")
    words = vocabulary(of)
    forced = guidance(of).compile(constraint).matcher().forced()
    text = b"".join(words.tokens[id] for id in forced)
    assert BODY.encode().startswith(text) and len(text) >= len(BODY) - 2
    for city in ("", "Paris", " x", "\n", "é", "a: b", '"quoted"', "\\"):
        for separators in ((", ", ": "), (",", ":")):
            value = json.dumps({"city": city}, ensure_ascii=False, separators=separators).removeprefix('{"city":')
            assert words.encode(BODY + value + "}")[: len(forced)] == forced


def test_a_text_with_no_choice_at_all_is_forced_to_its_end() -> None:
    text = "the quick brown fox 日本"
    matcher = guidance("small").compile(spec.Literal(text)).matcher()
    taken: list[int] = []
    while run := matcher.forced():
        assert all(map(matcher.accept, run))
        taken += run
    assert taken == encode(text) and matcher.must_end()


# -- rollback and forks


class Moves(RuleBasedStateMachine):
    """Any moves of a matcher and its forks leave each as if it had only ever accepted what it still holds."""

    @initialize(name=st.sampled_from(sorted(CASES)))
    def begin(self, name: str) -> None:
        self.made = compiled(name)
        self.all: list[tuple[Matcher, list[int]]] = [(self.made.matcher(), [])]

    def pick(self, which: int) -> tuple[Matcher, list[int]]:
        return self.all[which % len(self.all)]

    @rule(which=st.integers(0, 9), choice=st.integers(0, 10**6), ending=st.booleans())
    def accept(self, which: int, choice: int, ending: bool) -> None:
        matcher, path = self.pick(which)
        ids = allowed(matcher, SIZES["small"])
        ends = [id for id in ids if id in vocabulary("small").eos]
        ids = ends if ending and ends else ids
        if ids:
            assert matcher.accept(ids[choice % len(ids)])
            path.append(ids[choice % len(ids)])

    @rule(which=st.integers(0, 9), token=st.integers(-1, 440))
    def try_any(self, which: int, token: int) -> None:
        matcher, path = self.pick(which)
        if matcher.accept(token):
            path.append(token)

    @rule(which=st.integers(0, 9))
    def accept_forced(self, which: int) -> None:
        matcher, path = self.pick(which)
        run = matcher.forced()
        assert all(map(matcher.accept, run))
        path += run

    @rule(which=st.integers(0, 9), n=st.integers(0, 12))
    def roll_back(self, which: int, n: int) -> None:
        matcher, path = self.pick(which)
        n = min(n, len(path))
        matcher.rollback(n)
        del path[len(path) - n :]

    @precondition(lambda self: len(self.all) < 4)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        matcher, path = self.pick(which)
        self.all.append((matcher.fork(), path.copy()))

    @invariant()
    def as_if_new(self) -> None:
        for matcher, path in self.all:
            new = self.made.matcher()
            assert all(map(new.accept, path))
            assert np.array_equal(mask(matcher, SIZES["small"]), mask(new, SIZES["small"]))
            assert (matcher.can_end(), matcher.must_end()) == (new.can_end(), new.must_end())


quick = settings(max_examples=40, stateful_step_count=25, suppress_health_check=list(HealthCheck))
TestGuidanceMoves = Moves.TestCase
TestGuidanceMoves.settings = quick


def test_more_than_was_accepted_cannot_be_taken_back() -> None:
    matcher = compiled("choice").matcher()
    assert accepts(matcher, encode("no")) and matcher.accept(vocabulary("small").eos[0])
    with pytest.raises(ValueError, match="roll back"):
        matcher.rollback(len(encode("no")) + 2)


@settings(max_examples=40)
@given(text=st.text(max_size=12), after=st.integers(0, 3))
def test_until_takes_anything_up_to_the_first_stop(text: str, after: int) -> None:
    matcher = until().matcher()
    whole = text.replace("</v>", "") + "</v>"
    first = whole.index("</v>") + len("</v>")
    assert accepts(matcher, encode(whole[:first] + "!")) and matcher.must_end()
    assert not accepts(until().matcher(), encode(whole[:first] + "x" * after))


@lru_cache(maxsize=1)
def until() -> Compiled:
    return guidance("small").compile(spec.sequence(spec.Until("</v>"), "!"))
