"""Calls written as JSON: the result of each shape of a body, checked by the standard library's reader."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tool_parsers import CallArguments, CallBegun, CallEnded, Malformed, ParsedCall
from engine.tool_parsers.json_calls import list_of_calls, one_call
from tests.engine.tool_parsers.samples import json_objects, json_values, read


def single(text: str) -> tuple[list[ParsedCall], str]:
    return read(one_call(), [text])


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('\n{"name": "f", "arguments": {"x": [1, 2.50]}}\n', '{"x": [1, 2.50]}'),  # as written, not written again
        ('{"arguments":{"x":1},"name":"f"}', '{"x":1}'),
        (' {\t"parameters" :{"x" : 1} ,"name": "f" } ', '{"x" : 1}'),
        ('{"id": 7, "name": "f", "type": ["function"], "arguments": {}, "more": {"name": "g"}}', "{}"),
        ('{"name": "\\u0066", "\\u0061rguments": {}}', "{}"),
        ('{"name": "f", "arguments": {"name": "g", "arguments": {}}}', '{"name": "g", "arguments": {}}'),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', '{"a": 1, "a": 2}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null, "x": 1}', "{}"),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"name": "f", "arguments": " \\n"}', "{}"),
        ('{"arguments": "{\\"x\\": \\"a\\\\nb\\"} ", "name": "f"}', '{"x": "a\\nb"}'),
        ('{"name": "f", "arguments": "\\u007b\\"x\\": \\"\\u00e9\\ud83d\\ude42\\"}"}', '{"x": "é🙂"}'),
        ('{"name": "f", "arguments": "{\\"x\\": \\"\\ud83d!\\"}"}', '{"x": "\\ud83d!"}'),  # half a pair stays escaped
    ],
)
def test_a_call_is_read_in_any_of_its_forms(body: str, arguments: str) -> None:
    assert single(body) == ([ParsedCall("f", arguments)], "")
    assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    "body",
    [
        "hello", "{", "[]", "null", '{"name": "f"', '{"name": "f", "arguments":', '{"name": "f", "arguments": tru}',
        '{"arguments": {"x": 1}}', '{"arguments": {"x": 1}', '{"arguments": {"x": NaN}, "name": "f"}',
        '{"name": 5, "arguments": {}}', '{"name": "", "arguments": {}}', '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": 5}', '{"name": "f", "arguments": [{}]}', '{"name": "f", "arguments": "Paris"}',
        '{"name": "f", "name": "f", "arguments": {}}', '{"name": "f" "arguments": {}}', '{"name": "f",}',
        '{"x": Infinity, "name": "f"}', '```json\n{"name": "f", "arguments": {}}\n```',
    ],
)  # fmt: skip
def test_what_is_no_call_is_handed_on_whole(body: str) -> None:
    assert single(body) == ([], body)


@pytest.mark.parametrize(
    ("body", "arguments", "rest"),
    [
        ('{"name": "f", "arguments": {"x": NaN}}', '{"x": ', "NaN}}"),
        ('{"name": "f", "arguments": {"x": 1,}} and so on', '{"x": 1,', "}} and so on"),
        ('{"name": "f", "arguments": {"x": "a\nb"}}', '{"x": "a', '\nb"}}'),
        ('{"name": "f", "arguments": {"x": 1}}}', '{"x": 1}', "}"),
        ('{"name": "f", "arguments": {}} {"name": "g", "arguments": {}}', "{}", ' {"name": "g", "arguments": {}}'),
        ('{"name": "f", "arguments": {}, "arguments": {"x": 1}}', "{}", ', "arguments": {"x": 1}}'),
        ('{"name": "f", "arguments": {}, "name": "g"}', "{}", ', "name": "g"}'),
        ('{"name": "f", "arguments": "{\\"x\\": }"}', '{"x": ', '}"}'),
        ('{"name": "f", "arguments": "{\\"x\\": "}', '{"x": ', '"}'),
        ('{"name": "f", "arguments": "{} 5"}', "{}", ' 5"}'),
    ],
)
def test_a_call_that_goes_wrong_keeps_what_came_and_the_rest_is_text(body: str, arguments: str, rest: str) -> None:
    calls, text = single(body)
    assert calls == [ParsedCall("f", arguments)]
    assert text == rest


@pytest.mark.parametrize("cut", range(len('{"name": "f", "arguments": {"x": "yz", "n": 12}}') + 1))
def test_an_answer_that_is_cut_off_keeps_what_came(cut: int) -> None:
    whole = '{"name": "f", "arguments": {"x": "yz", "n": 12}}'
    calls, text = single(whole[:cut])
    begun = cut > whole.index(': {"x"') + 2
    if begun:
        assert calls == [ParsedCall("f", whole[27:-1][: cut - 27])]
        assert text == ""
    else:
        assert (calls, text) == ([], whole[:cut])


def test_the_name_comes_first_and_fragments_follow_as_they_are_written() -> None:
    parser = one_call()
    written = ['{"name": "f", ', '"arguments": {"ci', 'ty": "Par', 'is"}', "}"]
    assert [parser.push(piece) for piece in written] == [
        [],
        [CallBegun("f"), CallArguments('{"ci')],
        [CallArguments('ty": "Par')],
        [CallArguments('is"}')],
        [CallEnded()],
    ]
    assert parser.end() == []


def test_malformed_text_is_not_held_back() -> None:
    parser = one_call()
    assert parser.push("I ca") == [Malformed("I ca")]
    assert parser.push("n't") == [Malformed("n't")]
    assert parser.end() == []


def test_a_body_of_white_space_is_nothing() -> None:
    assert single("\n \t") == ([], "")


@given(
    st.lists(st.tuples(st.text(min_size=1).filter(str.isprintable), json_objects), min_size=1, max_size=4), st.data()
)
def test_one_element_that_is_no_call_never_harms_the_others_of_its_list(
    calls: list[tuple[str, dict[str, object]]], data: st.DataObject
) -> None:
    elements: list[object] = [{"name": name, "arguments": arguments} for name, arguments in calls]
    junk = data.draw(json_values.filter(lambda v: not isinstance(v, dict) or "name" not in v))
    elements.insert(data.draw(st.integers(0, len(elements))), junk)
    found, text = read(list_of_calls(), json.dumps(elements))
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert json.dumps(junk) in text
    assert len(text) <= len(json.dumps(junk)) + len("[, ]")


@pytest.mark.parametrize("body", ["[]", "[", "[ ", "Sorry", "[Sorry]", '[{"na', "{}"])
def test_a_list_without_a_call_is_handed_on_whole(body: str) -> None:
    assert read(list_of_calls(), [body]) == ([], body)


def test_what_is_not_json_ends_a_list_after_the_calls_before() -> None:
    first = '{"name": "f", "arguments": {}}'
    assert read(list_of_calls(), [f"[{first}, oh, {first}]"]) == ([ParsedCall("f", "{}")], f", oh, {first}]")
    assert read(list_of_calls(), [f"[{first} {first}]"]) == ([ParsedCall("f", "{}")], f" {first}]")
    assert read(list_of_calls(), [f"[{first},"]) == ([ParsedCall("f", "{}")], "")


keys = st.sampled_from(["name", "arguments", "id"])
values = st.sampled_from(["f", 5, {}, {"x": 1}, {"x": [1, "é"]}, [], True])


@given(st.dictionaries(keys, values).map(lambda d: list(d.items())), st.permutations(range(3)), st.booleans())
def test_any_object_means_what_the_standard_library_reads_in_it(
    pairs: list[tuple[str, object]], order: list[int], indented: bool
) -> None:
    shuffled = {pairs[i][0]: pairs[i][1] for i in order if i < len(pairs)}
    text = json.dumps(shuffled, indent=2 if indented else None)
    calls, rest = single(text)
    name, arguments = shuffled.get("name"), shuffled.get("arguments", {})
    if isinstance(name, str) and isinstance(arguments, dict):
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [(name, arguments)]
        assert rest == ""
    else:
        assert (calls, rest) == ([], text)
