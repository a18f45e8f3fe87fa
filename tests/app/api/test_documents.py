"""Documents over HTTP: what comes in, what becomes of it, and what is refused without leaving a trace."""

from __future__ import annotations

import errno
import socket
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pydantic import ByteSize

from app.api.multipart import plain_name, plain_path
from retrieval import Given, Library
from tests.app.conftest import Server, serving
from tests.app.gate import HELD, GatedEmbedder
from tests.app.library import BEES, DAM, add, error, search, upload
from tests.retrieval.made import pdf

pytestmark = pytest.mark.slow


def files(shelf: Server) -> set[Path]:
    return set((shelf.data / "documents" / "files").iterdir())


@pytest.fixture
def at_most(shelf: Server) -> Iterator[int]:
    """Uploads of one mebibyte."""
    state = shelf.app.state.ponder
    before = state.settings
    state.settings = before.model_copy(update={"max_upload": ByteSize(1 << 20)})
    yield 1 << 20
    state.settings = before


@pytest.fixture
def gate(embedder: GatedEmbedder) -> Iterator[GatedEmbedder]:
    """Closed while the test lasts, or until it opens it."""
    embedder.gate.clear()
    yield embedder
    embedder.gate.set()


def test_an_upload_becomes_a_document(ana: httpx.Client) -> None:
    reply = upload(ana, ("dam.md", f"# The dam\n\n{DAM}"), metadata={"year": 1931, "kept": True})
    assert reply.status_code == 201
    (document,) = reply.json()["documents"]
    assert (document["source"], document["title"], document["media_type"]) == ("dam.md", "The dam", "text/markdown")
    assert document["metadata"] == {"year": 1931, "kept": True} and document["chunks"] == 1
    assert ana.get(f"/api/documents/{document['id']}").json() == document
    assert ana.get("/api/documents").json() == {"documents": [document], "next": None}
    job = reply.json()["job"]
    assert job["status"] == "done" and job["counts"]["done"] == 1 and job["stalled"] is None
    assert job["chunks"] == {"embedded": 1, "total": 1}


def test_a_file_of_a_folder_that_became_a_link_is_not_sent(ana: httpx.Client, shelf: Server, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("swordfish")
    file = tmp_path / "papers" / "dam.txt"
    file.parent.mkdir()
    file.write_text(DAM)
    library, user = shelf.app.state.ponder.library, ana.headers["X-User"]
    job = library.ingest.submit(user, library.collection(user).id, [Given("dam.txt", file, root=file.parent)])
    number = library.ingest.wait(job.id, 30).files[0].document
    assert ana.get(f"/api/documents/{number}/file").text == DAM
    file.unlink()
    file.symlink_to(tmp_path / "secret.txt")
    error(ana.get(f"/api/documents/{number}/file"), 404, "file_gone")


def _listed(http: httpx.Client, **params: Any) -> list[list[str]]:
    """The sources of each page of the list."""
    pages, before = list[list[str]](), dict[str, str]()
    while True:
        page = http.get("/api/documents", params={**params, **before}).json()
        pages.append([document["source"] for document in page["documents"]])
        if page["next"] is None:
            return pages
        before = {"before": page["next"]}


def test_the_list_comes_in_pages(ana: httpx.Client) -> None:
    upload(ana, *((f"{n}.txt", f"Text {n}.") for n in range(5)))
    assert _listed(ana, limit=2) == [["4.txt", "3.txt"], ["2.txt", "1.txt"], ["0.txt"]]
    assert _listed(ana, limit=5) == _listed(ana) == [["4.txt", "3.txt", "2.txt", "1.txt", "0.txt"]]


def test_a_page_goes_on_where_the_last_one_ended_whatever_comes_and_goes(ana: httpx.Client) -> None:
    upload(ana, *((f"{n}.txt", f"Text {n}.") for n in range(4)))
    first = ana.get("/api/documents?limit=2").json()
    ana.delete(f"/api/documents/{first['documents'][1]['id']}")
    add(ana, "new.txt", "A newer text.")
    second = ana.get("/api/documents", params={"limit": 2, "before": first["next"]}).json()
    assert [document["source"] for document in second["documents"]] == ["1.txt", "0.txt"]


@pytest.mark.parametrize(("name", "value"), [("limit", "0"), ("limit", "501"), ("before", "x"), ("before", "1_2")])
def test_a_page_that_is_none_is_refused(ana: httpx.Client, name: str, value: str) -> None:
    assert "accepted: " in error(ana.get("/api/documents", params={name: value}), 400, "invalid_value", name)


def test_a_document_takes_another_name_unless_it_is_taken(ana: httpx.Client) -> None:
    first, second = add(ana, "a.txt", DAM), add(ana, "b.txt", BEES)
    address = f"/api/documents/{first['id']}"
    renamed = ana.patch(address, json={"source": "x/../c.txt"}).json()
    assert (renamed["source"], renamed["title"], renamed["id"]) == ("x/c.txt", "x/c.txt", first["id"])
    assert search(ana, "Hollow Creek")[0]["document"]["source"] == "x/c.txt"
    refused = ana.patch(address, json={"source": "b.txt"})
    assert f"Document {second['id']} of" in error(refused, 409, "name_taken", "source")
    error(ana.patch(address, json={"source": "/.."}), 400, "invalid_value", "source")


def test_a_folders_documents_are_its_own(ana: httpx.Client) -> None:
    number = ana.post("/api/collections", json={"name": "Work"}).json()["id"]
    address = f"/api/collections/{number}/folders"
    folder = ana.post(address, json={"path": "/home/ana/notes"}).json()
    assert folder == ana.post(address, json={"path": "/home/ana/notes"}).json() | {"documents": 0}
    assert ana.post(address, json={"path": "/mnt/notes"}).json()["name"] == "notes (2)"
    document = add(ana, "a.txt", DAM, source="notes/a.txt", collection=number, folder=folder["id"])
    add(ana, "b.txt", BEES, collection=number)
    assert document["folder"] == folder["id"]
    assert ana.get(f"/api/documents?folder={folder['id']}").json()["documents"] == [document]
    assert [each["documents"] for each in ana.get(address).json()["folders"]] == [1, 0]
    assert ana.delete(f"{address}/{folder['id']}").status_code == 204
    assert _listed(ana) == [["b.txt"]]
    error(ana.get(f"/api/documents?folder={folder['id']}"), 404, "not_found")
    error(upload(ana, ("c.txt", DAM), collection=number, folder=folder["id"]), 404, "not_found")


def test_several_files_come_in_one_request(ana: httpx.Client) -> None:
    reply = upload(ana, ("dam.txt", DAM), ("bees.txt", BEES))
    assert [document["source"] for document in reply.json()["documents"]] == ["dam.txt", "bees.txt"]


def test_sources_may_have_folders(ana: httpx.Client) -> None:
    reply = upload(ana, ("a.txt", DAM), ("a.txt", BEES), source=["x/a.txt", "../y//a.txt"])
    assert [document["source"] for document in reply.json()["documents"]] == ["x/a.txt", "y/a.txt"]


def test_a_collection_takes_the_document(ana: httpx.Client) -> None:
    number = ana.post("/api/collections", json={"name": "Work"}).json()["id"]
    document = add(ana, "dam.txt", DAM, collection=number)
    add(ana, "bees.txt", BEES)
    assert ana.get(f"/api/documents?collection={number}").json()["documents"] == [document]


def test_text_is_quoted_by_characters(ana: httpx.Client) -> None:
    document = add(ana, "dam.txt", f"Ünder {DAM}")
    reply = ana.get(f"/api/documents/{document['id']}/text?start=6&end=13").json()
    assert reply["text"] == "The dam" and (reply["start"], reply["end"]) == (6, 13)
    whole = ana.get(f"/api/documents/{document['id']}/text").json()
    assert whole["text"] == f"Ünder {DAM}" and whole["end"] == whole["characters"] == document["characters"]
    assert ana.get(f"/api/documents/{document['id']}/text?start=60&end=9999").json()["text"] == f"Ünder {DAM}"[60:]


@pytest.mark.parametrize(
    ("query", "param"),
    [("start=-1", "start"), ("start=9999", "start"), ("start=5&end=4", "end"), ("end=x", "end"), ("page=1", "page"),
     ("start=1&start=2", "start"), ("start=" + "9" * 30, "start")],
)  # fmt: skip
def test_a_bad_span_is_refused_by_name(ana: httpx.Client, query: str, param: str) -> None:
    document = add(ana, "dam.txt", DAM)
    reply = ana.get(f"/api/documents/{document['id']}/text?{query}")
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_a_span_of_a_pdf_has_boxes_on_its_page(ana: httpx.Client) -> None:
    document = add(ana, "dam.pdf", pdf([["Nothing to see here."], [DAM]]))
    text = ana.get(f"/api/documents/{document['id']}/text").json()["text"]
    start = text.index("1931")
    reply = ana.get(f"/api/documents/{document['id']}/boxes?start={start}&end={start + 4}").json()
    (box,) = reply["boxes"]
    assert box["page"] == 2 and box["width"] > box["right"] > box["left"] > 0 and box["height"] > box["top"]


def test_only_pdfs_have_boxes(ana: httpx.Client) -> None:
    document = add(ana, "dam.txt", DAM)
    error(ana.get(f"/api/documents/{document['id']}/boxes?start=0&end=4"), 404, "no_pages")


def test_a_file_is_given_back_whole_and_never_shown(ana: httpx.Client) -> None:
    page = "<html><body><script>alert(1)</script><p>Bees dance for flowers.</p></body></html>"
    document = add(ana, "süß.html", page)
    reply = ana.get(f"/api/documents/{document['id']}/file")
    assert reply.text == page and reply.headers["content-type"] == "application/octet-stream"
    assert reply.headers["content-disposition"] == "attachment; filename*=utf-8''s%C3%BC%C3%9F.html"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in reply.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("../../etc/passwd", "passwd"), ("..\\..\\boot.ini", "boot.ini"), ("/abs/x.txt", "x.txt"), ("C:\\y.md", "y.md"),
     ("a\u202etxt.exe", "atxt.exe"), ("na\u0000me.txt", "name.txt"), ("  spaced \u00a0 out.txt ", "spaced   out.txt"),
     ("..", ""), ("a/..", ""), ("\n", ""), (".env", ".env"), ("x" * 400 + ".pdf", "x" * 251 + ".pdf")],
)  # fmt: skip
def test_of_a_name_its_last_visible_part_is_kept(sent: str, kept: str) -> None:
    assert plain_name(sent) == kept


def test_a_path_has_no_steps_up() -> None:
    assert plain_path("/../a/./b\\..\\c.txt") == "a/b/c.txt"


def test_a_name_with_folders_leads_nowhere(ana: httpx.Client, shelf: Server) -> None:
    document = add(ana, "../../../escaped.txt", DAM)
    assert document["source"] == "escaped.txt"
    assert not list(shelf.data.parent.rglob("escaped.txt"))


@pytest.mark.parametrize("name", ["..", "../", "\u202e"])
def test_a_file_without_a_name_is_refused(ana: httpx.Client, shelf: Server, name: str) -> None:
    before = files(shelf)
    assert "no name" in error(upload(ana, (name, DAM)), 400, "invalid_value", "file")
    assert files(shelf) == before


def test_the_same_bytes_again_are_unchanged_and_leave_one_copy(ana: httpx.Client, shelf: Server) -> None:
    first = add(ana, "dam.txt", DAM)
    before = files(shelf)
    reply = upload(ana, ("dam.txt", DAM))
    assert reply.json()["job"]["files"][0]["status"] == "unchanged"
    assert reply.json()["documents"] == [first] and files(shelf) == before


def test_another_content_replaces_the_document(ana: httpx.Client, shelf: Server) -> None:
    first = add(ana, "it.txt", DAM)
    before = len(files(shelf))
    second = add(ana, "it.txt", BEES)
    assert second["id"] == first["id"] and second["version"] != first["version"]
    assert len(files(shelf)) == before and len(ana.get("/api/documents").json()["documents"]) == 1
    assert [hit["text"] for hit in search(ana, "dam granite bees")] == [BEES]


def test_a_deleted_document_is_gone_from_everywhere(ana: httpx.Client, shelf: Server) -> None:
    before = files(shelf)
    document = add(ana, "dam.txt", DAM)
    assert search(ana, "granite dam")
    address = f"/api/documents/{document['id']}"
    assert ana.delete(address).status_code == 204
    assert search(ana, "granite dam") == [] and files(shelf) == before
    for path in ("", "/text", "/boxes", "/file"):
        error(ana.get(address + path), 404, "not_found")
    error(ana.delete(address), 404, "not_found")


def test_what_is_somebody_elses_is_not_there(ana: httpx.Client, bob: httpx.Client) -> None:
    document = add(ana, "dam.txt", DAM)
    address = f"/api/documents/{document['id']}"
    absent = bob.get("/api/documents/999999999").json()["error"]["message"]
    for path in ("", "/text", "/boxes", "/file"):
        message = error(bob.get(address + path), 404, "not_found")
        assert message.replace(str(document["id"]), "999999999") == absent
    error(bob.delete(address), 404, "not_found")
    error(upload(bob, ("x.txt", BEES), collection=document["collection"]), 404, "not_found")
    assert bob.get("/api/documents").json()["documents"] == []
    assert ana.get(address).status_code == 200


@pytest.mark.parametrize("number", ["x", "-1", "1.5", "9" * 40, "١"])
def test_what_is_no_number_is_not_there(ana: httpx.Client, number: str) -> None:
    error(ana.get(f"/api/documents/{number}"), 404, "not_found")


def test_a_file_that_cannot_be_read_says_why_and_leaves_nothing(ana: httpx.Client, shelf: Server) -> None:
    before = files(shelf)
    assert "program" in error(upload(ana, ("a.txt", b"\x7fELF\0\0")), 400, "unreadable_document", "file")
    assert "empty" in error(upload(ana, ("b.txt", b"")), 400, "unreadable_document", "file")
    assert files(shelf) == before and ana.get("/api/documents").json()["documents"] == []


def test_one_bad_file_does_not_harm_the_rest(ana: httpx.Client) -> None:
    reply = upload(ana, ("bad.pdf", b"%PDF-1.7 cut off"), ("dam.txt", DAM))
    assert reply.status_code == 201
    assert [document["source"] for document in reply.json()["documents"]] == ["dam.txt"]
    bad, good = reply.json()["job"]["files"]
    assert (bad["status"], good["status"]) == ("failed", "done") and "damaged" in bad["error"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"colection": "1"}, "colection", "unknown_parameter"), ({"collection": "mine"}, "collection", "invalid_value"),
        ({"metadata": "[1]"}, "metadata", "invalid_value"), ({"metadata": "{"}, "metadata", "invalid_value"),
        ({"metadata": '{"a": {}}'}, "metadata", "invalid_value"),
        ({"metadata": '{"a": null}'}, "metadata", "invalid_value"),
        ({"metadata": '{"a": 1e999}'}, "metadata", "invalid_value"),
        ({"metadata": '{"a": 99999999999999999999}'}, "metadata", "invalid_value"),
        ({"metadata": '"' + "x" * 70_000 + '"'}, "metadata", "invalid_value"),
        ({"wait": "61"}, "wait", "invalid_value"), ({"wait": "nan"}, "wait", "invalid_value"),
        ({"wait": ["1", "2"]}, "wait", "invalid_value"), ({"source": ["a", "b"]}, "source", "invalid_value"),
        ({"source": ".."}, "source", "invalid_value"), ({"file": "text"}, "file", "invalid_value"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_bad_field_is_refused_by_name_and_leaves_nothing(
    ana: httpx.Client, shelf: Server, fields: dict[str, Any], param: str, code: str
) -> None:
    before = files(shelf)
    error(upload(ana, ("dam.txt", DAM), **fields), 400, code, param)
    assert files(shelf) == before and ana.get("/api/jobs").json() == {"jobs": []}


def test_empty_fields_are_absent_ones(ana: httpx.Client) -> None:
    assert upload(ana, ("dam.txt", DAM), collection="", metadata="", wait="").status_code == 201


@pytest.mark.parametrize(
    ("kind", "body"),
    [("application/json", b"{}"), ("", b""), ("multipart/form-data", b"x"), ("multipart/form-data; boundary=b", b"x"),
     ("multipart/form-data; boundary=" + "b" * 300, b"--b"), ("multipart/form-data; boundary=b", b""),
     ("multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n"),
     ("multipart/form-data; boundary=b", b"--b\r\nX: " + b"y" * 100_000),
     ("multipart/form-data; boundary=b",
      b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nhalf')],
    ids=range(9),
)  # fmt: skip
def test_what_is_no_whole_form_is_refused(ana: httpx.Client, shelf: Server, kind: str, body: bytes) -> None:
    before = files(shelf)
    reply = ana.post("/api/documents", content=body, headers={"Content-Type": kind})
    error(reply, 400, "invalid_form")
    assert files(shelf) == before


def test_a_form_without_files_is_refused(ana: httpx.Client) -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="wait"\r\n\r\n1\r\n--b--\r\n'
    reply = ana.post("/api/documents", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"})
    error(reply, 400, "missing_required_parameter", "file")


def test_an_upload_without_end_is_stopped_at_the_limit(ana: httpx.Client, shelf: Server, at_most: int) -> None:
    before, process = files(shelf), psutil.Process()
    memory, largest, grown = process.memory_info().rss, 0, 0

    def body() -> Iterator[bytes]:
        nonlocal largest, grown
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="big.txt"\r\n\r\n'
        for _ in range(100):
            yield b"x" * (1 << 20)
            largest = max(largest, sum(file.stat().st_size for file in files(shelf) - before))
            grown = max(grown, process.memory_info().rss - memory)

    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    message = error(ana.post("/api/documents", content=body(), headers=headers), 413, "body_too_large")
    assert "1 MiB" in message
    assert largest <= at_most and grown < 50 << 20 and files(shelf) == before


def test_an_upload_that_is_announced_too_large_is_told_before_it_is_sent(shelf: Server, at_most: int) -> None:
    host, port = shelf.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(
            b"POST /api/documents HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500000000\r\n"
            b"Content-Type: multipart/form-data; boundary=b\r\nExpect: 100-continue\r\n\r\n"
        )
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    assert reply.startswith(b"HTTP/1.1 413") and b"500000000" in reply


@pytest.mark.parametrize(
    ("place", "trouble", "words"),
    [
        ("app.api.multipart.Form.feed", OSError(errno.ENOSPC, "No space left on device"), "disk is full"),
        ("retrieval.ingest.Ingest.submit", sqlite3.OperationalError("database or disk is full"), "disk is full"),
        (
            "retrieval.ingest.Ingest.submit",
            sqlite3.OperationalError("attempt to write a readonly database"),
            "writable",
        ),
    ],
    ids=["file", "full", "readonly"],
)
def test_a_disk_that_takes_nothing_is_told(
    ana: httpx.Client, shelf: Server, monkeypatch: pytest.MonkeyPatch, place: str, trouble: Exception, words: str
) -> None:
    def fail(*_: object) -> None:
        raise trouble

    before = files(shelf)
    monkeypatch.setattr(place, fail)
    assert words in error(upload(ana, ("dam.txt", DAM)), 507, "disk_unusable")
    assert files(shelf) == before


def test_a_file_that_was_taken_away_is_told(ana: httpx.Client, shelf: Server) -> None:
    before = files(shelf)
    document = add(ana, "dam.txt", DAM)
    (copy,) = files(shelf) - before
    copy.unlink()
    assert "dam.txt" in error(ana.get(f"/api/documents/{document['id']}/file"), 404, "file_gone")
    assert ana.delete(f"/api/documents/{document['id']}").status_code == 204


def test_a_client_that_leaves_leaves_nothing(shelf: Server, ana: httpx.Client) -> None:
    before = files(shelf)
    host, port = shelf.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(
            b"POST /api/documents HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000000\r\n"
            b'Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\nContent-Disposition: form-data; name="file"; '
            b'filename="a.txt"\r\n\r\n' + b"x" * 3_000_000
        )
        shelf.until(lambda _: files(shelf) != before)
    shelf.until(lambda _: files(shelf) == before)


def test_an_answer_does_not_wait_for_a_long_job(ana: httpx.Client, gate: GatedEmbedder) -> None:
    reply = upload(ana, ("slow.txt", f"{HELD} {DAM}"), wait=0)
    assert reply.status_code == 202 and reply.json()["documents"] == []
    assert gate.waiting.wait(20)
    job = reply.json()["job"]["id"]
    shown = ana.get(f"/api/jobs/{job}").json()
    assert shown["status"] == "running" and shown["counts"]["embedding"] == 1
    assert shown["chunks"] == {"embedded": 0, "total": 1} and shown["files"][0]["error"] is None
    (listed,) = ana.get("/api/jobs").json()["jobs"]
    assert listed["id"] == job and "files" not in listed
    gate.gate.set()
    upload(ana, ("after.txt", BEES), wait=60)  # jobs are worked off in order
    assert ana.get(f"/api/jobs/{job}").json()["status"] == "done"


def test_a_stop_of_the_server_ends_the_waiting_and_not_the_job(
    ana: httpx.Client, shelf: Server, gate: GatedEmbedder
) -> None:
    state = shelf.app.state.ponder
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(upload, ana, ("stopped.txt", f"{HELD} {BEES}"), wait=60)
        assert gate.waiting.wait(20)
        shelf.loop.call_soon_threadsafe(state.ending.set)
        reply = waiting.result(20)
    state.ending.clear()
    assert reply.status_code == 202 and reply.json()["job"]["status"] == "running"


def test_a_cancelled_job_keeps_no_file(ana: httpx.Client, shelf: Server, gate: GatedEmbedder) -> None:
    before = files(shelf)
    upload(ana, ("first.txt", f"{HELD} {DAM}"), wait=0)
    assert gate.waiting.wait(20)
    job = upload(ana, ("second.txt", BEES), wait=0).json()["job"]["id"]
    assert ana.post(f"/api/jobs/{job}/cancel").status_code == 202
    shown = ana.get(f"/api/jobs/{job}").json()
    assert shown["status"] == "cancelled" and shown["files"][0]["status"] == "cancelled"
    assert len(files(shelf)) == len(before) + 1
    assert ana.post(f"/api/jobs/{job}/cancel").status_code == 202  # again, and after the end


def test_a_job_is_its_users_alone(ana: httpx.Client, bob: httpx.Client) -> None:
    job = upload(ana, ("dam.txt", DAM)).json()["job"]["id"]
    error(bob.get(f"/api/jobs/{job}"), 404, "not_found")
    error(bob.post(f"/api/jobs/{job}/cancel"), 404, "not_found")
    assert bob.get("/api/jobs").json() == {"jobs": []}


def test_a_start_goes_on_with_what_an_earlier_server_left(model: Path, tmp_path: Path, embedder: GatedEmbedder) -> None:
    with Library.open(tmp_path / "documents", embedder) as library:
        copy = library.new_file()
        copy.write_text(DAM, "utf-8")
        given = [Given("dam.txt", copy, owned=True)]
        job = library.ingest.jobs.create("local", library.collection("local").id, given)  # and then it died
    with serving(model, tmp_path, embedder) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        upload(http, ("after.txt", BEES), wait=60)
        assert http.get(f"/api/jobs/{job.id}").json()["status"] == "done"
        assert [hit["text"] for hit in search(http, "granite dam", limit=1)] == [DAM]


def test_who_would_keep_too_much_is_told_the_limit_and_the_use(
    shelf: Server, ana: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(ana, "small.txt", "x" * 60)
    monkeypatch.setattr(shelf.app.state.ponder.library.ingest.jobs, "_quota_bytes", 100)
    before = files(shelf)
    reply = upload(ana, ("large.txt", b"y" * 41))
    message = error(reply, 413, "storage_quota_exceeded", "file")
    assert "41 bytes" in message and "of the 100 " in message and "60 are in use" in message
    assert files(shelf) == before
