"""Tests how the built page is served."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

import app.page
from app.page import mount_page


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    built = tmp_path / "dist"
    (built / "assets").mkdir(parents=True)
    (built / "index.html").write_text("<title>the page</title>")
    (built / "favicon.svg").write_text("1")
    (built / "assets" / "index-abc123.js").write_text("2")
    (tmp_path / "secret.txt").write_text("secret")
    monkeypatch.setattr(app.page, "PLACES", (tmp_path / "absent", built))
    return built


@pytest.fixture
def client(root: Path) -> TestClient:
    server = FastAPI()

    @server.get("/api/server")
    def info() -> dict[str, str]:
        return {"model": "m"}

    @server.post("/v1/completions")
    def completions() -> None: ...

    mount_page(server)
    return TestClient(server)


@pytest.mark.parametrize("path", ["/", "/c/chat1", "/some/place"])
def test_addresses_of_the_page_get_index_html(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert "the page" in response.text
    assert response.headers["cache-control"] == "no-cache"


def test_hashed_files_are_kept_for_good_and_others_are_asked_about(client: TestClient) -> None:
    assert "immutable" in client.get("/assets/index-abc123.js").headers["cache-control"]
    assert client.get("/favicon.svg").headers["cache-control"] == "no-cache"


def test_an_unchanged_file_is_not_sent_again(client: TestClient) -> None:
    tag = client.get("/").headers["etag"]
    assert client.get("/", headers={"if-none-match": tag}).status_code == 304


def test_texts_are_sent_gzipped_to_who_takes_that(client: TestClient, root: Path) -> None:
    words = "many words, and many words again. " * 100
    (root / "assets" / "words-abc.js").write_text(words)
    (root / "assets" / "font-abc.woff2").write_text(words)
    small = client.get("/assets/words-abc.js")  # httpx takes gzip, and unpacks it
    assert small.headers["content-encoding"] == "gzip" and int(small.headers["content-length"]) < 500
    assert small.text == words and small.headers["vary"] == "Accept-Encoding"
    assert small.headers["content-type"].startswith("text/javascript")
    whole = client.get("/assets/words-abc.js", headers={"accept-encoding": "identity"})
    assert (
        "content-encoding" not in whole.headers and whole.text == words and whole.headers["vary"] == "Accept-Encoding"
    )
    assert whole.headers["etag"] != small.headers["etag"]
    for tag in (small.headers["etag"], whole.headers["etag"]):
        takes = "gzip" if tag == small.headers["etag"] else "identity"
        known = {"if-none-match": tag, "accept-encoding": takes}
        assert client.get("/assets/words-abc.js", headers=known).status_code == 304
    assert "content-encoding" not in client.get("/assets/font-abc.woff2").headers
    part = client.get("/assets/words-abc.js", headers={"range": "bytes=0-3"})
    assert part.status_code == 206 and part.text == "many"


@pytest.mark.parametrize("path", ["/", "/assets/index-abc123.js", "/favicon.svg", "/c/x"])
def test_every_answer_carries_the_security_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"] and "http" not in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["/api", "/api/nothing", "/api/nothing.html", "/v1/nothing", "/v1", "/mcp/x"])
def test_unknown_api_paths_are_never_the_page(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    assert "the page" not in response.text


def test_known_routes_are_left_alone(client: TestClient) -> None:
    assert client.get("/api/server").json() == {"model": "m"}
    assert client.get("/v1/completions").status_code == 405
    assert client.post("/nowhere").status_code in {404, 405}


@pytest.mark.parametrize("path", ["/assets/gone.js", "/favicon.ico", "/robots.txt", "/.env.local"])
def test_files_that_are_not_there_are_not_found(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    "path", ["/../secret.txt", "/..%2fsecret.txt", "/assets/%2e%2e/%2e%2e/secret.txt", "/%00", "//etc/passwd"]
)
def test_nothing_outside_the_page_is_served(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert "secret" not in response.text
    assert "root:" not in response.text
    assert response.status_code < 500


def test_a_page_that_is_not_built_says_how_to_build_it(root: Path, client: TestClient) -> None:
    (root / "index.html").unlink()
    response = client.get("/")
    assert response.status_code == 503
    assert "make setup" in response.text


CHUNKS = {
    "src/components/chat/Message.svelte": {"file": "assets/Message-1.js", "imports": ["_Message-2.js"]},
    "_Message-2.js": {"file": "assets/Message-2.js", "imports": ["_initial.js"], "css": ["assets/Message.css"]},
    "_initial.js": {"file": "assets/initial.js", "dynamicImports": ["src/components/chat/Message.svelte"]},
}


@pytest.mark.parametrize("known", [True, False])
def test_the_page_of_a_chat_names_what_it_will_ask_for(root: Path, known: bool) -> None:
    (root / "index.html").write_text('<script type="module" src="/assets/initial.js"></script>')
    (root / "chunks.json").write_text(json.dumps(CHUNKS))
    server = FastAPI()
    mount_page(server, lambda request: known)
    client = TestClient(server)
    for path in ("/", "/c", "/c/one/more", "/documents/7", "/assets/index-abc123.js"):
        assert "link" not in client.get(path).headers, path
    links = client.get("/c/a%20%3E%2Cb").headers["link"].split(", ")
    chat = "</api/chats/a%20%3E%2Cb?last=24>; rel=preload; as=fetch; crossorigin"
    assert (chat in links) == known, "nobody's request for a chat would be refused, and that be in the console"
    assert [link for link in links if link != chat] == [
        "</api/session>; rel=preload; as=fetch; crossorigin",
        "</assets/initial.js>; rel=modulepreload",
        "</assets/Message-1.js>; rel=modulepreload",
        "</assets/Message-2.js>; rel=modulepreload",
        "</assets/Message.css>; rel=preload; as=style; crossorigin",
    ]


def test_a_page_built_without_a_list_of_its_chunks_is_served(client: TestClient, root: Path) -> None:
    assert client.get("/c/one").headers["link"] == "</api/session>; rel=preload; as=fetch; crossorigin"
    (root / "chunks.json").write_text("{}")
    assert client.get("/c/one").status_code == 200


def test_the_first_screen_says_what_the_model_is_before_its_program_runs(root: Path) -> None:
    (root / "index.html").write_text('<main><p class="about"></p></main>')
    server, about = FastAPI(), ["Small & <new>."]
    mount_page(server, about=lambda: about[0])
    client = TestClient(server)
    shown = client.get("/")
    assert shown.text == '<main><p class="about">Small &amp; &lt;new&gt;.</p></main>'
    assert shown.headers["content-encoding"] == "gzip" and "default-src" in shown.headers["content-security-policy"]
    whole = client.get("/", headers={"accept-encoding": "identity"})
    assert whole.text == shown.text and whole.headers["etag"] != shown.headers["etag"]
    known = {"if-none-match": shown.headers["etag"]}
    assert client.get("/", headers=known).status_code == 304
    about[0] = "Another."
    assert "Another." in client.get("/", headers=known).text


def test_what_the_page_has_inside_is_allowed_by_its_hash_and_nothing_else(root: Path) -> None:
    (root / "index.html").write_text('<script>\n1\n</script><style>a{}</style><p class="about"></p>')
    server = FastAPI()
    mount_page(server, about=lambda: "<script>2</script><style>b{}</style>")
    policy = TestClient(server).get("/").headers["content-security-policy"]
    script, style = (base64.b64encode(hashlib.sha256(inside).digest()).decode() for inside in (b"\n1\n", b"a{}"))
    assert f"script-src 'self' 'sha256-{script}'; style-src 'self' 'sha256-{style}';" in policy
    assert "sha256" not in TestClient(server).get("/favicon.svg").headers["content-security-policy"]
