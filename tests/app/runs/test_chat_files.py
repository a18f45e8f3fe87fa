"""Files that questions are sent with: answered from in their chat, and in no list, no search and no other chat."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ByteSize

from app.db import file_store
from app.document_library import sweep_files
from app.runs import rag
from tests.app import postgres
from tests.app.chatting import Json, ask, imported, new_chat, read
from tests.app.conftest import Server
from tests.app.gate import HELD, GatedEmbedder
from tests.app.library import BEES, DAM, add, error, search
from tests.app.runs.test_grounded_runs import answered, of_type
from tests.app.runs.test_runs import events
from tests.retrieval import made

DATABASES = postgres.DATABASES_SLOW

WHEN = "When was the dam at Hollow Creek finished?"


def attach(client: httpx.Client, name: str = "dam.txt", content: str | bytes = DAM, **fields: str) -> Json:
    """A file, uploaded and read."""
    reply = client.post("/api/files", files={"file": (name, content)}, data=fields)
    assert reply.status_code == 201, reply.text
    return dict(reply.json())


def log_of_run(client: httpx.Client, chat: str, content: str | None = None, **fields: Any) -> list[Json]:
    asked = fields if content is None else {"content": content, **fields}
    reply = client.post(f"/api/chats/{chat}/runs", json={"max_tokens": 40, **asked})
    assert reply.status_code == 202, reply.text
    return [data for _, _, data in events(client, reply.json()["run_id"])]


def me(client: httpx.Client) -> str:
    return str(client.headers["X-User"])


def said(log: list[Json]) -> str:
    return str(of_type(log, "answer.done")[0]["text"])


def test_a_file_is_answered_from_with_citations_and_shown_on_its_message(ana: httpx.Client) -> None:
    sent = attach(ana)
    assert (sent["name"], sent["bytes"], sent["status"], sent["media_type"]) == (
        "dam.txt", len(DAM), "ready", "text/plain",
    )  # fmt: skip
    chat = new_chat(ana)
    log = log_of_run(ana, chat, WHEN, files=[sent["id"]])
    assert "1931" in said(log)
    (ref,) = of_type(log, "citation.ref")
    assert ref["citations"][0]["document"] == sent["document"]
    question, answer = read(ana, chat)["messages"]
    assert question["files"] == [ana.get(f"/api/files/{sent['id']}").json()] and answer["files"] == []
    assert ana.get(f"/api/documents/{sent['document']}/text").json()["text"] == DAM
    later = log_of_run(ana, chat, "What is the dam at Hollow Creek built of?")
    assert "granite" in said(later), "the chat goes on with its files"


def test_a_pdf_tells_its_kind_and_its_pages(ana: httpx.Client) -> None:
    sent = attach(ana, "dam.pdf", made.pdf([["One."], [DAM]]))
    assert (sent["media_type"], sent["pages"], sent["status"]) == ("application/pdf", 2, "ready")
    chat = new_chat(ana)
    log = log_of_run(ana, chat, WHEN, files=[sent["id"]])
    assert of_type(log, "citation.ref")[0]["citations"][0]["page"] == 2


def test_a_file_is_in_no_list_and_no_search_and_no_other_chat(ana: httpx.Client, bob: httpx.Client) -> None:
    sent = attach(ana)
    chat = new_chat(ana)
    log_of_run(ana, chat, WHEN, files=[sent["id"]])
    number = ana.get(f"/api/documents/{sent['document']}").json()["collection"]
    assert ana.get("/api/documents").json()["documents"] == []
    assert ana.get("/api/collections").json()["collections"] == [] and ana.get("/api/jobs").json()["jobs"] == []
    for among in ("own", "all"):
        assert search(ana, "the dam at Hollow Creek", collections=among) == []
        assert "1931" not in str(answered(ana, WHEN, among))
    for path, body in (
        ("/api/search", {"query": "dam", "collections": [number]}),
        (f"/api/chats/{chat}/runs", {"content": "dam?", "collections": [number]}),
        (f"/api/collections/{number}/folders", {"path": "/mine"}),
    ):  # fmt: skip
        assert error(ana.post(path, json=body), 404, "not_found")
    for method, path in (
        ("PATCH", ""), ("DELETE", ""), ("GET", "/members"), ("PUT", "/members/bob"),
        ("DELETE", "/members/ana"), ("GET", "/folders"),
    ):  # fmt: skip
        sent_body = {"PATCH": {"name": "mine"}, "PUT": {"role": "reader"}}.get(method)
        assert error(ana.request(method, f"/api/collections/{number}{path}", json=sent_body), 404, "not_found")
    reply = ana.post("/api/documents", files={"file": ("b.txt", BEES)}, data={"collection": str(number)})
    assert error(reply, 404, "not_found")
    other = new_chat(ana)
    refused = ana.post(f"/api/chats/{other}/runs", json={"content": WHEN, "files": [sent["id"]]})
    assert error(refused, 404, "file_not_found") and read(ana, other)["messages"] == []
    for path in (f"/api/files/{sent['id']}", f"/api/documents/{sent['document']}"):
        assert bob.get(path).status_code == 404
    refused = bob.post(f"/api/chats/{new_chat(bob)}/runs", json={"content": WHEN, "files": [sent["id"]]})
    assert error(refused, 404, "file_not_found")


def test_files_are_searched_beside_the_collections_that_are_chosen(ana: httpx.Client) -> None:
    add(ana, "bees.txt", BEES)
    sent = attach(ana)
    chat = new_chat(ana)
    log = log_of_run(ana, chat, f"{WHEN} And why do bees dance?", files=[sent["id"]], collections="own")
    assert {each["title"] for each in of_type(log, "citation.sources")[0]["sources"]} == {"dam.txt", "bees.txt"}


def test_each_branch_has_the_files_of_its_own_questions(ana: httpx.Client) -> None:
    dam, mill = attach(ana), attach(ana, "dam.txt", "The dam at Hollow Creek was finished in 1822.")
    chat = new_chat(ana)
    assert "1931" in said(log_of_run(ana, chat, WHEN, files=[dam["id"]]))
    first = read(ana, chat)["messages"][0]["id"]
    edited = log_of_run(ana, chat, WHEN, files=[mill["id"]], parent_id=None)
    assert "1822" in said(edited) and "1931" not in str(edited)
    again = log_of_run(ana, chat, regenerate=first)
    assert "1931" in said(again) and "1822" not in str(again)
    both = log_of_run(ana, chat, f"{WHEN} Really?", files=[mill["id"], dam["id"]], parent_id=None)
    assert len(of_type(both, "citation.sources")[0]["sources"]) == 2, "a file may be sent again in its chat"


def test_a_file_goes_with_its_chat_and_may_come_back_with_it(ana: httpx.Client, shelf: Server) -> None:
    state = shelf.app.state.ponder
    sent, chat = attach(ana), new_chat(ana)
    log_of_run(ana, chat, WHEN, files=[sent["id"]])
    copies = set((state.library.folder / "files").iterdir())

    def sweep(kept_s: float | None = None) -> None:
        async def work() -> None:
            if kept_s is not None:
                await state.store.deleted.purge(kept_s)
            await sweep_files(state.store, state.library)

        shelf.on_loop(work())

    assert ana.delete(f"/api/chats/{chat}").status_code == 200
    sweep()
    assert ana.post(f"/api/chats/{chat}/restore").status_code == 200
    assert read(ana, chat)["messages"][0]["files"][0]["status"] == "ready"
    assert ana.delete(f"/api/chats/{chat}").status_code == 200
    sweep(0)
    assert error(ana.get(f"/api/files/{sent['id']}"), 404, "file_not_found")
    assert error(ana.get(f"/api/documents/{sent['document']}"), 404, "not_found")
    assert not state.library.rights.attached(me(ana))

    def left() -> tuple[list[str], int]:
        return state.library.ingest.jobs.of(me(ana)), len(copies - set((state.library.folder / "files").iterdir()))

    until = time.monotonic() + 10  # a sweep of the server's own may have it at hand
    while left() != ([], 1) and time.monotonic() < until:
        time.sleep(0.01)
    assert left() == ([], 1)


def test_a_file_that_is_never_sent_goes_after_a_day(
    ana: httpx.Client, shelf: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = shelf.app.state.ponder
    kept, old = attach(ana), attach(ana, "bees.txt", BEES)
    chat = new_chat(ana)
    log_of_run(ana, chat, WHEN, files=[kept["id"]])
    monkeypatch.setattr(file_store, "UNSENT_S", 0.0)
    shelf.on_loop(sweep_files(state.store, state.library))
    assert ana.get(f"/api/files/{kept['id']}").status_code == 200
    assert error(ana.get(f"/api/files/{old['id']}"), 404, "file_not_found")
    assert list(state.library.rights.attached(me(ana))) == [kept["id"]]


def test_an_unsent_file_is_taken_away_and_a_sent_one_stays(ana: httpx.Client, shelf: Server) -> None:
    sent = attach(ana)
    assert ana.delete(f"/api/files/{sent['id']}").status_code == 204
    assert error(ana.get(f"/api/files/{sent['id']}"), 404, "file_not_found")
    assert not shelf.app.state.ponder.library.rights.attached(me(ana))
    sent, chat = attach(ana), new_chat(ana)
    ask(ana, chat, WHEN, files=[sent["id"]])
    assert "goes with its chat" in error(ana.delete(f"/api/files/{sent['id']}"), 409, "file_sent")


def test_a_file_that_comes_while_others_are_swept_stays(
    ana: httpx.Client, shelf: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = shelf.app.state.ponder
    kept, all_attached, came = state.store.files.kept, state.library.rights.all_attached, list[Json]()

    async def then_kept() -> set[str]:
        found: set[str] = await kept()
        came.append(await asyncio.to_thread(attach, ana))
        return found

    def then_attached() -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = all_attached()
        came.append(attach(ana))
        return found

    monkeypatch.setattr(state.store.files, "kept", then_kept)
    monkeypatch.setattr(state.library.rights, "all_attached", then_attached)
    shelf.on_loop(sweep_files(state.store, state.library))
    assert [ana.get(f"/api/files/{each['id']}").json()["status"] for each in came] == ["ready"] * 2


def test_a_file_that_is_taken_away_while_it_is_swept_is_gone(
    ana: httpx.Client, shelf: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = shelf.app.state.ponder
    delete, sent = state.library.store.delete_collection, attach(ana)

    def after_the_sweep(user: str, collection: int, *, attached: bool = False) -> list[Path]:
        delete(user, collection, attached=attached)
        files: list[Path] = delete(user, collection, attached=attached)
        return files

    monkeypatch.setattr(state.library.store, "delete_collection", after_the_sweep)
    assert ana.delete(f"/api/files/{sent['id']}").status_code == 204
    assert error(ana.get(f"/api/files/{sent['id']}"), 404, "file_not_found")
    assert not state.library.rights.attached(me(ana))


def test_a_file_is_added_to_the_library_and_outlives_its_chat(ana: httpx.Client, shelf: Server) -> None:
    state = shelf.app.state.ponder
    sent, chat = attach(ana), new_chat(ana)
    ask(ana, chat, WHEN, files=[sent["id"]])
    dams = ana.post("/api/collections", json={"name": "Dams"}).json()["id"]
    reply = ana.post(f"/api/files/{sent['id']}/keep", json={"collection": dams})
    assert reply.status_code == 201, reply.text
    (copy,) = reply.json()["documents"]
    assert (copy["collection"], copy["source"]) == (dams, "dam.txt") and copy["id"] != sent["document"]
    again = ana.post(f"/api/files/{sent['id']}/keep", json={"collection": dams}).json()
    assert again["job"]["files"][0]["status"] == "unchanged"
    assert error(ana.post(f"/api/files/{sent['id']}/keep", json={"collection": 987654}), 404, "not_found")
    ana.delete(f"/api/chats/{chat}")
    shelf.on_loop(state.store.deleted.purge(0))
    shelf.on_loop(sweep_files(state.store, state.library))
    assert "1931" in said(answered(ana, WHEN, "own"))
    assert ana.get(f"/api/documents/{copy['id']}/file").text == DAM


def test_a_file_that_cannot_be_read_says_why_and_is_not_answered_from(ana: httpx.Client) -> None:
    bad = attach(ana, "broken.pdf", "%PDF-1.7 and no more")
    assert bad["status"] == "failed" and "damaged" in bad["error"]
    chat = new_chat(ana)
    reply = ana.post(f"/api/chats/{chat}/runs", json={"content": WHEN, "files": [bad["id"]]})
    assert "damaged" in error(reply, 400, "file_unreadable", "files")
    assert "damaged" in error(ana.post(f"/api/files/{bad['id']}/keep", json={}), 400, "file_unreadable", "files")
    assert read(ana, chat)["messages"] == []


def test_a_file_that_is_still_being_read_is_refused_until_it_is(ana: httpx.Client, embedder: GatedEmbedder) -> None:
    embedder.gate.clear()
    try:
        reply = ana.post("/api/files", files={"file": ("dam.txt", f"{DAM} {HELD}")}, data={"wait": "0"})
        assert reply.status_code == 202 and reply.json()["status"] == "reading"
        id, chat = reply.json()["id"], new_chat(ana)
        refused = ana.post(f"/api/chats/{chat}/runs", json={"content": WHEN, "files": [id]})
        assert "still being read" in error(refused, 409, "file_not_ready", "files")
        assert refused.headers["retry-after"] == "1"
    finally:
        embedder.gate.set()
    while ana.get(f"/api/files/{id}").json()["status"] == "reading":
        pass
    assert "1931" in said(log_of_run(ana, chat, WHEN, files=[id]))


def test_a_file_that_is_taken_away_while_it_is_read_leaves_nothing(
    ana: httpx.Client, shelf: Server, embedder: GatedEmbedder
) -> None:
    library = shelf.app.state.ponder.library
    before = set((library.folder / "files").iterdir())
    embedder.gate.clear()
    embedder.waiting.clear()
    id = ana.post("/api/files", files={"file": ("dam.txt", f"{BEES} {HELD}")}, data={"wait": "0"}).json()["id"]
    assert embedder.waiting.wait(30)
    threading.Timer(0.2, embedder.gate.set).start()
    assert ana.delete(f"/api/files/{id}").status_code == 204
    assert not library.rights.attached(me(ana)) and not library.ingest.jobs.of(me(ana))
    assert set((library.folder / "files").iterdir()) == before


@pytest.mark.parametrize(
    ("files", "data", "status", "code", "param"),
    [
        ([], {"wait": "0"}, 400, "missing_required_parameter", "file"),
        ([("file", ("a.txt", "a")), ("file", ("b.txt", "b"))], {}, 400, "invalid_value", "file"),
        ([("file", ("a.txt", "a"))], {"collection": "1"}, 400, "unknown_parameter", "collection"),
        ([("file", ("a.txt", "a"))], {"wait": ["1", "2"]}, 400, "invalid_value", "wait"),
        ([("file", ("a.txt", "a"))], {"wait": "soon"}, 400, "invalid_value", "wait"),
    ],
)
def test_an_upload_that_is_not_sound_is_refused_and_leaves_nothing(
    ana: httpx.Client, shelf: Server, files: Any, data: Any, status: int, code: str, param: str
) -> None:
    reply = ana.post("/api/files", files=files or {"other": (None, "")}, data=data)
    message = error(reply, status, code if files else "unknown_parameter", param if files else "other")
    assert "accepted" in message
    assert not shelf.app.state.ponder.library.rights.attached(me(ana))


def test_there_are_limits_of_number_and_of_size(
    ana: httpx.Client, shelf: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = new_chat(ana)
    reply = ana.post(f"/api/chats/{chat}/runs", json={"content": "a", "files": [f"file_{n}" for n in range(11)]})
    assert "1 to 10" in error(reply, 400, "invalid_value", "files")
    sent = attach(ana)
    twice = ana.post(f"/api/chats/{chat}/runs", json={"content": "a", "files": [sent["id"]] * 2})
    assert "twice" in error(twice, 400, "invalid_value", "files")
    beside = ana.post(f"/api/chats/{chat}/runs", json={"regenerate": "x", "files": [sent["id"]]})
    assert error(beside, 400, "invalid_value", "files")
    monkeypatch.setattr(file_store, "MAX_UNSENT", 1)
    refused = ana.post("/api/files", files={"file": ("b.txt", BEES)})
    assert "at most that many" in error(refused, 409, "too_many_files", "file")
    monkeypatch.undo()
    jobs = shelf.app.state.ponder.library.ingest.jobs
    monkeypatch.setattr(jobs, "_quota_bytes", len(DAM) + 3)
    refused = ana.post("/api/files", files={"file": ("b.txt", BEES)})
    assert error(refused, 413, "storage_quota_exceeded", "file")
    assert list(shelf.app.state.ponder.library.rights.attached(me(ana))) == [sent["id"]]
    state = shelf.app.state.ponder
    monkeypatch.setattr(state, "settings", state.settings.model_copy(update={"max_upload": ByteSize(100)}))
    assert error(ana.post("/api/files", files={"file": ("x.txt", DAM)}), 413, "body_too_large")


def test_the_files_of_a_chat_are_named_in_its_export_and_not_answered_from_after_an_import(
    ana: httpx.Client, bob: httpx.Client
) -> None:
    sent, chat = attach(ana), new_chat(ana)
    ask(ana, chat, WHEN, files=[sent["id"]])
    exported = ana.get(f"/api/chats/{chat}/export").json()
    assert exported["chats"][0]["messages"][0]["files"] == [{"name": "dam.txt", "bytes": len(DAM)}]
    for form in ("html", "markdown"):
        assert "dam.txt" in ana.get(f"/api/chats/{chat}/export", params={"format": form}).text
    (there,) = imported(bob, exported)
    (shown,) = read(bob, there)["messages"][0]["files"]
    assert (shown["name"], shown["status"], shown["id"], shown["document"]) == ("dam.txt", "missing", None, None)
    assert not of_type(log_of_run(bob, there, WHEN), "citation.sources")


def test_a_model_that_writes_gets_a_small_file_whole(
    ana: httpx.Client, shelf: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf.app.state.ponder.runs, "_way", lambda served: rag.GENERATIVE)
    text = f"{DAM}\n\n{BEES}"
    sent, chat = attach(ana, "both.txt", text), new_chat(ana)
    log = log_of_run(ana, chat, "Please sum this up in a few words.", files=[sent["id"]])
    (source,) = of_type(log, "citation.sources")[0]["sources"]
    assert source["text"] == text and of_type(log, "run.started"), "nothing in it says what a summary is"
    for asked, sources in ((WHEN, 1), ("Please write a poem of spring.", 0)):
        log = log_of_run(ana, chat, asked)
        assert sum(len(each["sources"]) for each in of_type(log, "citation.sources")) == sources
        assert of_type(log, "run.started") and said(log) != rag.REFUSAL
    strict = log_of_run(ana, chat, "zebras giraffes okapis?", collections="own")
    assert said(strict) == rag.REFUSAL, "what is chosen by hand is kept to"
    large = attach(ana, "large.txt", "\n\n".join(f"Paragraph {n} tells of thing {n * n}." for n in range(2000)))
    pieces = log_of_run(ana, new_chat(ana), "What does paragraph 77 tell of?", files=[large["id"]])
    sources = of_type(pieces, "citation.sources")[0]["sources"]
    assert sources and all(len(each["text"]) < 10_000 for each in sources)
