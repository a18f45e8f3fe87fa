"""The server holds to `/openapi.json`: schemathesis asks what the document allows, and what it does not.

The longer run by hand is in docs/operations.md; here it has a few examples of each operation, the same in every run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from app import openai
from app.anthropic.routes import router as anthropic_router
from app.openai import audio, responses
from app.openapi import models_of
from app.query_params import QueryParams
from app.request_body import JsonBody
from app.server import ROUTERS
from tests.app.chatting import begin, log_of, new_chat
from tests.app.conftest import Server, serving
from tests.app.gate import GatedEmbedder
from tests.app.library import upload
from tests.app.test_user_isolation import routes

pytestmark = pytest.mark.slow

_ALL = (*ROUTERS, openai.router, responses.router, audio.router, anthropic_router)
BODIES, PARAMETERS = models_of(_ALL, JsonBody), models_of(_ALL, QueryParams)
WITHOUT_BODY = {
    "POST /api/chats/{chat_id}/restore", "POST /api/folders/{folder_id}/restore",
    "POST /api/chats/{chat_id}/share", "POST /api/shares/{share_id}/update",
    "POST /api/runs/{run_id}/cancel", "POST /api/jobs/{job_id}/cancel", "POST /api/invitations/{collection_id}/accept",
    "PUT /api/presets/{preset_id}/members/{member}",
}  # fmt: skip
A_FORM = {
    "POST /api/documents", "POST /api/files", "POST /v1/audio/transcriptions", "POST /v1/audio/translations",
}  # fmt: skip


@pytest.fixture(scope="module")
def told(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("told"), GatedEmbedder()) as server:
        server.app.dependency_overrides.clear()
        yield server


@pytest.fixture(scope="module")
def ids(told: Server) -> dict[str, str]:
    """Of things that are there, so that not every address ends at a 404."""
    with httpx.Client(base_url=told.url, timeout=30) as http:
        chat = new_chat(http)
        run = begin(http, chat, "abc")["run_id"]
        log_of(http, run)
        made = upload(http, ("a.txt", b"Granite is a stone."), wait=10).json()
        folder = http.post("/api/folders", json={"name": "f"}).json()["id"]
        preset = http.post("/api/presets", json={"name": "p"}).json()["id"]
        prompt = http.post("/api/prompts", json={"name": "p", "text": "t"}).json()["id"]
        sequence = http.post("/api/sequences", json={"prompt": "abc", "lease_s": 500}).json()["id"]
        response = http.post("/v1/responses", json={"model": "default", "input": "a"}).json()["id"]
        document = made["documents"][0]
        papers = http.post(f"/api/collections/{document['collection']}/folders", json={"path": "/papers"}).json()["id"]
        return {
            "chat_id": chat, "run_id": run, "folder_id": folder, "document_id": str(document["id"]), "page": "1",
            "collection_id": str(document["collection"]), "job_id": str(made["job"]["id"]), "sequence_id": sequence,
            "response_id": response, "name": "tiny", "user_id": "local", "member": "ana",
            "document_folder": str(papers), "preset_id": preset, "prompt_id": prompt,
        }  # fmt: skip


CONFIG = """
[checks.positive_data_acceptance]
enabled = false  # what a schema cannot say, such as two fields that exclude each other, is refused with a reason

[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 409, 413, 422, 429]
"""
HOOKS = """
import json, os, schemathesis

IDS = json.loads(os.environ["IDS"])

@schemathesis.hook
def map_path_parameters(context, path_parameters):
    # Two of three ids are of something that is there, so that not every address ends at a 404.
    return path_parameters and {
        name: IDS[name] if name in IDS and len(str(value)) % 3 else value for name, value in path_parameters.items()
    }
"""


def test_the_server_holds_to_its_document(told: Server, ids: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    (tmp_path / "ids_hooks.py").write_text(HOOKS)
    known = {"SCHEMATHESIS_HOOKS": "ids_hooks", "PYTHONPATH": str(tmp_path), "IDS": json.dumps(ids)}
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "--config-file", "schemathesis.toml", "run",
        f"{told.url}/openapi.json", "--max-examples", "4", "--seed", "1", "--generation-deterministic",
        "--continue-on-failure", "--request-timeout", "30", "--no-color",
    ]  # fmt: skip
    ran = subprocess.run(command, cwd=tmp_path, env={**os.environ, **known}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-6000:]
    selected = re.search(r"Operations: +(\d+) selected", ran.stdout)
    assert selected is not None and int(selected[1]) == sum(map(len, told.app.openapi()["paths"].values()))


def test_every_body_and_parameter_is_in_the_document(told: Server) -> None:
    found = {route for route in routes(told.app.routes) if route.split()[1].startswith(("/api", "/v1"))}
    changing = {route for route in found if route.split()[0] in ("POST", "PUT", "PATCH")}
    assert {*BODIES, *WITHOUT_BODY, *A_FORM} == changing | {"POST /api/session"}
    assert len(PARAMETERS) > 10 and set(PARAMETERS) <= found
    document = httpx.get(f"{told.url}/openapi.json").json()
    assert "HTTPValidationError" not in json.dumps(document)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert "4XX" in operation["responses"], (method, path)
            assert ("requestBody" in operation) == (f"{method.upper()} {path}" in BODIES)


def _value(known: dict[str, str], at: re.Match[str]) -> str:
    return known.get(at[1], "1")


def test_a_part_of_a_path_may_be_as_long_as_it_likes(told: Server, ids: dict[str, str]) -> None:
    """Tries it in place of all that a path names: a file, a row, a key, a model."""
    with httpx.Client(base_url=told.url, timeout=60) as http:
        for length in (256, 5_000, 20_000):
            for place in ("/", "/assets/", "/chat/", "/api/", "/v1/", "/mcp/", f"/{'a/' * 4000}"):
                assert http.get(f"{place}{'x' * length}").status_code == 404, place
            for route in routes(told.app.routes):
                method, path = route.split()
                for name in re.findall(r"{(\w+)", path):
                    known = {**ids, name: "1" * length}
                    address = re.sub(r"{(\w+)(:\w+)?}", partial(_value, known), path)
                    reply = http.request(method, address, json={} if f"{method} {path}" in BODIES else None)
                    accepted = (404,) if method == "GET" else (204, 400, 403, 404)
                    assert reply.status_code in accepted, (route, name, reply.text)
        assert http.get(f"/{'%C3%BC' * 200}").status_code == 404  # 400 bytes


@pytest.mark.parametrize(
    ("path", "allow"),
    [
        ("/api/chats", "GET, POST"),
        ("/api/chats/search", "GET"),
        ("/api/chats/x", "DELETE, GET, PATCH"),
        ("/v1/models/a/b", "GET"),
    ],
)
def test_a_method_that_is_not_accepted_is_told_which_are(told: Server, path: str, allow: str) -> None:
    reply = httpx.put(f"{told.url}{path}")
    assert reply.status_code == 405 and reply.headers["allow"] == allow
