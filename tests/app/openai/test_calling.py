"""Plans for the tools of a request: made once for the same tools and choice, and never more kept than a bound."""

from __future__ import annotations

from typing import Any

import pytest

from app.answering.served_model import ServedModel
from app.errors import ApiError
from app.openai.request_models import ChatRequest
from app.openai.text_constraints import MAX_PLANS, Calling
from app.request_body import CHAT_REFUSED, parse
from tests.app.conftest import Server
from tests.app.toolbox import TOOLS


@pytest.fixture
def served(pebble: Server) -> ServedModel:
    return ServedModel(pebble.engine, "pebble")


def calling(server: Server, served: ServedModel, user: str = "", **fields: Any) -> Calling:
    body = {"model": "pebble", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, **fields}
    return server.on_loop(Calling.of(parse(body, ChatRequest, CHAT_REFUSED), served, user))


def test_the_same_tools_are_planned_once(pebble: Server, served: ServedModel) -> None:
    first = calling(pebble, served)
    assert first.plan is not None
    assert calling(pebble, served, temperature=0.5).plan is first.plan
    for other in ({"tool_choice": "required"}, {"parallel_tool_calls": False}, {"tools": TOOLS[:1]}):
        assert calling(pebble, served, **other).plan is not first.plan


def test_another_users_plan_is_not_found(pebble: Server, served: ServedModel) -> None:
    first = calling(pebble, served, "alice")
    assert calling(pebble, served, "bob").plan is not first.plan
    assert calling(pebble, served, "alice").plan is first.plan


def test_what_does_not_go_with_tools_is_refused_the_second_time_too(pebble: Server, served: ServedModel) -> None:
    calling(pebble, served)
    with pytest.raises(ApiError, match="ignore_eos"):
        calling(pebble, served, ignore_eos=True)


def test_the_oldest_plans_are_forgotten(pebble: Server, served: ServedModel) -> None:
    first = calling(pebble, served).plan
    for at in range(MAX_PLANS):
        tool = {"type": "function", "function": {"name": f"tool_{at}"}}
        calling(pebble, served, tools=[tool])
    assert len(served.plans) == MAX_PLANS
    assert calling(pebble, served).plan is not first
