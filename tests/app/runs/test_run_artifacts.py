"""Routes of artifacts: a list, a download that no browser shows, a preview of an opaque origin; a run with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app import postgres
from tests.app.chatting import log_of, new_chat
from tests.app.conftest import Server
from tests.app.library import error
from tools.context import FileContent
from tools.result import Artifact

DATABASES = postgres.DATABASES_SLOW

pytestmark = pytest.mark.slow

PNG = b"\x89PNG\r\n\x1a\n..."
DRAWING = '''
from ponder import Context, tool

@tool(permission="none", cache=60)
def calculate(ctx: Context, expression: str) -> str:
    """Work out an arithmetic expression."""
    kept = ctx.attach("../out/sum.csv", "sum\\n391\\n")
    return f"391 {kept}"
'''


def kept(server: Server, chat: str, name: str, content: bytes) -> Artifact:
    store = server.app.state.ponder.store.artifacts
    (made,) = server.on_loop(store.keep(chat, "run_1", "call_1", [FileContent(name, content)])).kept
    return made


def test_a_download_is_the_bytes_under_their_name(server: Server, http: httpx.Client) -> None:
    chat = new_chat(http)
    formula = "=cmd|' /C calc'!A0,ü\n".encode()
    made = kept(server, chat, "Zahlen ä.csv", formula)
    reply = http.get(f"/api/artifacts/{made.id}")
    assert reply.content == formula and reply.headers["content-type"] == "text/csv; charset=utf-8"
    expected = "attachment; filename=\"file\"; filename*=UTF-8''Zahlen%20%C3%A4.csv"
    assert reply.headers["content-disposition"] == expected
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["content-security-policy"] == "default-src 'none'; sandbox"
    listed = http.get(f"/api/chats/{chat}/artifacts").json()["artifacts"]
    assert [(each["id"], each["name"], each["version"], each["size"]) for each in listed] == [
        (made.id, "Zahlen ä.csv", 1, len(formula))
    ]


@pytest.mark.parametrize(
    ("name", "content", "sent_type", "scripts"),
    [
        ("a.html", b"<script>1</script>", "text/html; charset=utf-8", True),
        ("a.svg", b"<svg/>", "image/svg+xml", False),
        ("a.png", PNG, "image/png", False),
    ],
)
def test_a_preview_has_an_opaque_origin_and_may_fetch_nothing(
    server: Server, http: httpx.Client, name: str, content: bytes, sent_type: str, scripts: bool
) -> None:
    made = kept(server, new_chat(http), name, content)
    address = f"/api/artifacts/{made.id}/preview"
    framed = http.get(address, headers={"Sec-Fetch-Dest": "iframe"})
    alone = http.get(address, headers={"Sec-Fetch-Dest": "document"})
    unsaid = http.get(address)
    assert framed.content == content and framed.headers["content-type"] == sent_type
    for reply, runs in ((framed, scripts), (alone, False), (unsaid, False)):
        policy = dict(part.strip().partition(" ")[::2] for part in reply.headers["content-security-policy"].split(";"))
        assert policy["sandbox"] == ("allow-scripts" if runs else "")
        assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'self'"
        assert policy["form-action"] == policy["base-uri"] == "'none'"
        assert policy.get("script-src") == ("'unsafe-inline'" if runs else None)
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["connection-allowlist"] == "()"
        assert reply.headers["x-frame-options"] == "SAMEORIGIN" and reply.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", ["a.csv", "a.exe", "a.js"])
def test_what_no_frame_shows_is_refused(server: Server, http: httpx.Client, name: str) -> None:
    made = kept(server, new_chat(http), name, b"x")
    error(http.get(f"/api/artifacts/{made.id}/preview"), 404, "no_preview")


def test_what_is_not_there_is_told(http: httpx.Client) -> None:
    for address in ("/api/artifacts/art_0", "/api/artifacts/art_0/preview", "/api/chats/chat_0/artifacts"):
        error(http.get(address), 404, "chat_not_found" if "chats" in address else "artifact_not_found")
    error(http.get("/api/artifacts/art_0?download=1"), 400, "unknown_parameter", "download")


@pytest.fixture
def plugin(pebble: Server, pebble_http: httpx.Client) -> Iterator[Path]:
    """A plugin whose tool makes a file."""
    folder = pebble.data / "plugins"
    folder.mkdir(exist_ok=True)
    path = folder / "calculator.py"
    path.write_text(DRAWING, "utf-8")
    names = lambda: {each["name"] for each in pebble_http.get("/api/tools").json()["tools"]}  # noqa: E731
    pebble.until(lambda _: "calculate" in names())
    yield path
    path.unlink()
    pebble.until(lambda _: "calculate" not in names())


@pytest.mark.usefixtures("plugin")
def test_a_run_keeps_what_its_tools_make(pebble: Server, pebble_http: httpx.Client) -> None:
    chats = [new_chat(pebble_http) for _ in range(2)]
    results = list[dict[str, Any]]()
    for chat in chats:
        body = {"content": "What is 23 * 17?", "tools": ["calculate"], "temperature": 0, "max_tokens": 300}
        run = pebble_http.post(f"/api/chats/{chat}/runs", json=body).json()["run_id"]
        result = next(event for event in log_of(pebble_http, run) if event["type"] == "tool.result")
        results.append(result)
        (made,) = result["artifacts"]
        assert (made["name"], made["version"], made["media_type"]) == ("out_sum.csv", 1, "text/csv")
        assert result["text"] == "391 True\nFiles that the person sees: out_sum.csv (version 1, 8 bytes)."
        assert pebble_http.get(f"/api/artifacts/{made['id']}").text == "sum\n391\n"
        (listed,) = pebble_http.get(f"/api/chats/{chat}/artifacts").json()["artifacts"]
        assert (listed["run_id"], listed["call_id"]) == (run, result["call_id"])
    one, other = (result["artifacts"][0]["id"] for result in results)
    assert one != other, "a kept result has no file of another chat"
    assert pebble_http.delete(f"/api/chats/{chats[0]}").status_code == 200
    error(pebble_http.get(f"/api/artifacts/{one}"), 404, "artifact_not_found")
