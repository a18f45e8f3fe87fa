"""MCP Apps: documents of a real server beside the results of its tools, and what its apps may call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from mcp.server.apps import APP_MIME_TYPE
from mcp.types import BlobResourceContents, ReadResourceResult, TextResourceContents
from mcp.types import Tool as Offered

from tests.tools.mcp.sample_servers import APP, script
from tests.tools.mcp.test_mcp_client import connected
from tools.call_policy import CallPolicy
from tools.context import APP_TYPE, FileContent
from tools.errors import ToolError
from tools.executor import Executor
from tools.mcp.apps import document_of, file_name, links_of
from tools.mcp.mcp_client import McpServer
from tools.options import PERMISSIONS
from tools.outcome import Call, Outcome
from tools.registry import Registry
from tools.result import Artifact, Artifacts, Result
from tools.session import Session

pytestmark = pytest.mark.slow
URI = "ui://clock/app.html"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clock(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[McpServer]:
    command = script(tmp_path_factory.mktemp("clock"), APP)
    async with connected(Registry(), "clock", command=command, timeout_s=20) as server:
        assert server.status == "connected", server.registry.faults
        yield server


shared = pytest.mark.asyncio(loop_scope="module")


async def ran(server: McpServer, name: str, **arguments: Any) -> tuple[Outcome, list[FileContent]]:
    kept = list[FileContent]()

    async def keep(call_id: str, files: Sequence[FileContent]) -> Artifacts:
        kept.extend(files)
        return Artifacts()

    session = Session("ana", "run-1", "chat-1", keep_files=keep)
    executor = Executor(server.registry, CallPolicy(default=PERMISSIONS))
    (outcome,) = await executor.run([Call("c1", name, arguments)], session)
    return outcome, kept


def test_the_media_type_is_the_sdk_s() -> None:
    assert APP_TYPE == APP_MIME_TYPE


@shared
async def test_a_tool_with_an_app_brings_its_document_and_its_whole_result(clock: McpServer) -> None:
    outcome, (file,) = await ran(clock, "clock", zone="Ulm")
    assert outcome.result.text == "12:00 in Ulm"  # for the model, as without the app
    assert file.name == "app.html" and b"<p>noon</p>" in file.content
    app = file.app
    assert app is not None and (app.server, app.tool, app.uri, app.arguments) == (
        "clock",
        "clock",
        URI,
        {"zone": "Ulm"},
    )
    assert app.result["structuredContent"] == {"zone": "Ulm", "hour": 12} and app.result["_meta"]["exact"] is True
    assert app.result["content"] == [{"type": "text", "text": "12:00 in Ulm"}]
    assert app.domains == ("https://time.example.org",) and app.permissions == ("camera",)


def test_the_model_is_not_told_of_an_app_as_of_a_file() -> None:
    kept = (Artifact("art_1", "app.html", 1, APP_TYPE, 9), Artifact("art_2", "a.csv", 1, "text/csv", 3))
    made = Result("12:00").with_artifacts(Artifacts(kept[:1]))
    assert (made.text, made.artifacts) == ("12:00", kept[:1])
    both = Result("12:00").with_artifacts(Artifacts(kept)).text
    assert both == "12:00\nFiles that the person sees: a.csv (version 1, 3 bytes)."


@shared
async def test_a_document_is_found_by_the_older_key(clock: McpServer) -> None:
    _, (file,) = await ran(clock, "older")
    assert file.app is not None and file.app.uri == URI


@shared
async def test_a_document_that_is_none_is_told_and_the_result_stays(clock: McpServer) -> None:
    outcome, kept = await ran(clock, "large")
    assert outcome.ok and kept == []
    assert outcome.result.text == (
        "fallback\nThe app 'ui://clock/large.html' is not shown: it is empty, or no text in UTF-8."
    )


@shared
async def test_nobody_reads_a_document_where_no_files_are_kept(clock: McpServer) -> None:
    executor = Executor(clock.registry, CallPolicy(default=PERMISSIONS))
    (outcome,) = await executor.run([Call("c1", "large", {})], Session("ana", "run-1"))
    assert outcome.result.text == "fallback"


@shared
async def test_tools_for_apps_alone_are_not_in_the_registry(clock: McpServer) -> None:
    names = {tool.name for tool in clock.registry}
    assert names == {"clock", "alarm", "large", "older"}
    assert clock.app_tool("tick") is not None and clock.app_tool("alarm") is None and clock.app_tool("nothing") is None
    (fault,) = clock.registry.faults
    assert "'elsewhere'" in fault.message and "accepted: ui://" in fault.message


@shared
async def test_an_app_is_given_the_result_as_the_server_sent_it(clock: McpServer) -> None:
    tool = clock.app_tool("clock")
    assert tool is not None and tool.definition == getattr(clock.registry.get("clock"), "definition", "")
    executor = Executor(clock.registry, CallPolicy(default=PERMISSIONS))
    session = Session("ana", "run-1", own={tool.name: tool})
    (outcome,) = await executor.run([Call("c1", "clock", {"zone": "Bonn"})], session)
    assert outcome.result.value["structuredContent"]["zone"] == "Bonn" and outcome.result.value["isError"] is False


@shared
async def test_an_app_reads_its_server_s_resources(clock: McpServer) -> None:
    tool = clock.resource_tool()
    executor = Executor(clock.registry, CallPolicy(default=PERMISSIONS))
    session = Session("ana", "run-1", own={tool.name: tool})
    calls = [Call("c1", tool.name, {"uri": "clock://zones"}), Call("c2", tool.name, {"uri": "clock://nowhere"})]
    found, missing = await executor.run(calls, session)
    assert found.result.value["contents"][0]["text"] == "Bonn, Ulm"
    assert missing.kind == "error" and "'clock://nowhere'" in missing.text


def offered(**ui: Any) -> Offered:
    return Offered(name="look", input_schema={"type": "object"}, _meta={"ui": ui})


@pytest.mark.parametrize("visibility", ["app", [], ["model", "host"], [1], {"app": 1}])
def test_a_visibility_of_another_form_offers_the_tool_to_nobody(visibility: Any) -> None:
    links = links_of([offered(resourceUri=URI, visibility=visibility)])
    assert links.hidden == {"look"} and not links.callable and not links.uris
    assert "accepted: a list of 'model' and 'app'" in links.refused[0]


@pytest.mark.parametrize("uri", ["file:///etc/passwd", "UI://x", 5, "ui://" + "x" * 3000, ["ui://x"]])
def test_an_address_that_is_none_of_an_app_is_refused(uri: Any) -> None:
    links = links_of([offered(resourceUri=uri)])
    assert not links.uris and "accepted: ui://" in links.refused[0]


def html(**changes: Any) -> ReadResourceResult:
    fields: dict[str, Any] = {"uri": URI, "mime_type": APP_TYPE, "text": "<p>", **changes}
    return ReadResourceResult(contents=[TextResourceContents(**fields)])


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (ReadResourceResult(contents=[]), "does not send"),
        (html(uri="ui://clock/other.html"), "does not send"),
        (html(mime_type="text/html"), f"it is 'text/html'; accepted: {APP_TYPE}"),
        (html(mime_type=None), "accepted"),
        (html(text="  "), "it is empty"),
        (ReadResourceResult(contents=[BlobResourceContents(uri=URI, mime_type=APP_TYPE, blob="/w==")]), "no text"),
        (html(_meta={"ui": {"csp": {"connectDomains": "https://x"}}}), "_meta.ui has a wrong form"),
        (html(_meta={"ui": {"csp": "all"}}), "_meta.ui has a wrong form"),
    ],
)
def test_a_document_of_another_kind_is_refused(read: ReadResourceResult, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        document_of(read, URI)


def test_what_a_document_asks_for_is_told_once_and_can_hide_nothing() -> None:
    csp = {"connectDomains": ["https://a", "https://\u202eb"], "resourceDomains": ["https://a", *map(str, range(99))]}
    content, domains, permissions = document_of(
        html(mime_type="text/html; profile=mcp-app", _meta={"ui": {"csp": csp}}), URI
    )
    assert content == b"<p>" and permissions == ()
    assert domains[:3] == ("https://a", "https://b", "0") and len(domains) == 32


@pytest.mark.parametrize(
    ("uri", "name"),
    [("ui://clock/app.html", "app.html"), ("ui://clock/view", "view.html"), ("ui://clock", "clock.html"),
     ("ui://x/a/?b=c/d", "a.html"), ("ui://", "app.html")],
)  # fmt: skip
def test_an_app_is_named_by_the_end_of_its_address(uri: str, name: str) -> None:
    assert file_name(uri) == name
