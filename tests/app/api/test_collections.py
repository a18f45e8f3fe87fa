"""Collections over HTTP: shared and taken back, and not there for anybody else."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from retrieval import rights
from tests.app.conftest import Server
from tests.app.library import BEES, DAM, add, error, search, upload


def made(http: httpx.Client, name: str = "Shared") -> int:
    reply = http.post("/api/collections", json={"name": name})
    assert reply.status_code == 201, reply.text
    return int(reply.json()["id"])


def user(http: httpx.Client) -> str:
    return http.headers["X-User"]


def share(owner: httpx.Client, collection: int, member: httpx.Client, role: str) -> None:
    """Invite, and accept unless the member is one already."""
    reply = owner.put(f"/api/collections/{collection}/members/{user(member)}", json={"role": role})
    assert reply.status_code == 200, reply.text
    status = reply.json().pop("status")
    assert reply.json() == {"user": user(member), "role": role, "status": status}
    if status == "invited":
        accepted = member.post(f"/api/invitations/{collection}/accept")
        assert accepted.status_code == 200 and accepted.json()["role"] == role


def test_a_collection_is_made_once(ana: httpx.Client) -> None:
    first = ana.post("/api/collections", json={"name": " Work "})
    again = ana.post("/api/collections", json={"name": "Work"})
    assert (first.status_code, again.status_code) == (201, 200) and first.json() == again.json()
    assert first.json() == {
        "id": first.json()["id"], "name": "Work", "owner": user(ana), "role": "owner", "documents": 0
    }  # fmt: skip
    assert ana.get("/api/collections").json() == {"collections": [first.json()]}


def test_a_collection_gets_another_name(ana: httpx.Client) -> None:
    number = made(ana, "Work")
    document = add(ana, "dam.txt", DAM, collection=number)
    reply = ana.patch(f"/api/collections/{number}", json={"name": " Dams "})
    assert reply.status_code == 200 and (reply.json()["name"], reply.json()["documents"]) == ("Dams", 1)
    assert ana.get(f"/api/documents?collection={number}").json()["documents"] == [document]
    assert ana.patch(f"/api/collections/{number}", json={"name": "Dams"}).status_code == 200


def test_a_name_that_is_taken_is_refused(ana: httpx.Client) -> None:
    made(ana, "Work")
    number = made(ana, "Home")
    assert "Work" in error(ana.patch(f"/api/collections/{number}", json={"name": "Work"}), 409, "name_taken", "name")
    error(ana.patch(f"/api/collections/{number}", json={"name": " "}), 400, "invalid_value", "name")


def test_only_the_owner_renames(ana: httpx.Client, bob: httpx.Client) -> None:
    number = made(ana, "Work")
    error(bob.patch(f"/api/collections/{number}", json={"name": "Mine"}), 404, "not_found")
    share(ana, number, bob, "writer")
    assert bob.patch(f"/api/collections/{number}", json={"name": "Mine"}).status_code == 403
    assert [each["name"] for each in ana.get("/api/collections").json()["collections"]] == ["Work"]


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "name"), ({"name": ""}, "name"), ({"name": "  "}, "name"), ({"name": "x" * 201}, "name"),
     ({"name": 3}, "name"), ({"name": None}, "name"), ({"name": "x", "user": "y"}, "user")],
    ids=str,
)  # fmt: skip
def test_a_bad_collection_is_refused_by_name(ana: httpx.Client, body: dict[str, Any], param: str) -> None:
    reply = ana.post("/api/collections", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_a_reader_finds_but_may_not_change(ana: httpx.Client, bob: httpx.Client) -> None:
    collection = made(ana)
    document = add(ana, "dam.txt", DAM, collection=collection)
    share(ana, collection, bob, "reader")
    assert search(bob, "granite dam") == []
    assert [hit["text"] for hit in search(bob, "granite dam", collections="all")] == [DAM]
    assert [hit["text"] for hit in search(bob, "granite dam", collections=[collection])] == [DAM]
    assert bob.get("/api/documents").json()["documents"] == [document]
    error(bob.delete(f"/api/documents/{document['id']}"), 403, "not_allowed")
    error(upload(bob, ("bees.txt", BEES), collection=collection), 403, "not_allowed")
    error(bob.delete(f"/api/collections/{collection}"), 403, "not_allowed")
    error(bob.put(f"/api/collections/{collection}/members/eve", json={"role": "reader"}), 403, "not_allowed")


def test_a_writer_adds_and_deletes_documents_but_does_not_share(ana: httpx.Client, bob: httpx.Client) -> None:
    collection = made(ana)
    share(ana, collection, bob, "writer")
    document = add(bob, "bees.txt", BEES, collection=collection)
    assert ana.get(f"/api/documents/{document['id']}").json() == document
    assert bob.delete(f"/api/documents/{document['id']}").status_code == 204
    error(bob.put(f"/api/collections/{collection}/members/eve", json={"role": "reader"}), 403, "not_allowed")


@pytest.mark.parametrize("owner_first", [True, False])
def test_no_member_replaces_anothers_document_unasked(
    ana: httpx.Client, bob: httpx.Client, shelf: Server, owner_first: bool
) -> None:
    collection = made(ana)
    share(ana, collection, bob, "writer")
    first, second = (ana, bob) if owner_first else (bob, ana)
    document = add(first, "dam.txt", DAM, collection=collection)
    kept = set((shelf.data / "documents" / "files").iterdir())
    refused = upload(second, ("bees.txt", BEES), ("dam.txt", BEES), collection=collection)
    assert "replace=true" in error(refused, 409, "name_taken", "source")
    assert second.get("/api/documents").json()["documents"] == [document]
    assert set((shelf.data / "documents" / "files").iterdir()) == kept
    assert add(first, "dam.txt", f"{DAM} It leaks.", collection=collection)["id"] == document["id"]
    replaced = upload(second, ("dam.txt", BEES), collection=collection, replace="true").json()["documents"][0]
    assert replaced["id"] == document["id"] and search(first, "bees", collections=[collection])[0]["text"] == BEES
    error(upload(first, ("dam.txt", DAM), collection=collection), 409, "name_taken", "source")


def test_replace_is_true_or_false(ana: httpx.Client) -> None:
    message = error(upload(ana, ("dam.txt", DAM), replace="yes"), 400, "invalid_value", "replace")
    assert message == "replace is 'yes'; accepted: true or false."


def test_a_right_that_is_taken_back_is_gone_at_once(ana: httpx.Client, bob: httpx.Client) -> None:
    collection = made(ana)
    document = add(ana, "dam.txt", DAM, collection=collection)
    share(ana, collection, bob, "reader")
    member = f"/api/collections/{collection}/members/{user(bob)}"
    assert ana.delete(member).status_code == 204
    assert search(bob, "granite dam", collections="all") == []
    error(bob.get(f"/api/documents/{document['id']}"), 404, "not_found")
    error(ana.delete(member), 404, "not_found")


def test_members_are_listed_to_members(ana: httpx.Client, bob: httpx.Client) -> None:
    collection = made(ana)
    share(ana, collection, bob, "reader")
    share(ana, collection, bob, "writer")
    assert bob.get(f"/api/collections/{collection}/members").json() == {
        "members": [{"user": user(bob), "role": "writer", "status": "member"}]
    }


def test_an_invitation_is_seen_by_its_user_and_gives_nothing_yet(ana: httpx.Client, bob: httpx.Client) -> None:
    collection = made(ana)
    document = add(ana, "dam.txt", DAM, collection=collection)
    ana.put(f"/api/collections/{collection}/members/{user(bob)}", json={"role": "reader"})
    (invitation,) = bob.get("/api/invitations").json()["invitations"]
    assert invitation.pop("created_at") > 0
    assert invitation == {"collection": collection, "name": "Shared", "owner": user(ana), "role": "reader"}
    assert search(bob, "granite dam", collections="all") == []
    error(bob.get(f"/api/documents/{document['id']}"), 404, "not_found")
    error(bob.post("/api/search", json={"query": "dam", "collections": [collection]}), 404, "not_found")
    assert ana.get("/api/invitations").json() == {"invitations": []}


def test_a_declined_invitation_is_gone_and_its_owner_is_not_told(ana: httpx.Client, bob: httpx.Client) -> None:
    collection = made(ana)
    ana.put(f"/api/collections/{collection}/members/{user(bob)}", json={"role": "reader"})
    before = ana.get(f"/api/collections/{collection}/members").json()
    assert bob.delete(f"/api/invitations/{collection}").status_code == 204
    assert bob.get("/api/invitations").json() == {"invitations": []}
    error(bob.post(f"/api/invitations/{collection}/accept"), 404, "not_found")
    assert ana.get(f"/api/collections/{collection}/members").json() == before


def test_a_member_leaves_when_they_want(ana: httpx.Client, bob: httpx.Client) -> None:
    collection = made(ana)
    document = add(ana, "dam.txt", DAM, collection=collection)
    share(ana, collection, bob, "writer")
    assert bob.delete(f"/api/collections/{collection}/members/{user(bob)}").status_code == 204
    error(bob.get(f"/api/documents/{document['id']}"), 404, "not_found")
    assert bob.get("/api/collections").json() == {"collections": []}
    assert ana.get(f"/api/collections/{collection}/members").json() == {"members": []}


def test_too_many_invitations_are_refused(ana: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights, "MAX_INVITATIONS", 0)
    reply = ana.put(f"/api/collections/{made(ana)}/members/bob", json={"role": "reader"})
    error(reply, 409, "too_many_invitations", "user")


def test_what_is_somebody_elses_is_not_there(ana: httpx.Client, bob: httpx.Client) -> None:
    collection = made(ana)
    address = f"/api/collections/{collection}"
    error(bob.delete(address), 404, "not_found")
    error(bob.get(f"{address}/members"), 404, "not_found")
    error(bob.put(f"{address}/members/{user(bob)}", json={"role": "writer"}), 404, "not_found")
    error(bob.delete(f"{address}/members/{user(ana)}"), 404, "not_found")
    error(bob.get(f"/api/documents?collection={collection}"), 404, "not_found")
    error(bob.post("/api/search", json={"query": "x", "collections": [collection]}), 404, "not_found")
    assert bob.get("/api/collections").json() == {"collections": []}


@pytest.mark.parametrize("body", [{}, {"role": "owner"}, {"role": None}, {"role": "reader", "x": 1}], ids=str)
def test_a_bad_role_is_refused(ana: httpx.Client, body: dict[str, Any]) -> None:
    assert ana.put(f"/api/collections/{made(ana)}/members/bob", json=body).status_code == 400


def test_the_owner_is_no_member(ana: httpx.Client) -> None:
    reply = ana.put(f"/api/collections/{made(ana)}/members/{user(ana)}", json={"role": "reader"})
    error(reply, 400, "invalid_value", "user")


def test_a_deleted_collection_takes_its_documents_along(ana: httpx.Client) -> None:
    collection = made(ana)
    document = add(ana, "dam.txt", DAM, collection=collection)
    assert ana.delete(f"/api/collections/{collection}").status_code == 204
    error(ana.get(f"/api/documents/{document['id']}"), 404, "not_found")
    assert search(ana, "granite dam") == []
    error(ana.delete(f"/api/collections/{collection}"), 404, "not_found")
