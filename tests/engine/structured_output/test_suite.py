"""The official JSON Schema suite: admitted schemas are enforced exactly, and the page lists them."""

from __future__ import annotations

import pytest
from jsonschema import Draft202012Validator

from engine.structured_output import spec
from tests.engine.structured_output import coverage
from tests.engine.structured_output.sources import compact, guidance, suite, vocabulary


def test_no_admitted_schema_lets_an_invalid_instance_through() -> None:
    admitted = [each for each in coverage.results() if each.refused is None]
    assert len(admitted) >= 160 and sum(len(each.group.tests) for each in admitted) >= 600
    assert [
        (each.group.file, each.group.description, each.false_accepts) for each in admitted if each.false_accepts
    ] == []


def test_no_admitted_schema_lets_an_instance_of_another_through_that_is_invalid() -> None:
    instances = {compact(instance): instance for group in suite() for _, instance, _ in group.tests}
    ids = {text: vocabulary("small").tokenize(text.encode()) for text in list(instances)[::6]}
    wrong = []
    taken = 0
    for each in coverage.results():
        if each.refused is not None or '"multipleOf":0.0001' in compact(each.group.schema):
            continue  # jsonschema divides in floating point: 1.2 is no multiple of 0.0001 to it
        if "\\p{" in compact(each.group.schema).replace("\\\\", "\\"):
            continue  # Python's `re`, with which jsonschema reads patterns, has no \\p
        validator = Draft202012Validator(each.group.schema)
        matcher = guidance("small").compile(spec.JsonSchema.of(each.group.schema, compact=True)).matcher()
        for text, tokens in ids.items():
            n = next((i for i, token in enumerate(tokens) if not matcher.accept(token)), len(tokens))
            if n == len(tokens) and matcher.can_end():
                taken += 1
                wrong += [] if validator.is_valid(instances[text]) else [(each.group.description, text)]
            matcher.rollback(n)
    assert wrong == [] and taken >= 2_000


def test_every_refusal_gives_a_reason_in_one_line() -> None:
    reasons = [each.refused for each in coverage.results() if each.refused is not None]
    assert reasons and all(reason and "\n" not in reason and len(reason) < 200 for reason in reasons)


NOT_HELD = """not contains propertyNames uniqueItems unevaluatedProperties unevaluatedItems dynamicRef"""


@pytest.mark.parametrize("keyword", NOT_HELD.split())
def test_a_keyword_that_is_not_held_is_named(keyword: str) -> None:
    reasons = [each.refused for each in coverage.results() if each.group.file == keyword]
    assert reasons and any(reason is not None and keyword in reason for reason in reasons)


def test_the_page_says_what_the_code_does() -> None:
    page = coverage.PAGE.read_text(encoding="utf-8")
    found = page.partition(coverage.BEGIN)[2].partition(coverage.END)[0].strip()
    assert found == coverage.section().strip(), "python -m tests.engine.structured_output.coverage writes it anew"
