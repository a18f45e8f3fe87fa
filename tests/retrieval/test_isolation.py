"""Whatever users do with collections, nothing shows anyone what they have no right to, at any stage of a search."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from retrieval import Library, NotAllowed, NotFound, Query, Text
from retrieval.browse import Browser
from retrieval.context import sources
from tests.retrieval.words import WordEmbedder

USERS = ("ana", "ben", "cy")
users = st.sampled_from(USERS)


class Sharing(RuleBasedStateMachine):
    """The library against a model of it in plain dictionaries."""

    collections = Bundle("collections")

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.library = Library.open(self.folder / "library", WordEmbedder())
        self.owner: dict[int, str] = {}
        self.roles: dict[tuple[int, str], str] = {}
        self.held: dict[int, tuple[int, str]] = {}  # document: collection, the word that only it has
        self.words = 0

    def teardown(self) -> None:
        self.library.close()
        shutil.rmtree(self.folder)

    def role(self, user: str, collection: int) -> str | None:
        if collection not in self.owner:
            return None
        return "owner" if self.owner[collection] == user else self.roles.get((collection, user))

    @rule(target=collections, user=users)
    def create(self, user: str) -> int:
        number = self.library.collection(user, f"c{len(self.owner)}").id
        self.owner[number] = user
        return number

    @rule(collection=collections, asker=users, user=users, role=st.sampled_from(["reader", "writer", None]))
    def share(self, collection: int, asker: str, user: str, role: Any) -> None:
        try:
            self.library.rights.share(asker, collection, user, role)
        except (NotFound, NotAllowed):
            assert self.role(asker, collection) != "owner"
            return
        assert self.role(asker, collection) == "owner"
        self.roles.pop((collection, user), None)
        if role:
            self.roles[collection, user] = role

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

    @rule()
    def reopen(self) -> None:
        self.library.close()
        self.library = Library.open(self.folder / "library", WordEmbedder())

    @invariant()
    def each_sees_exactly_what_is_theirs(self) -> None:
        for user in USERS:
            allowed = {document for document, (collection, _) in self.held.items() if self.role(user, collection)}
            for query in (
                Query(user, "dam valley", 50, repeats=True),
                Query(user, "dam valley", 50, repeats=True, dense_share=0.0),
                Query(user, "dam valley", 50, repeats=True, dense_share=1.0),
                Query(user, "dam valley", 50, repeats=True, rerank=True, filters={"source": {"in": ["one", "two"]}}),
            ):
                hits = self.library.search(query).hits
                assert {hit.passage.document for hit in hits} == allowed
                words = {self.held[hit.passage.document][1] for hit in hits}
                assert {hit.passage.text.split()[4] for hit in hits} == words  # the newest version alone
            shown = sources(self.library.store, user, hits, 1000, lambda text: len(text.split()))
            assert {source.document for source in shown} <= allowed
            assert {document.id for document in self.library.store.documents(user)} == allowed
            assert {found.document for found in Browser(self.library, user).find("valley", limit=20)} == allowed
            for document in self.held.keys() - allowed:
                try:
                    Browser(self.library, user).open(document, 0)
                except NotFound:
                    continue
                raise AssertionError(f"{user} opened document {document}")


Sharing.TestCase.settings = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSharing = Sharing.TestCase
