"""Sources for a prompt: surroundings within one budget, nothing twice, and the same set laid out the same way."""

from __future__ import annotations

from itertools import permutations

import pytest

from retrieval import Library, Query, Text, layout, sources
from retrieval.prompt_context import LABELS, PromptSource, own_labels
from retrieval.records import Hit
from tests.app import postgres

DATABASES = postgres.DATABASES_SLOW


def count(text: str) -> int:
    return len(text.split())


@pytest.fixture
def valley(library: Library) -> Library:
    def page(name: str) -> str:
        return "\n\n".join(
            f"Part {part} of {name}. " + f"The {name} has water number{part}. " * 40 for part in range(6)
        )

    library.add("ana", library.collection("ana").id, [Text(name, page(name)) for name in ("lake", "pond", "river")])
    return library


def hits(library: Library, limit: int = 8) -> tuple[Hit, ...]:
    return library.search(Query("ana", "lake pond river water number3", limit, repeats=True)).hits


def test_a_child_comes_with_its_surroundings(valley: Library) -> None:
    (hit, *_) = hits(valley)
    (source,) = sources(valley.store, "ana", [hit], 2000, count)
    assert source.start <= hit.passage.start and hit.passage.end <= source.end
    assert source.end - source.start > hit.passage.end - hit.passage.start
    assert source.text == valley.store.text("ana", source.document, source.start, source.end)


@pytest.mark.parametrize("budget", [0, 50, 200, 400, 1000, 5000])
def test_the_budget_holds(valley: Library, budget: int) -> None:
    found = sources(valley.store, "ana", hits(valley), budget, count)
    assert sum(count(source.text) + 8 for source in found) <= budget
    assert bool(found) == (budget >= 200)


def test_no_text_is_there_twice(valley: Library) -> None:
    found = sources(valley.store, "ana", hits(valley, 30), 10_000, count)
    for a, b in permutations(found, 2):
        assert a.document != b.document or a.end <= b.start or b.end <= a.start


def test_the_same_hits_in_another_order_make_the_same_prompt(valley: Library) -> None:
    some = hits(valley, 3)
    texts = {layout(sources(valley.store, "ana", order, 10_000, count)) for order in permutations(some)}
    assert len(texts) == 1
    assert next(iter(texts)).startswith("[S1] ")


def test_what_was_deleted_meanwhile_is_left_out(valley: Library) -> None:
    some = hits(valley)
    gone = some[0].passage.document
    valley.delete("ana", gone)
    found = sources(valley.store, "ana", some, 10_000, count)
    assert found and all(source.document != gone for source in found)


def test_what_was_taken_away_meanwhile_is_left_out(valley: Library) -> None:
    some = hits(valley)
    assert sources(valley.store, "eve", some, 10_000, count) == []


def test_a_source_has_its_own_label_beside_any_others() -> None:
    def source(text: str) -> PromptSource:
        return PromptSource("", 1, "", 0, len(text), text, 1.0)

    texts = [f"The lake number {at} is deep." for at in range(40)]
    alone = {text: own_labels([source(text)])[0].label for text in texts}
    found = own_labels(source(text) for text in texts)
    labels = [each.label for each in found]
    assert [each.text for each in found] == texts and len(set(labels)) == len(texts)  # two never have the same
    kept = sum(alone[each.text] == each.label for each in found)
    assert kept > len(texts) * 0.6
    assert all(1 <= int(label[1:]) <= LABELS for label in labels)
    assert [each.label for each in own_labels([source(texts[3]), source(texts[8])])] == [
        alone[texts[3]],
        alone[texts[8]],
    ]
