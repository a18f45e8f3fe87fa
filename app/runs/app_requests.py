"""Requests of an MCP app's frame to its own server: calls of tools, and resources that it reads (SEP-1865).

They go through the executor, under the names, permissions, approvals and limits of the server's tools. A request that
needs a person's approval is not run: what is to be decided comes back, and it is made once more with the decision.
Knows nothing of HTTP, nor of frames.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from tools.call_policy import Decision, NeedsApproval
from tools.errors import NotAnswered
from tools.limits import Rate
from tools.outcome import Call
from tools.session import Session

if TYPE_CHECKING:
    from app.answering.tool_service import ToolService

RATE = Rate(60, 60.0)  # of a user and tool, where the tool has no limit of its own
INVALID_PARAMS, REFUSED = -32602, -32000  # JSON-RPC 2.0, and the range of implementations

Method = Literal["tools/call", "resources/read"]


class AppApproval(BaseModel):
    """The decision that a person is asked for before a request runs."""

    name: str
    reason: str
    risk: Literal["low", "medium", "high"]
    preview: str
    arguments_hash: str


class AppError(BaseModel):
    """An error of JSON-RPC 2.0."""

    code: int
    message: str


class AppAnswer(BaseModel):
    """The answer to an app's request: one of the three. `result`: as the server sent it."""

    result: dict[str, Any] | None = None
    approval: AppApproval | None = None
    error: AppError | None = None


@dataclass(frozen=True, slots=True)
class AppRequest:
    """One request; `decision` is the person's, where it was asked for."""

    method: Method
    params: Mapping[str, Any]
    decision: Decision | None = None


async def answer_app(artifact: Mapping[str, Any], user: str, request: AppRequest, tools: ToolService) -> AppAnswer:
    """Runs a request of the app whose document is `artifact`, a row of the store with `app`."""
    server_name: str = json.loads(artifact["app"])["server"]
    server = tools.mcp_servers.get(server_name)
    if server is None:
        return _error(REFUSED, f"The MCP server {server_name} is not there any more.")
    if request.method == "resources/read":
        tool, arguments = server.resource_tool(), {"uri": request.params.get("uri")}
    else:
        name, arguments = request.params.get("name"), request.params.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return _error(INVALID_PARAMS, "tools/call takes the name of a tool, and its arguments as an object.")
        found = server.app_tool(name)
        if found is None:
            return _error(INVALID_PARAMS, f"The server {server_name} has no tool {name!r:.70} that apps may call.")
        tool = found
    tool = tool if tool.rate is not None else replace(tool, rate=RATE)
    asked = list[NeedsApproval]()

    async def approve(wanted: NeedsApproval) -> Decision:
        asked.append(wanted)
        if request.decision is None:
            raise NotAnswered("the person is asked first")
        return request.decision

    # The app is the server's own, and so is all that it has read: nothing taints it for that server.
    session = Session(
        user, artifact["run_id"], artifact["chat_id"], approve=approve, offered=(), own={tool.name: tool}
    )  # fmt: skip
    call = Call(f"app_{uuid.uuid4().hex}", tool.name, arguments)
    (outcome,) = await tools.executor.run([call], session)
    if asked and request.decision is None:
        fields = asdict(asked[0])
        return AppAnswer(approval=AppApproval(name=asked[0].tool, **{each: fields[each] for each in _SHOWN}))
    if not outcome.ok:
        code = INVALID_PARAMS if outcome.kind == "bad_arguments" else REFUSED
        return _error(code, outcome.result.text)
    return AppAnswer(result=outcome.result.value)


_SHOWN = ("reason", "risk", "preview", "arguments_hash")


def _error(code: int, message: str) -> AppAnswer:
    return AppAnswer(error=AppError(code=code, message=message))
