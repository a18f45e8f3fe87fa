"""Links to chats: a snapshot that anybody may read, without what its owner alone may see, until it is revoked."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from app.api.chat_export import SharedChat, SharedTurn, page
from app.db.answer_steps import AnswerStep, StepCall, StepResult
from app.db.share_store import MAX_LINKS
from app.runs.events import SourceShown
from app.share import _public
from tests.app import postgres
from tests.app.chatting import ask, new_chat
from tests.app.conftest import Server, serving
from tests.app.keyed import asking_for_keys, client_of, key_of
from tests.app.library import error

DATABASES = postgres.DATABASES_SLOW

pytestmark = pytest.mark.slow


def link(http: httpx.Client, chat: str) -> dict[str, str]:
    reply = http.post(f"/api/chats/{chat}/share")
    assert reply.status_code == 201 and reply.headers["cache-control"] == "no-store", reply.text
    return dict(reply.json())


def read(server: Server, path: str, **headers: str) -> httpx.Response:
    """Reads it as a stranger."""
    return httpx.get(f"{server.url}{path}", headers=headers)


def test_a_link_shows_the_chat_as_it_was_until_it_is_updated(server: Server, http: httpx.Client) -> None:
    chat = new_chat(http)
    ask(http, chat, "The first question")
    made = link(http, chat)
    ask(http, chat, "The second question")
    page = read(server, made["path"])
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "The first question" in page.text and "The second question" not in page.text
    assert "noindex" in page.headers["x-robots-tag"] and "noindex" in page.text
    assert page.headers["content-security-policy"].startswith("sandbox") and page.headers["cache-control"] == "no-store"
    updated = http.post(f"/api/shares/{made['id']}/update").json()
    assert "The second question" in read(server, made["path"]).text
    (listed,) = [each for each in http.get("/api/shares").json()["shares"] if each["id"] == made["id"]]
    assert listed == updated and set(listed) == {"id", "chat_id", "title", "created_at", "updated_at"}


def test_a_revoked_link_leads_to_a_clear_page(server: Server, http: httpx.Client) -> None:
    chat = new_chat(http)
    ask(http, chat, "Zanzibar")
    made, other = link(http, chat), link(http, chat)
    assert made["path"] != other["path"] and len(made["path"]) > len("/share/") + 40
    assert http.delete(f"/api/shares/{made['id']}").status_code == 204
    gone = read(server, made["path"])
    assert gone.status_code == 404 and "The link was revoked" in gone.text and "Zanzibar" not in gone.text
    assert 'lang="de"' in read(server, made["path"], **{"Accept-Language": "de-AT"}).text
    assert gone.text == read(server, "/share/nothing").text and "noindex" in gone.headers["x-robots-tag"]
    assert read(server, other["path"]).status_code == 200
    error(http.delete(f"/api/shares/{made['id']}"), 404, "link_not_found")


@pytest.mark.parametrize("back", [False, True])
def test_deleting_a_chat_revokes_its_links_also_where_it_comes_back(
    server: Server, http: httpx.Client, back: bool
) -> None:
    chat = new_chat(http)
    ask(http, chat, "Zanzibar")
    made = link(http, chat)
    http.delete(f"/api/chats/{chat}")
    if back:
        http.post(f"/api/chats/{chat}/restore")
    assert read(server, made["path"]).status_code == 404
    assert made["id"] not in http.get("/api/shares").text


def test_a_private_or_empty_chat_has_no_link(server: Server, http: httpx.Client) -> None:
    empty = new_chat(http)
    error(http.post(f"/api/chats/{empty}/share"), 409, "chat_empty")
    ask(http, empty, "Zanzibar")
    made = link(http, empty)
    http.patch(f"/api/chats/{empty}", json={"private": True})
    assert read(server, made["path"]).status_code == 404
    error(http.post(f"/api/chats/{empty}/share"), 409, "chat_private")


def test_a_chat_has_a_limit_of_links(http: httpx.Client) -> None:
    chat = new_chat(http)
    ask(http, chat, "one")
    for _ in range(MAX_LINKS):
        link(http, chat)
    assert "revoke one first" in error(http.post(f"/api/chats/{chat}/share"), 409, "too_many_links")
    http.delete(f"/api/chats/{chat}")


def test_a_token_is_kept_as_its_hash_alone(server: Server, http: httpx.Client) -> None:
    chat = new_chat(http)
    ask(http, chat, "one")
    token = link(http, chat)["path"].removeprefix("/share/")
    http.get("/api/shares")  # after the write
    assert token.encode() not in b"".join(path.read_bytes() for path in server.data.glob("ponder.db*"))


def test_strangers_read_a_link_of_a_server_that_asks_for_keys_and_nothing_else(model: Path, tmp_path: Path) -> None:
    with asking_for_keys(model, tmp_path) as server, client_of(server, key_of(server, "ana")) as ana:
        chat = new_chat(ana)
        ask(ana, chat, "Zanzibar")
        assert "Zanzibar" in read(server, link(ana, chat)["path"]).text
        assert read(server, "/api/shares").status_code == 401


def test_an_operator_forbids_links(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        chat = new_chat(http)
        ask(http, chat, "Zanzibar")
        path = link(http, chat)["path"]
    with serving(model, tmp_path, sharing=False) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        assert http.get("/api/shares").json()["allowed"] is False
        error(http.post(f"/api/chats/{chat}/share"), 403, "sharing_off")
        assert read(server, path).status_code == 404


def test_a_page_has_no_thinking_calls_or_sources_that_are_not_cited() -> None:
    step = AnswerStep(
        content="", calls=[StepCall(id="1", name="read_file", arguments="{}")],
        results=[StepResult(call_id="1", text="a secret result", untrusted=False)],
    )  # fmt: skip
    cited = SourceShown(label="S1", document=1, title="Dams", page=1, start=0, end=5, text="Built in 1931.", score=0.5)
    found = cited.model_copy(update={"label": "S2", "text": "A passage that was only found."})
    turn = SharedTurn("assistant", "In 1931. [S1]", "secret thoughts", 1.0, [step], [cited, found])
    shown = page(SharedChat("Dams", datetime(2026, 11, 22, tzinfo=UTC), [_public(turn)]))
    assert "Built in 1931." in shown
    assert not [word for word in ("secret", "only found", "read_file", "Thought") if word in shown]
