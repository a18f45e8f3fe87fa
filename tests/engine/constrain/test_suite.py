"""The official JSON Schema suite: what is admitted is never wrong, and the page says what is admitted."""

from __future__ import annotations

import pytest

from tests.engine.constrain import coverage


def test_no_admitted_schema_lets_an_invalid_instance_through() -> None:
    admitted = [each for each in coverage.results() if each.refused is None]
    assert len(admitted) >= 160 and sum(len(each.group.tests) for each in admitted) >= 600
    assert [
        (each.group.file, each.group.description, each.false_accepts) for each in admitted if each.false_accepts
    ] == []


def test_every_refusal_gives_a_reason_in_one_line() -> None:
    reasons = [each.refused for each in coverage.results() if each.refused is not None]
    assert reasons and all(reason and "\n" not in reason and len(reason) < 200 for reason in reasons)


NOT_HELD = """not contains propertyNames uniqueItems unevaluatedProperties unevaluatedItems dependentSchemas
dependentRequired dynamicRef"""


@pytest.mark.parametrize("keyword", NOT_HELD.split())
def test_a_keyword_that_is_not_held_is_named(keyword: str) -> None:
    reasons = [each.refused for each in coverage.results() if each.group.file == keyword]
    assert reasons and any(reason is not None and keyword in reason for reason in reasons)


def test_the_page_says_what_the_code_does() -> None:
    page = coverage.PAGE.read_text(encoding="utf-8")
    found = page.partition(coverage.BEGIN)[2].partition(coverage.END)[0].strip()
    assert found == coverage.section().strip(), "python -m tests.engine.constrain.coverage writes it anew"
