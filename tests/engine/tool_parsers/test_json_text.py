"""The incremental check of JSON, held to the standard library's reader."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from engine.tool_parsers.json_text import SPACE, JsonStep, JsonText
from tests.engine.tool_parsers.samples import json_values

pieces = st.sampled_from(
    [*'{}[]",:\\/ \n\t01-+.eEub', "null", "true", "false", "NaN", '"a"', "\\u00e", "12", "é", "\x01"]
)


def read(text: str) -> bool:
    """Returns whether the text is one JSON value, by its steps."""
    value = JsonText()
    for at, character in enumerate(text):
        step = value.feed(character)
        if step is not JsonStep.MORE:
            rest = text[at:] if step is JsonStep.PAST else text[at + 1 :]
            return step is not JsonStep.BAD and not rest.strip(SPACE)
    return bool(text) and value.feed(" ") is JsonStep.PAST


def loads(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@given(st.lists(pieces, max_size=12).map("".join))
@example('{"a":1,}')
@example("[1,]")
@example("-")
@example("01")
@example("1.")
@example("1e+")
@example('{"a" 1}')
@example('"\\ud800"')
@example("[[],{},[0]]")
def test_it_takes_what_the_standard_library_takes(text: str) -> None:
    text = text.strip(SPACE)
    assert read(text) == loads(text)


@given(json_values, st.booleans(), st.data())
def test_a_changed_character_is_told_as_the_standard_library_tells_it(
    value: object, ascii: bool, data: st.DataObject
) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    assert read(text)
    at = data.draw(st.integers(0, len(text) - 1))
    changed = (text[:at] + data.draw(pieces) + text[at + data.draw(st.integers(0, 1)) :]).strip(SPACE)
    assert read(changed) == loads(changed)


def test_nesting_is_bounded_by_the_text_alone() -> None:
    assert read("[" * 20_000 + "]" * 20_000)
    assert not read("[" * 20_000 + "]" * 19_999)
