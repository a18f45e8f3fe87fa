"""Searching: both indexes and their sum, filters, repeats, reranking, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from retrieval import BadFilter, BadQuery, Library, NotFound, Query, Text
from retrieval.index import dense, lexical
from retrieval.index.dense import DenseIndex
from retrieval.index.lexical import LOOKUP_WORDS, terms
from retrieval.index.views import Views
from tests.app import postgres
from tests.retrieval.conftest import file_indexes
from tests.retrieval.words import WordEmbedder

DATABASES = postgres.DATABASES_SLOW


@pytest.fixture
def lakes(library: Library) -> Library:
    texts = [
        Text("a", "The green lake is deep and cold.", "Green lake", {"year": 1999, "tag": "water", "open": True}),
        Text("b", "A grey lake lies in the north.", "Grey lake", {"year": 2005, "tag": "water"}),
        Text("c", "The green hill has three old oaks.", "Hill", {"year": 2010, "tag": "land"}),
        Text("d", "def parseHttpHeader(raw_line): return raw_line", "code"),
    ]
    library.add("ana", library.collection("ana").id, texts)
    return library


def found(library: Library, text: str, **options: object) -> list[str]:
    query = Query("ana", text, **options)  # type: ignore[arg-type]  # each test names fields of Query
    return [hit.passage.source for hit in library.search(query).hits]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_each_index_and_both_find_the_words(lakes: Library, share: float) -> None:
    assert found(lakes, "green lake", dense_share=share)[0] == "a"


def test_a_hit_says_where_it_came_from(lakes: Library) -> None:
    first, *_, last = lakes.search(Query("ana", "deep lake")).hits
    assert first.lexical and first.dense and first.rerank is None
    assert last.lexical is None and last.score < first.score


@pytest.mark.parametrize("query", ["http header", "parse_http_header", "HTTPHeader", "parseHttpHeader", "raw line"])
def test_identifiers_are_found_by_their_parts(lakes: Library, query: str) -> None:
    assert found(lakes, query, dense_share=0.0) == ["d"]


def scores(library: Library, text: str) -> dict[str, float]:
    hits = library.search(Query("ana", text, dense_share=0.0)).hits
    return {hit.passage.source: hit.lexical or 0.0 for hit in hits}


def test_words_that_no_passage_has_do_not_displace_those_of_a_long_question(lakes: Library) -> None:
    unknown = " ".join(f"quibble{chr(97 + n)}" for n in range(LOOKUP_WORDS + 1))
    assert found(lakes, f"{unknown} oaks", dense_share=0.0) == ["c"]


def test_a_word_that_the_query_repeats_counts_more_but_not_as_often(lakes: Library) -> None:
    once, thrice = scores(lakes, "oaks north"), scores(lakes, "oaks north north north")
    assert thrice["c"] == once["c"] and once["b"] * 1.5 < thrice["b"] < once["b"] * 3


def test_all_words_of_a_long_question_score_and_not_only_those_looked_up(library: Library) -> None:
    rare = " ".join(f"rare{chr(97 + n)}" for n in range(LOOKUP_WORDS))
    texts = [Text("a", f"{rare} stone"), Text("b", f"{rare} water"), Text("c", "water"), Text("d", "stone water")]
    library.add("ana", library.collection("ana").id, texts)
    hits = library.search(Query("ana", f"{rare} water", limit=2, dense_share=0.0, repeats=True)).hits
    assert [hit.passage.source for hit in hits] == ["b", "a"] and hits[0].score > hits[1].score


def test_identifiers_are_split_and_kept_whole() -> None:
    assert terms("parseHTTPHeader") == ["parse", "http", "header", "parsehttpheader"]
    assert terms("snake_case_name") == ["snake", "case", "name", "snake_case_name"]
    assert terms("Orsk's dam, 1931") == ["orsk", "dam", "1931"]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"tag": "water"}, {"a", "b"}), ({"year": {"gte": 2000, "lt": 2010}}, {"b"}), ({"open": True}, {"a"}),
        ({"tag": {"in": ["land", "sea"]}}, {"c"}), ({"source": {"ne": "a"}, "tag": "water"}, {"b"}),
        ({"title": "Hill"}, {"c"}), ({"tag": "none such"}, set()),
    ],
)  # fmt: skip
def test_filters_hold_inside_the_search(lakes: Library, filters: dict[str, object], expected: set[str]) -> None:
    for share in (0.0, 0.5, 1.0):
        got = found(lakes, "green lake hill", filters=filters, dense_share=share, limit=1 if len(expected) == 1 else 10)
        assert set(got) == expected


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ({"year": {"above": 3}}, "no operator 'above'"), ({"year": {}}, "says nothing"),
        ({"tag": {"in": "water"}}, "takes a list"), ({"tag": [1]}, "takes a text"),
        ({f"f{n}": 1 for n in range(21)}, "20"),
    ],
)  # fmt: skip
def test_a_filter_that_makes_no_sense_is_refused(lakes: Library, filters: dict[str, object], said: str) -> None:
    with pytest.raises(BadFilter, match=said):
        found(lakes, "lake", filters=filters)


@pytest.mark.parametrize("name", ['a"; DROP TABLE documents; --', "$.tag", "tag' OR 1=1", "a.b", "a[0]"])
def test_a_name_in_a_filter_is_never_sql(lakes: Library, name: str) -> None:
    assert found(lakes, "lake", filters={name: "x"}) == []
    assert len(lakes.store.documents("ana")) == 4


@pytest.mark.parametrize(
    ("text", "limit", "said"),
    [("  ", 10, "empty"), ("x" * 100_000, 10, "100,000"), ("a", 0, "1 to"), ("a", 10_000, "1 to")],
)
def test_a_query_that_cannot_be_searched_for_is_refused(lakes: Library, text: str, limit: int, said: str) -> None:
    with pytest.raises(BadQuery, match=said):
        found(lakes, text, limit=limit)


@pytest.mark.parametrize("text", ["?!", "“”", "\0", "AND OR NOT (", 'text:"lake"', "*", "a" * 3000, "湖"])
def test_no_query_is_a_syntax_error(lakes: Library, text: str) -> None:
    assert lakes.search(Query("ana", text)).hits


def test_a_collection_that_is_not_there_is_said(lakes: Library) -> None:
    with pytest.raises(NotFound, match="no collection 99"):
        found(lakes, "lake", collections=frozenset({99}))


def test_repeats_are_shown_once(library: Library) -> None:
    number = library.collection("ana").id
    same = "The green lake is deep and cold in every season of the year."
    library.add("ana", number, [Text("a", same), Text("b", same + " Indeed."), Text("c", "Another green lake.")])
    assert found(library, "green lake deep cold season") == ["a", "c"]
    assert set(found(library, "green lake deep cold season", repeats=True)) == {"a", "b", "c"}


def test_late_interaction_reranks(lakes: Library) -> None:
    hits = lakes.search(Query("ana", "grey lake north", rerank=True)).hits
    assert hits[0].passage.source == "b" and all(hit.rerank is not None for hit in hits)


def test_a_scorer_that_is_passed_in_reranks(lakes: Library) -> None:
    def longest_first(query: str, texts: Sequence[str]) -> list[float]:
        return [100.0 * ("oaks" in text) for text in texts]

    assert lakes.search(Query("ana", "green"), longest_first).hits[0].passage.source in ("c", "a")
    ranked = [hit.passage.source for hit in lakes.search(Query("ana", "oaks hill"), longest_first).hits]
    assert ranked[0] == "c"


def test_vectors_in_cells_find_what_a_flat_index_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((3000, 32)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    ids = np.arange(3000, dtype=np.int64) * 3 + 1
    flat = DenseIndex(32)
    flat.add(ids, vectors)
    monkeypatch.setattr(dense, "PROBED", 10_000)
    cells = DenseIndex.in_cells(*flat.all())
    queries = vectors[:50] + 0.1 * rng.standard_normal((50, 32)).astype(np.float32)
    expected, _ = flat.search(queries, 5)
    got, _ = cells.search(queries, 5)
    assert (got[:, 0] == expected[:, 0]).mean() == 1.0 and (got == expected).mean() > 0.95  # half precision
    cells.remove(ids[:10])
    held, kept = cells.all()
    np.testing.assert_allclose(kept, vectors[(held - 1) // 3], atol=1e-3)  # so that cells can be made anew from them
    assert sorted(cells.all()[0]) == sorted(ids[10:]) and not np.isin(cells.search(queries, 5)[0], ids[:10]).any()


def test_an_index_that_grows_goes_into_cells_and_back_from_disk(
    tmp_path: Path, embedder: WordEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "FLAT_UP_TO", 100)
    texts = [Text(f"t{n}", f"Lake number{n} is deep.") for n in range(150)]
    with Library.open(tmp_path / "grown", embedder) as library:
        library.add("ana", library.collection("ana").id, texts)
        assert not file_indexes(library).dense.crowded and len(file_indexes(library).dense) == 150
        assert found(library, "number77", limit=1) == ["t77"]
    with Library.open(tmp_path / "grown", embedder) as library:
        assert found(library, "number77", limit=1, dense_share=1.0) == ["t77"]


@pytest.mark.parametrize("margin", [100, 0])
def test_words_are_found_in_some_collections_as_they_are_with_a_filter(
    tmp_path: Path, embedder: WordEmbedder, monkeypatch: pytest.MonkeyPatch, margin: int
) -> None:
    monkeypatch.setattr(lexical, "MARGIN", margin)  # without one, those of others may leave too few
    with Library.open(tmp_path / "files", embedder) as library:
        mine, other = (library.collection("ana", name).id for name in ("mine", "other"))
        words = ["lake", "deep", "green", "hill", "oak"]
        for number, collection in enumerate((mine, other)):
            made = [" ".join(words[at % 5] for at in range(n % 7 + number, n % 11 + 8)) for n in range(40)]
            library.add(
                "ana", collection, [Text(f"{number}-{n}", text + " lake" * number) for n, text in enumerate(made)]
            )
        index, views = file_indexes(library).lexical, file_indexes(library)
        for query in ("lake", "green oak", "deep deep hill", "nothing"):
            for among in ([mine], [other], [mine, other]):
                ids, scores = index.search(query, 5, among)
                fast, same = index.search(query, 5, among, allowed=views.allowed(among, None))
                assert fast.tolist() == ids.tolist() and same == pytest.approx(scores)


def test_what_was_deleted_or_replaced_is_in_neither_index(lakes: Library) -> None:
    mine = lakes.collection("ana").id
    lakes.delete("ana", lakes.search(Query("ana", "deep lake")).hits[0].passage.document)
    lakes.add("ana", mine, [Text("b", "Another text of the same name.")])
    if isinstance(lakes.views, Views):
        assert len(lakes.views.lexical) == len(lakes.views.dense) == 3
    scope = lakes.views.scope("ana", {mine}, None)
    assert not scope.lexical("lake", 10) and len(scope.dense(lakes.embedder.embed_query("lake"), 10)) == 3


def test_the_cosine_of_a_passage_is_the_same_whatever_else_is_indexed(library: Library) -> None:
    number = library.collection("ana").id
    library.add("ana", number, [Text("a", "A green lake below the dam of Orsk.")])

    def of_a() -> tuple[float | None, float]:
        found = library.search(Query("ana", "granite below the dam", 9, rerank=True)).hits
        hit = next(hit for hit in found if hit.passage.source == "a")
        return hit.cosine, hit.score

    alone = of_a()
    library.add("ana", number, [Text("b", "Granite below the dam."), Text("c", "Granite of the dam.")])
    among = of_a()
    assert alone[0] is not None and among[0] == pytest.approx(alone[0]) and among[1] != pytest.approx(alone[1])


def test_a_passage_found_by_its_words_alone_has_a_cosine(library: Library) -> None:
    library.add("ana", library.collection("ana").id, [Text("a", "A green lake below the dam of Orsk.")])
    (hit,) = library.search(Query("ana", "Orsk", 9, dense_share=0.0)).hits
    assert hit.dense is None and hit.cosine is not None and 0 < hit.cosine < 1
