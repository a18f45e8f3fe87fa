"""An MCP app of a real server, by a call of the bundled model: it shows, asks, and is there after a reload."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import NewPage
from tests.e2e.support.hostile_apps import app_page
from tests.e2e.support.real_server import PEBBLE, RealServer, running
from tests.tools.mcp.sample_servers import script

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import expect

from tests.e2e.support.real_pages import ask, reply, settled, wishes

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PAGE = app_page(
    "await greet(); const { structuredContent } = heard.at(-1).params;"
    "sum.textContent = structuredContent.sum; again.onclick = async () => {"
    "out.textContent = (await ask('tools/call', { name: 'double', arguments: { of: structuredContent.sum } }).catch("
    "(error) => ({ content: [{ text: error.message }] }))).content[0].text }",
    "<p id=sum></p><button id=again>Double it</button><p id=out></p>",
)
SERVER = f"""
    from mcp.server.apps import Apps
    from mcp.server.mcpserver import MCPServer
    from mcp.types import CallToolResult, TextContent, ToolAnnotations

    apps = Apps()

    @apps.tool(resource_uri="ui://sums/sum.html", annotations=ToolAnnotations(read_only_hint=True))
    def calculate(expression: str) -> CallToolResult:
        "Work out an arithmetic expression."
        return CallToolResult(content=[TextContent(type="text", text="391")], structured_content={{"sum": 391}})

    @apps.tool(resource_uri="ui://sums/sum.html", visibility=["app"])
    def double(of: int) -> str:
        "Twice a number."
        return str(2 * of)

    apps.add_html_resource("ui://sums/sum.html", {json.dumps(PAGE)})
    MCPServer("sums", extensions=[apps], log_level="CRITICAL").run("stdio")
"""


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("apps")
    command = script(folder, SERVER)
    config = folder / "ponder.toml"
    config.write_text(f"[mcp.sums]\ncommand = {json.dumps(command)}\n", "utf-8")
    with running(folder / "data", "--model", str(PEBBLE), "--config", str(config)) as server:
        yield server


def test_an_app_of_a_real_server_lives_and_asks(sums: RealServer, new_page: NewPage) -> None:
    names = {each["name"] for each in sums.http.get("/api/tools").json()["tools"]}
    assert "calculate" in names and "double" not in names  # for the app alone
    page = new_page()
    page.goto(sums.url)
    wishes(page, tools=["calculate"], sampling={"temperature": 0}, maxTokens=200)
    ask(page, "What is 23 * 17?")
    settled(page)
    expect(reply(page)).to_contain_text("391")
    for again in (False, True):
        if again:
            page.reload()
        app = page.get_by_role("region", name="App sum.html")
        app.get_by_role("button", name="Open app").click()
        inside = app.locator("iframe").content_frame
        expect(inside.locator("#sum")).to_have_text("391")
        inside.get_by_role("button", name="Double it").click()
        asked = app.get_by_role("group", name="double needs your approval")
        expect(asked).to_contain_text("double(of=391)")
        asked.get_by_role("button", name="Deny" if again else "Allow once").click()
        said = "The person declined this call of double." if again else "782"
        expect(inside.locator("#out")).to_have_text(said)
    sums.http.delete(f"/api/chats/{page.url.rpartition('/')[2]}")
    app.get_by_role("button", name="Close app").click()
