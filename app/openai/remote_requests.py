"""A chat request as a remote model's plan: fields that its API has are sent, all others are refused by name.

Every API of this server makes its request into a chat request, so all of them have remote models by this. Knows nothing
of connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.answering.remote_model import RemoteModel, RemotePlan
from app.errors import invalid
from app.openai.request_models import ChatRequest
from app.openai.text_constraints import check_parts, check_tools, text_constraint
from app.remote.wire_formats import RemotePrompt
from engine.structured_output.spec import JsonSchema
from engine.tool_parsers import Named, read_choice, read_tools


async def plan_remote_chat(request: ChatRequest, remote: RemoteModel) -> RemotePlan:
    """Plans a chat request for a remote model.

    Raises:
        ApiError: 400, naming a field or an image that it does not take. 403: the request is private.
    """
    remote.check_leaving(private=request.private)
    remote.check_fields(_given(request))
    if request.n > 1:
        raise invalid("n", f"n is {request.n}; accepted: 1 with the remote model {remote.name!r}.")
    check_tools(request.tools or [])
    check_parts("response_format", request.response_format)
    plan = await asyncio.to_thread(_planned, request, remote)
    messages = await remote.with_images(plan.prompt.messages)
    return replace(plan, prompt=replace(plan.prompt, messages=messages))


def _given(request: ChatRequest) -> list[str]:
    """The fields that differ from what their absence means."""
    fields = type(request).model_fields
    return [
        name
        for name in fields
        if name in request.model_fields_set
        and getattr(request, name) != fields[name].get_default(call_default_factory=True)
    ]


def _planned(request: ChatRequest, remote: RemoteModel) -> RemotePlan:
    given = {name: getattr(request, name) for name in request.model_fields_set}
    tools = read_tools(request.tools or [])
    choice = read_choice(request.tool_choice, tools)
    sent = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, Named) else choice
    prompt = RemotePrompt(
        request.template_messages(), remote.limit(request.token_limit), remote.sampling(given), request.tools or [],
        None if request.tool_choice is None else sent, request.parallel_tool_calls, request.response_format,
    )  # fmt: skip
    return RemotePlan(remote, prompt, () if choice == "none" else tuple(tools), _schema(request, remote))


def _schema(request: ChatRequest, remote: RemoteModel) -> str | None:
    """The schema that the whole answer is checked against, as text.

    Raises:
        ApiError: 400: the form is not as accepted.
    """
    asked: tuple[str, Any] | None = text_constraint(request)
    if asked is None:
        return None
    field, body = asked
    assert isinstance(body, JsonSchema)
    given = request.response_format
    if remote.settings.api == "anthropic" and isinstance(given, Mapping) and given["type"] == "json_object":
        raise invalid(
            field, f"{field} asks for any JSON object, which the remote model {remote.name!r} cannot be asked for; "
            'accepted: {"type": "json_schema", "json_schema": {…}}.', "unsupported_parameter",
        )  # fmt: skip
    return body.source
