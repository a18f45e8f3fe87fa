"""Collections: who reads, writes, shares and deletes them, and what the others are told."""

from __future__ import annotations

import pytest

from retrieval import Library, NotAllowed, NotFound, Query, Text


def _shared(library: Library) -> tuple[int, int]:
    """A collection of Ana's that Ben may read and Cy may write to, with a document."""
    number = library.collection("ana", "Dams").id
    library.add("ana", number, [Text("orsk", "The dam of Orsk was finished in 1931.")])
    library.rights.share("ana", number, "ben", "reader")
    library.rights.share("ana", number, "cy", "writer")
    return number, library.store.documents("ana")[0].id


def test_a_collection_is_made_once_for_a_name(library: Library) -> None:
    assert library.collection("ana", "Dams") == library.collection("ana", " Dams ")
    assert library.collection("ben", "Dams").id != library.collection("ana", "Dams").id


@pytest.mark.parametrize("name", ["", "   ", "x" * 201])
def test_a_name_that_is_none_is_refused(library: Library, name: str) -> None:
    with pytest.raises(ValueError, match="1 to 200 characters"):
        library.collection("ana", name)


def test_a_reader_reads_and_changes_nothing(library: Library) -> None:
    number, document = _shared(library)
    assert library.store.text("ben", document).startswith("The dam of Orsk")
    for forbidden in (
        lambda: library.add("ben", number, [Text("mine", "Not welcome.")]),
        lambda: library.delete("ben", document),
        lambda: library.rights.share("ben", number, "dan", "reader"),
        lambda: library.delete_collection("ben", number),
    ):
        with pytest.raises(NotAllowed, match="A reader may not"):
            forbidden()
    assert len(library.store.documents("ana")) == 1


def test_a_writer_adds_and_deletes_documents_but_does_not_share(library: Library) -> None:
    number, document = _shared(library)
    library.add("cy", number, [Text("money", "The city paid for the dam.")])
    library.delete("cy", document)
    assert [each.source for each in library.store.documents("ana")] == ["money"]
    with pytest.raises(NotAllowed, match="takes the owner"):
        library.rights.share("cy", number, "dan", "reader")


def test_a_stranger_is_told_that_nothing_is_there(library: Library) -> None:
    number, document = _shared(library)
    for asked in (
        lambda: library.store.document("eve", document),
        lambda: library.store.text("eve", document),
        lambda: library.store.pages("eve", document),
        lambda: library.store.file("eve", document),
        lambda: library.store.documents("eve", number),
        lambda: library.rights.collection("eve", number),
        lambda: library.rights.members("eve", number),
        lambda: library.delete("eve", document),
        lambda: library.delete_collection("eve", number),
        lambda: library.search(Query("eve", "dam", collections=frozenset({number}))),
    ):
        with pytest.raises(NotFound, match="There is no"):
            asked()
    assert library.store.documents("eve") == [] and library.rights.collections("eve") == []


def test_what_is_not_readable_sounds_like_what_is_not_there(library: Library) -> None:
    _, document = _shared(library)
    with pytest.raises(NotFound) as hidden:
        library.store.document("eve", document)
    with pytest.raises(NotFound) as absent:
        library.store.document("ana", document + 1)
    assert str(hidden.value).replace(str(document), "N") == str(absent.value).replace(str(document + 1), "N")


def test_a_right_that_is_taken_away_is_gone_at_once(library: Library) -> None:
    number, _ = _shared(library)
    assert library.search(Query("ben", "Orsk")).hits
    library.rights.share("ana", number, "ben", None)
    assert not library.search(Query("ben", "Orsk")).hits


def test_collections_are_listed_with_the_role_of_who_asks(library: Library) -> None:
    number, _ = _shared(library)
    library.collection("ben", "Mine")
    assert [(c.name, c.owner, c.role, c.documents) for c in library.rights.collections("ben")] == [
        ("Mine", "ben", "owner", 0),
        ("Dams", "ana", "reader", 1),
    ]
    assert library.rights.members("cy", number) == {"ben": "reader", "cy": "writer"}
