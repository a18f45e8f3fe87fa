"""Tests whatever users do with collections, nothing shows anyone what they have no right to, at any stage of a
search."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tantivy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from retrieval import Library, NotAllowed, NotFound, Query, Text
from retrieval.browse import Browser
from retrieval.durable import read_record, write_record
from retrieval.prompt_context import sources
from tests.app import postgres
from tests.retrieval.conftest import NewEngine, admit, engine_of
from tests.retrieval.words import WordEmbedder

pytestmark = pytest.mark.slow
DATABASES = postgres.DATABASES

USERS = ("ana", "ben", "cy")
users = st.sampled_from(USERS)


class Sharing(RuleBasedStateMachine):
    """The library against a model of it in plain dictionaries."""

    collections = Bundle("collections")
    address: str | None = None  # of a PostgreSQL server

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.database = ExitStack()
        self.engine = self.database.enter_context(engine_of(self.address)) if self.address else None
        self.library = Library.open(self.folder / "library", WordEmbedder(), engine=self.engine)
        self.owner: dict[int, str] = {}
        self.roles: dict[tuple[int, str], str] = {}
        self.invited: dict[tuple[int, str], str] = {}
        self.declined: set[tuple[int, str]] = set()
        self.held: dict[int, tuple[int, str]] = {}  # document: collection, the word that only it has
        self.words = 0

    def teardown(self) -> None:
        self.library.close()
        self.database.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # tantivy may write in it for a moment yet

    def role(self, user: str, collection: int) -> str | None:
        if collection not in self.owner:
            return None
        return "owner" if self.owner[collection] == user else self.roles.get((collection, user))

    @rule(target=collections, user=users)
    def create(self, user: str) -> int:
        number = self.library.collection(user, f"c{len(self.owner)}").id
        self.owner[number] = user
        return number

    @rule(collection=collections, asker=users, user=users, role=st.sampled_from(["reader", "writer"]))
    def invite(self, collection: int, asker: str, user: str, role: Any) -> None:
        try:
            self.library.rights.invite(asker, collection, user, role)
        except (NotFound, NotAllowed):
            assert self.role(asker, collection) != "owner"
            return
        except ValueError:
            assert self.role(user, collection) == "owner"
            return
        assert self.role(asker, collection) == "owner"
        (self.roles if (collection, user) in self.roles else self.invited)[collection, user] = role

    @rule(collection=collections, user=users, answer=st.sampled_from(["accept", "accept", "decline"]))
    def answer(self, collection: int, user: str, answer: str) -> None:
        open_ones = self.invited.keys() - self.declined
        assert {each.collection for each in self.library.rights.invitations(user)} == {
            number for number, invited in open_ones if invited == user
        }
        try:
            getattr(self.library.rights, answer)(user, collection)
        except NotFound:
            assert (collection, user) not in open_ones
            return
        assert (collection, user) in open_ones
        if answer == "decline":
            self.declined.add((collection, user))
        else:
            self.roles[collection, user] = self.invited.pop((collection, user))

    @rule(collection=collections, asker=users, user=users)
    def remove(self, collection: int, asker: str, user: str) -> None:
        try:
            self.library.rights.remove(asker, collection, user)
        except (NotFound, NotAllowed):
            assert self.role(asker, collection) != "owner" and (asker != user or not self.role(user, collection))
            return
        assert self.role(asker, collection) == "owner" or asker == user
        self.roles.pop((collection, user), None)
        self.invited.pop((collection, user), None)
        self.declined.discard((collection, user))

    @rule(collection=collections, user=users, source=st.sampled_from(["one", "two"]))
    def put(self, collection: int, user: str, source: str) -> None:
        self.words += 1
        word = f"zq{self.words}"
        try:
            self.library.add(user, collection, [Text(source, f"The dam is called {word} by everyone in the valley.")])
        except (NotFound, NotAllowed):
            assert self.role(user, collection) not in ("owner", "writer")
            return
        assert self.role(user, collection) in ("owner", "writer")
        document = next(d for d in self.library.store.documents(user, collection) if d.source == source)
        self.held[document.id] = (collection, word)

    @rule(user=users, data=st.data())
    def delete(self, user: str, data: st.DataObject) -> None:
        if not self.held:
            return
        document = data.draw(st.sampled_from(sorted(self.held)))
        try:
            self.library.delete(user, document)
        except (NotFound, NotAllowed):
            assert self.role(user, self.held[document][0]) not in ("owner", "writer")
            return
        del self.held[document]

    @rule(collection=consumes(collections), user=users)
    def delete_collection(self, collection: int, user: str) -> None:
        try:
            self.library.delete_collection(user, collection)
        except (NotFound, NotAllowed):
            assert self.role(user, collection) != "owner"
            return
        del self.owner[collection]
        self.held = {document: where for document, where in self.held.items() if where[0] != collection}
        self.invited = {key: role for key, role in self.invited.items() if key[0] != collection}

    @rule()
    def reopen(self) -> None:
        self.library.close()
        self.library = Library.open(self.folder / "library", WordEmbedder(), engine=self.engine)

    @invariant()
    def each_sees_exactly_what_is_theirs(self) -> None:
        for user in USERS:
            allowed = {document for document, (collection, _) in self.held.items() if self.role(user, collection)}
            own = {document for document in allowed if self.owner[self.held[document][0]] == user}
            by_default = self.library.search(Query(user, "dam valley", 50, repeats=True)).hits
            assert {hit.passage.document for hit in by_default} == own
            for query in (
                Query(user, "dam valley", 50, "all", repeats=True),
                Query(user, "dam valley", 50, "all", repeats=True, dense_share=0.0),
                Query(user, "dam valley", 50, "all", repeats=True, dense_share=1.0),
                Query(
                    user, "dam valley", 50, "all", repeats=True, rerank=True, filters={"source": {"in": ["one", "two"]}}
                ),
            ):
                hits = self.library.search(query).hits
                assert {hit.passage.document for hit in hits} == allowed
                words = {self.held[hit.passage.document][1] for hit in hits}
                assert {hit.passage.text.split()[4] for hit in hits} == words  # the newest version alone
            shown = sources(self.library.store, user, hits, 1000, lambda text: len(text.split()))
            assert {source.document for source in shown} <= allowed
            assert {document.id for document in self.library.store.documents(user)} == allowed
            assert {found.document for found in Browser(self.library, user).find("valley", limit=20)} == own
            everything = Browser(self.library, user, "all")
            assert {found.document for found in everything.find("valley", limit=20)} == allowed
            for document in self.held.keys() - allowed:
                try:
                    everything.open(document, 0)
                except NotFound:
                    continue
                raise AssertionError(f"{user} opened document {document}")


Sharing.TestCase.settings = settings(max_examples=12, stateful_step_count=20, suppress_health_check=list(HealthCheck))
TestSharing = Sharing.TestCase


class SharingInPostgres(Sharing):
    """The same, with documents in PostgreSQL, whose opening takes longer."""


SharingInPostgres.TestCase.settings = settings(Sharing.TestCase.settings, max_examples=4)


class TestSharingInPostgres(SharingInPostgres.TestCase):  # type: ignore[misc, valid-type]  # hypothesis makes it
    @pytest.fixture(autouse=True)
    def server(self, postgres_address: str) -> None:
        SharingInPostgres.address = postgres_address


MINE = [
    Text("orsk", "The dam of Orsk was finished in 1931, of granite from the valley.", "The dam of Orsk"),
    Text("bees", "Bees of the valley dance; a dam is nothing to them.", "Bees"),
    Text("money", "The city paid for granite, and for the dam twice.", "Money"),
    *(
        Text(f"note{n}", f"A note on the dam, number {n}: {'granite ' * (n % 7)}valley.", f"Note {n}")
        for n in range(60)
    ),
]
QUERIES = ("dam", "granite dam of the valley", "who paid for the dam in Orsk?", "number 7", "bees", "zeppelin")
_words = st.sampled_from(["dam", "granite", "valley", "orsk", "bees", "zeppelin", "number", "paid", "the", "note", "7"])
_texts = st.lists(st.lists(_words, min_size=1, max_size=40).map(" ".join), min_size=1, max_size=40)


def found(library: Library, user: str, among: Any = "own") -> list[Any]:
    """All that searches tell, scores with all their digits."""
    return [
        [(hit.passage.id, hit.score, hit.dense, hit.lexical, hit.rerank) for hit in library.search(asked).hits]
        for text in QUERIES
        for asked in (
            Query(user, text, 10, among),
            Query(user, text, 100, among, repeats=True, dense_share=0.0),
            Query(user, text, 10, among, rerank=True),
        )
    ]


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(theirs=_texts)
def test_documents_of_others_change_neither_scores_nor_order(new_engine: NewEngine, theirs: list[str]) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        new_engine() as engine,
        Library.open(Path(folder) / "library", WordEmbedder(), engine=engine) as library,
    ):
        mine = library.collection("ana").id
        library.add("ana", mine, MINE)
        shared, hidden = library.collection("ben", "shared").id, library.collection("ben", "hidden").id
        library.add("ben", shared, MINE[:2])
        admit(library, "ben", shared, "ana", "reader")
        before = found(library, "ana"), found(library, "ana", "all")
        rarity = [library.rarity("ana")(word) for word in ("dam", "zeppelin", "granit")]
        library.add("ben", hidden, [Text(f"{n}", text, text[:20]) for n, text in enumerate(theirs)])
        assert (found(library, "ana"), found(library, "ana", "all")) == before
        assert [library.rarity("ana")(word) for word in ("dam", "zeppelin", "granit")] == rarity
        library.delete_collection("ben", hidden)
        assert (found(library, "ana"), found(library, "ana", "all")) == before


def test_scores_count_over_all_collections_that_are_searched(library: Library) -> None:
    for name in ("first", "second"):
        library.add("ana", library.collection("ana", name).id, MINE)
    whole = library.collection("ben").id
    library.add("ben", whole, [Text(f"{n}{each.source}", each.text, each.title) for n in (1, 2) for each in MINE])
    for text in QUERIES:
        scores = [
            [hit.lexical for hit in library.search(Query(user, text, 50, repeats=True, dense_share=0.0)).hits]
            for user in ("ana", "ben")
        ]
        assert scores[0] == scores[1]


def test_an_index_of_another_format_is_made_again(tmp_path: Path) -> None:
    with Library.open(tmp_path / "library", WordEmbedder()) as library:
        library.add("ana", library.collection("ana").id, MINE)
        before = found(library, "ana")
    folder = tmp_path / "library/index/lexical"
    record = read_record(folder / "generation.json")
    folder.rename(tmp_path / "removed")
    folder.mkdir()
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("text")
    tantivy.Index(builder.build(), path=str(folder))
    write_record(folder / "generation.json", {**record, "format": 1})
    with Library.open(tmp_path / "library", WordEmbedder()) as library:
        assert found(library, "ana") == before
