"""`ponder index`, `search` and `eval`, as a shell sees them, on an embedder without weights."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from app import document_library
from app.cli import evaluation
from app.cli.documents import document_source, index_command
from app.cli.documents.document_source import LocalDocuments, Picks
from app.cli.main import cli
from retrieval import Library
from tests.app.conftest import Server, serving
from tests.app.gate import HELD, GatedEmbedder
from tests.app.library import BEES, DAM, search

pytestmark = pytest.mark.slow

Ponder = Callable[..., Result]


@pytest.fixture
def ponder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedder: GatedEmbedder) -> Ponder:
    """Run a command on the data directory `data`, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for module in (document_library, evaluation):
        monkeypatch.setattr(module, "SentenceEmbedder", lambda model: embedder)
    without: dict[str, str | None] = {name: None for name in os.environ if name.startswith("PONDER_")}

    def run(*arguments: str) -> Result:
        env = {**without, "PONDER_DATA_DIR": str(tmp_path / "data"), "NO_COLOR": "1", "COLUMNS": "200"}
        return CliRunner().invoke(cli, list(arguments), env=env)

    return run


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    """A folder with what folders have."""
    folder = tmp_path / "papers"
    contents = {
        "dam.md": f"# The dam\n\n{DAM}", "b/bees.txt": BEES, "b/README.md": "# About\n\nThese are notes on bees.",
        ".git/config": "hidden", ".hidden.txt": "hidden", "node_modules/x.js": "let x = 1", "b/empty.txt": "",
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    (folder / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return folder


def test_a_folder_is_indexed_and_found(ponder: Ponder, papers: Path) -> None:
    shown = ponder("index", "papers")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == (
        "3 documents indexed (3 new, 3 chunks), 1 skipped (empty), 1 skipped (of a kind that is not read).\n"
    )
    found = json.loads(ponder("search", "when was the dam finished", "--json").stdout)
    assert DAM in found["passages"][0]["text"] and found["passages"][0]["document"]["source"] == "papers/dam.md"


def test_what_is_hidden_or_made_by_programs_is_not_indexed(ponder: Ponder, papers: Path, tmp_path: Path) -> None:
    ponder("index", "papers")
    with Library.open(tmp_path / "data" / "documents", GatedEmbedder()) as opened:
        sources = {document.source for document in opened.store.documents("local")}
    assert sources == {"papers/dam.md", "papers/b/bees.txt", "papers/b/README.md"}


def test_what_did_not_change_is_not_indexed_again(ponder: Ponder, papers: Path) -> None:
    ponder("index", "papers")
    (papers / "dam.md").write_text("# The dam\n\nIt was blown up.")
    assert ponder("index", "papers").stdout.startswith("1 document indexed (1 changed, 1 chunk), 2 unchanged")


def test_files_that_fail_are_told_at_the_end_and_by_the_exit_code(ponder: Ponder, papers: Path) -> None:
    (papers / "bad.pdf").write_text("This is no PDF.")
    shown = ponder("index", "papers")
    assert shown.exit_code == 1 and "failed: papers/bad.pdf: The name ends in .pdf" in shown.stderr
    assert shown.stdout.startswith("3 documents indexed (3 new, 3 chunks), 1 failed")


def test_a_file_that_is_named_is_tried_whatever_it_is(ponder: Ponder, papers: Path) -> None:
    shown = ponder("index", "papers/photo.png", "papers/.hidden.txt")
    assert shown.exit_code == 1 and "failed: photo.png: The content is a PNG picture" in shown.stderr
    assert shown.stdout == "1 document indexed (1 new, 1 chunk), 1 failed.\n"


def test_a_path_that_is_not_there_is_told(ponder: Ponder) -> None:
    shown = ponder("index", "absent")
    assert shown.exit_code == 1 and "There is no file or folder absent" in shown.stderr


def test_two_files_with_one_name_are_not_mixed_up(ponder: Ponder, papers: Path) -> None:
    (papers / "README.md").write_text("Another.")
    shown = ponder("index", "papers/README.md", "papers/b/README.md")
    assert shown.exit_code == 1 and "would both be called 'README.md'" in shown.stderr
    assert ponder("index", "papers", "papers").exit_code == 0  # one and the same is no second one


@pytest.fixture(params=["here", "through a server"])
def anywhere(request: pytest.FixtureRequest) -> None:
    """Once without a server, once through one that has the documents open."""
    if request.param == "through a server":
        request.getfixturevalue("served")


def _listed(ponder: Ponder, *options: str) -> dict[str, int]:
    """Documents' ids by source."""
    listed = json.loads(ponder("documents", "list", "--json", *options).stdout)
    return {document["source"]: document["id"] for document in listed["documents"]}


def test_what_is_gone_is_named_and_removed_when_asked(ponder: Ponder, papers: Path, anywhere: None) -> None:
    ponder("index", "papers")
    (papers / "dam.md").unlink()
    shown = ponder("index", "papers")
    assert shown.exit_code == 0 and "gone: papers/dam.md\n" in shown.stderr
    assert shown.stdout.startswith("0 documents indexed (0 chunks), 2 unchanged, 1 gone, ")
    assert shown.stdout.endswith("1 file is gone; run with --prune to remove it from the index.\n")
    assert "papers/dam.md" in _listed(ponder)
    shown = ponder("index", "papers", "--prune")
    assert "removed: papers/dam.md\n" in shown.stderr and "2 unchanged, 1 removed" in shown.stdout
    assert _listed(ponder).keys() == {"papers/b/bees.txt", "papers/b/README.md"}
    assert "granite" not in ponder("search", "granite dam").stdout


def test_a_renamed_file_is_the_same_document(
    ponder: Ponder, papers: Path, anywhere: None, embedder: GatedEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ponder("index", "papers")
    before = _listed(ponder)
    (papers / "b" / "bees.txt").rename(papers / "wasps.txt")
    monkeypatch.setattr(type(embedder), "embed", None)
    shown = ponder("index", "papers", "--prune")
    assert shown.exit_code == 0 and "renamed: papers/b/bees.txt → papers/wasps.txt\n" in shown.stderr
    assert shown.stdout.startswith("0 documents indexed (0 chunks), 2 unchanged, 1 renamed, ")
    assert _listed(ponder)["papers/wasps.txt"] == before["papers/b/bees.txt"]


def test_another_kind_by_name_is_read_anew(ponder: Ponder, papers: Path) -> None:
    ponder("index", "papers")
    (papers / "b" / "bees.txt").rename(papers / "b" / "bees.md")
    shown = ponder("index", "papers")
    assert shown.stdout.startswith("1 document indexed (1 new, 1 chunk), 2 unchanged, 1 gone")


def test_what_cannot_be_looked_at_is_not_gone(
    ponder: Ponder, papers: Path, anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ponder("index", "papers")
    really_scan = os.scandir

    def scandir(path: str | Path) -> object:
        if str(path) == str(papers / "b"):
            raise PermissionError(13, "Permission denied")
        return really_scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    (papers / "dam.md").unlink()
    shown = ponder("index", "papers", "--prune")
    assert shown.exit_code == 1 and "Permission denied" in shown.stderr and "1 removed" in shown.stdout
    assert _listed(ponder).keys() == {"papers/b/bees.txt", "papers/b/README.md"}


def test_two_folders_of_one_name_are_kept_apart(ponder: Ponder, papers: Path, tmp_path: Path, anywhere: None) -> None:
    other = tmp_path / "other" / "papers"
    other.mkdir(parents=True)
    (other / "dam.md").write_text("# Another\n\nThis dam is of clay.")
    ponder("index", "papers")
    shown = ponder("index", "other/papers")
    assert f"note: {other} is kept as 'papers (2)', as the collection has another 'papers'." in shown.stderr
    assert shown.stdout == "1 document indexed (1 new, 1 chunk).\n"
    assert {"papers/dam.md", "papers (2)/dam.md"} < _listed(ponder).keys()
    assert ponder("index", "papers", "other/papers").stdout.startswith("0 documents indexed (0 chunks), 4 unchanged, ")


def test_names_that_an_upload_changes_are_not_gone(ponder: Ponder, papers: Path, anywhere: None) -> None:
    (papers / "b" / "evil\x1b[2J.txt").write_text("granite")
    (papers / " c").mkdir()
    (papers / " c" / "x .txt").write_text("more granite")
    ponder("index", "papers")
    assert ponder("index", "papers").stdout.startswith("0 documents indexed (0 chunks), 5 unchanged, 1 skipped")


def test_prune_wants_a_folder(ponder: Ponder, papers: Path) -> None:
    shown = ponder("index", "papers/dam.md", "--prune")
    assert shown.exit_code == 1 and "--prune is for folders" in shown.stderr


def test_a_folder_and_a_file_of_it_may_be_named_together(ponder: Ponder, papers: Path) -> None:
    assert ponder("index", "papers", "papers/dam.md").exit_code == 0
    assert _listed(ponder).keys() == {"papers/dam.md", "papers/b/bees.txt", "papers/b/README.md", "dam.md"}


def test_documents_are_listed(ponder: Ponder, papers: Path, anywhere: None) -> None:
    assert ponder("documents", "list").stdout == "0 documents.\n"
    ponder("index", "papers")
    ponder("index", "papers/dam.md", "--collection", "Work")
    lines = ponder("documents", "list").stdout.splitlines()
    assert lines[-1] == "4 documents." and lines[0].split() == ["id", "name", "collection", "kind", "bytes", "chunks"]
    assert lines[1].split()[:4] == [str(_listed(ponder)["dam.md"]), "dam.md", "Work", "markdown"]
    assert _listed(ponder, "--collection", "Work").keys() == {"dam.md"}


def test_documents_are_deleted_by_name_by_id_and_by_folder(ponder: Ponder, papers: Path, anywhere: None) -> None:
    ponder("index", "papers", "papers/dam.md")
    shown = ponder("documents", "delete", "papers/dam.md", str(_listed(ponder)["dam.md"]))
    assert (shown.exit_code, shown.stdout) == (0, "2 documents deleted.\n")
    assert (papers / "dam.md").exists() and "granite" not in ponder("search", "granite dam").stdout
    shown = ponder("documents", "delete", "--folder", "papers")
    assert (shown.exit_code, shown.stdout) == (0, f"2 documents deleted, all of {papers}.\n")
    assert _listed(ponder) == {}


def test_a_document_that_is_not_there_is_told_and_nothing_deleted(ponder: Ponder, papers: Path) -> None:
    ponder("index", "papers")
    ponder("index", "papers", "--collection", "Work")
    before = ponder("documents", "list").stdout
    for arguments, message in (
        (["papers/dam.md", "dan.md", "--collection", "Work"], "There is no document 'dan.md'. "),
        (["papers/dan.md"], "There is no document 'papers/dan.md'. Did you mean 'papers/dam.md'"),
        (["papers/dam.md"], "2 documents are called 'papers/dam.md'; accepted: their ids "),
        (["--folder", "."], "was never indexed; accepted: "),
        (["--folder", "papers"], "is in 2 collections; say which with --collection."),
        ([], "Name documents, or a folder with --folder"),
        (["x", "--collection", "Play"], "There is no collection 'Play'; accepted: "),
    ):
        shown = ponder("documents", "delete", *arguments)
        assert shown.exit_code == 1 and message in shown.stderr, shown.stderr
    assert ponder("documents", "list").stdout == before


def _secret(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    secret = tmp_path / "outside" / "secret.txt"
    secret.write_text("The password is swordfish.")
    return secret


def test_no_link_is_followed_out_of_the_folder(ponder: Ponder, papers: Path, tmp_path: Path) -> None:
    secret = _secret(tmp_path)
    (papers / "link.txt").symlink_to(secret)
    (papers / "b" / "all").symlink_to(secret.parent)
    shown = ponder("index", "papers")
    assert shown.exit_code == 0
    for name, target in (("papers/link.txt", secret), ("papers/b/all", secret.parent)):
        assert f"skipped: {name}: it is a link that leads out of the folder, to {target}." in shown.stderr
    assert "3 documents indexed" in shown.stdout and "2 skipped (a link out of the folder)" in shown.stdout
    assert "swordfish" not in ponder("search", "password swordfish").stdout


def test_a_link_within_the_folder_is_no_second_document(ponder: Ponder, papers: Path) -> None:
    (papers / "again.md").symlink_to("dam.md")
    (papers / "b" / "round").symlink_to("..")
    (papers / "itself").symlink_to("itself")
    (papers / "dangling").symlink_to("nothing")
    shown = ponder("index", "papers")
    assert shown.exit_code == 0 and shown.stdout.startswith("3 documents indexed (3 new, 3 chunks)")
    assert "2 skipped (a link that leads nowhere), 2 skipped (a link within the folder)" in shown.stdout


@pytest.mark.parametrize("remote", [False, True])
def test_a_file_that_becomes_a_link_while_it_waits_is_not_read(
    ponder: Ponder, papers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
    remote: bool,
) -> None:  # fmt: skip
    if remote:
        request.getfixturevalue("served")
    secret = _secret(tmp_path)

    def pick(paths: Sequence[Path]) -> Picks:
        picks = document_source.pick(paths)
        (papers / "dam.md").unlink()
        (papers / "dam.md").symlink_to(secret)
        (papers / "b").rename(papers / "c")
        (papers / "b").symlink_to(papers / "c")
        return picks

    monkeypatch.setattr(index_command, "pick", pick)
    shown = ponder("index", "papers")
    assert shown.exit_code == 1 and "failed: papers/dam.md: It" in shown.stderr
    assert "a link" in shown.stderr and "0 documents indexed (0 chunks), 3 failed" in shown.stdout
    assert "swordfish" not in ponder("search", "password swordfish").stdout


def test_a_collection_is_indexed_and_searched_by_name(ponder: Ponder, papers: Path) -> None:
    ponder("index", "papers/dam.md", "--collection", "Work")
    ponder("index", "papers/b")
    work = json.loads(ponder("search", "bees dam", "--collection", "Work", "--json").stdout)
    assert {passage["document"]["source"] for passage in work["passages"]} == {"dam.md"}
    shown = ponder("search", "bees", "--collection", "Play")
    assert shown.exit_code == 1 and "There is no collection 'Play'; accepted: 'Documents', 'Work'." in shown.stderr


def test_passages_are_shown_with_their_place(ponder: Ponder, papers: Path) -> None:
    ponder("index", "papers")
    shown = ponder("search", "when was the dam finished", "--limit", "1", "--rerank")
    assert shown.exit_code == 0
    first, second = shown.stdout.splitlines()
    assert first.startswith("1. The dam  papers/dam.md, characters ") and ", score " in first
    assert "finished in 1931" in second


def test_a_document_cannot_command_the_terminal(ponder: Ponder, papers: Path) -> None:
    (papers / "b" / "evil\x1b[2J.txt").write_text("granite \x9b2J evil granite")
    ponder("index", "papers")
    shown = ponder("search", "evil granite", "--limit", "1").stdout
    assert "evil" in shown and "\x1b" not in shown and "\x9b" not in shown


def test_nothing_found_is_said(ponder: Ponder) -> None:
    shown = ponder("search", "anything")
    assert shown.exit_code == 0 and shown.stdout == "Nothing was found.\n"


@pytest.mark.parametrize("query", ["", "x" * 5000])
def test_a_query_that_cannot_be_searched_for_is_told(ponder: Ponder, query: str) -> None:
    shown = ponder("search", query)
    assert shown.exit_code == 1 and shown.stderr.startswith("ponder: The query ")


def test_ctrl_c_cancels_and_keeps_what_was_done(
    ponder: Ponder, papers: Path, embedder: GatedEmbedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (papers / "z.txt").write_text(f"{HELD} at the end")
    embedder.gate.clear()
    really_cancel = LocalDocuments.cancel

    def cancel(shelf: LocalDocuments, job: str) -> None:
        really_cancel(shelf, job)
        embedder.gate.set()  # not before: a job that ends first is no longer there to be cancelled

    monkeypatch.setattr(LocalDocuments, "cancel", cancel)

    def press() -> None:
        assert embedder.waiting.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        shown = ponder("index", "papers")
    finally:
        embedder.gate.set()
        pressing.join()
    assert shown.exit_code == 130, shown.output
    with sqlite3.connect(tmp_path / "data" / "documents" / "documents.db") as db:
        assert db.execute("SELECT count(*) FROM jobs WHERE status = 'running'").fetchone() == (0,)


@pytest.fixture
def served(model: Path, tmp_path: Path, embedder: GatedEmbedder) -> Iterator[Server]:
    """A server that has the data directory open, and has said where it is."""
    with serving(model, tmp_path / "data", embedder) as server:
        (tmp_path / "data" / "server.url").write_text(server.url)
        yield server


def test_a_servers_documents_are_indexed_through_it(ponder: Ponder, served: Server, papers: Path) -> None:
    (papers / "bad.pdf").write_text("This is no PDF.")
    shown = ponder("index", "papers", "--collection", "Work")
    assert shown.exit_code == 1 and "failed: papers/bad.pdf: The name ends in .pdf" in shown.stderr
    assert shown.stdout.startswith("3 documents indexed (3 new, 3 chunks), 1 failed"), shown.output
    with httpx.Client(base_url=served.url, timeout=30) as http:
        assert search(http, "how bees dance")[0]["document"]["source"] == "papers/b/bees.txt"
    found = json.loads(ponder("search", "how bees dance", "--collection", "Work", "--json").stdout)
    assert found["passages"][0]["document"]["source"] == "papers/b/bees.txt"


def test_files_that_a_server_finds_too_large_fail_alone(ponder: Ponder, served: Server, papers: Path) -> None:
    state = served.app.state.ponder
    state.settings = state.settings.model_copy(update={"max_upload": 5000})
    (papers / "large.txt").write_text("large " * 2000)
    shown = ponder("index", "papers")
    assert shown.exit_code == 1 and "failed: papers/large.txt: The body has " in shown.stderr
    assert shown.stdout.startswith("3 documents indexed (3 new, 3 chunks), 1 failed"), shown.output


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:9"])
def test_documents_that_nobody_answers_for_are_told(
    ponder: Ponder, papers: Path, tmp_path: Path, embedder: GatedEmbedder, url: str | None
) -> None:
    with Library.open(tmp_path / "data" / "documents", embedder):
        if url:
            (tmp_path / "data" / "server.url").write_text(url)
        for command in (["index", "papers"], ["search", "x"]):
            shown = ponder(*command)
            assert shown.exit_code == 1 and f"Another process ({os.getpid()})" in shown.stderr


@pytest.fixture
def judged(tmp_path: Path) -> Path:
    folder = tmp_path / "judged"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(
        "\n".join(json.dumps({"_id": id, "title": "", "text": text}) for id, text in (("d1", DAM), ("d2", BEES)))
    )
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q1", "text": "bees dance"}))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td2\t1\n")
    return folder


def test_a_judged_set_is_measured(ponder: Ponder, judged: Path) -> None:
    shown = ponder("eval", "retrieval", "--beir", str(judged), "--rerank", "--json")
    assert shown.exit_code == 0, shown.output
    *table, last = shown.stdout.splitlines()
    measures = json.loads(last)
    assert measures.pop("p99_ms") >= measures.pop("p50_ms") > 0
    assert measures == {
        "ndcg@10": 1.0, "mrr@10": 1.0, "recall@5": 1.0, "recall@10": 1.0, "recall@100": 1.0, "queries": 1,
    }  # fmt: skip
    assert any("ndcg@10" in line and "1.0000" in line for line in table)


def test_what_is_no_judged_set_is_told(ponder: Ponder, tmp_path: Path) -> None:
    shown = ponder("eval", "retrieval", "--beir", str(tmp_path))
    assert shown.exit_code == 1 and "BEIR" in shown.stderr
