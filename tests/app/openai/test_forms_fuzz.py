"""Tests whatever is put into the fields of forms and tools: the server answers or says which field is wrong, and goes
on."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.app import wild
from tests.app.toolbox import chat

pytestmark = pytest.mark.usefixtures("nothing_lost_by_pebble")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SOME = settings(max_examples=40, suppress_health_check=list(HealthCheck))
TOOLS = wild.tools["tools"]
CHOICES = {name: values for name, values in wild.tools.items() if name != "tools"}
options = st.fixed_dictionaries(
    {"stream": st.booleans()},
    optional={
        "min_tokens": st.integers(0, 2), "stop": st.sampled_from(["a", ["}"]]),
        "ignore_eos": st.sampled_from([False] * 9 + [True]), "stop_token_ids": st.lists(st.integers(0, 99), max_size=2),
    },
)  # fmt: skip


def check(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    reply = http.post(path, json=body)
    assert reply.status_code in (200, 400), (reply.status_code, reply.text, body)
    if reply.status_code == 400:
        error = reply.json()["error"]
        assert error["param"] and error["code"] and error["message"], (error, body)
        assert error["param"].split(".")[0].split("[")[0] in body
    elif body["stream"]:
        assert '"error"' not in reply.text


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("field", wild.forms)
@SOME
@given(data=st.data())
def test_no_form_makes_the_server_fail(pebble_http: httpx.Client, path: str, field: str, data: st.DataObject) -> None:
    body = chat("hi") if path == CHAT else {"model": "default", "prompt": "hi"}
    check(pebble_http, path, {**body, "max_tokens": 3, **data.draw(options), field: data.draw(wild.forms[field])})


@SOME
@given(fields=st.fixed_dictionaries({"tools": TOOLS}, optional=CHOICES), more=options)
def test_no_tools_make_the_server_fail(pebble_http: httpx.Client, fields: dict[str, Any], more: dict[str, Any]) -> None:
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    check(pebble_http, CHAT, {**chat("hi"), "max_tokens": 9, **variables, **more, **fields})


@SOME
@given(
    fields=st.dictionaries(st.sampled_from([*wild.forms, *wild.tools]), wild.small, max_size=4),
    both=st.fixed_dictionaries({}, optional=wild.forms),
)
def test_no_mixture_makes_the_server_fail(
    pebble_http: httpx.Client, fields: dict[str, Any], both: dict[str, Any]
) -> None:
    check(pebble_http, CHAT, {**chat("hi"), "max_tokens": 3, "stream": False, **both, **fields})
