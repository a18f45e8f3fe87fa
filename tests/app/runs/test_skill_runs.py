"""Runs with skills: the list of those that a run has stands in its prompt, and the others are not there for it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.answering.tool_service import SKILLS_SHARE
from app.runs.run_tools import RunTools
from reasoning.agent import Limits
from tests.app.conftest import PEBBLE, Server, serving
from tests.app.library import error
from tests.app.runs.test_tool_runs import log_of
from tests.app.runs.test_traces import trace_of
from tests.tools.skills.published import write, write_skills
from tools.builtin.skills import READ, RUN
from tools.outcome import Call

pytestmark = pytest.mark.slow

NAMES = ["citing-sources", "commit-messages", "measuring-text"]


@pytest.fixture(scope="module")
def skilled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_skills(tmp_path_factory.mktemp("skills"))
    write(folder / "broken" / "SKILL.md", "no front matter")
    with serving(PEBBLE, tmp_path_factory.mktemp("data"), skills=(folder,)) as server:
        server.on_loop(server.app.state.ponder.tool_service.ready())
        yield server


@pytest.fixture
def http(skilled: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=skilled.url, timeout=60) as client:
        yield client


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    chat = http.post("/api/chats", json={}).json()["id"]
    return http.post(f"/api/chats/{chat}/runs", json={"content": "hi", "max_tokens": 2, "temperature": 0, **fields})


def offered(http: httpx.Client, **fields: Any) -> dict[str, str]:
    """The tools in the prompt of a run that was made, each with its description."""
    run = post(http, **fields).json()["run_id"]
    assert log_of(http, run)[-1]["type"] == "run.completed"
    specs = json.loads(trace_of(http, run).partition("\n")[0])["tools"]
    return {spec["function"]["name"]: spec["function"]["description"] for spec in specs}


def test_skills_and_their_faults_are_listed(http: httpx.Client) -> None:
    told = http.get("/api/tools").json()
    assert [each["name"] for each in told["skills"]] == NAMES
    assert told["skills"][2]["metadata"] == {"author": "ponder tests", "version": "1.10"}
    assert told["skills"][1]["notes"] == ["version is no field of the format; it has no effect."]
    (fault,) = told["faults"]
    assert fault["origin"] == "skill broken" and "accepted: YAML between two lines ---" in fault["message"]
    assert {READ, RUN if RUN not in told["off"] else READ} <= {each["name"] for each in told["tools"]}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tools": [READ]}, NAMES),
        ({"skills": "all"}, NAMES),
        ({"skills": ["measuring-text", "citing-sources"]}, ["citing-sources", "measuring-text"]),
        ({"tools": ["calculator", READ], "skills": ["commit-messages"]}, ["commit-messages"]),
        ({"tools": ["calculator"]}, []),
        ({"tools": [READ, "calculator"], "skills": []}, []),
    ],
    ids=str,
)
def test_a_run_chooses_its_skills(http: httpx.Client, fields: dict[str, Any], names: list[str]) -> None:
    tools = offered(http, **fields)
    listed = [line[2:].partition(":")[0] for line in tools.get(READ, "").splitlines() if line.startswith("- ")]
    assert listed == names and ("calculator" in tools) == ("calculator" in fields.get("tools", []))
    assert (READ in tools) == bool(names)


def test_a_skill_that_is_not_there_is_refused_by_name(http: httpx.Client) -> None:
    said = error(post(http, skills=["citing"]), 400, "unknown_skill", "skills")
    assert all(name in said for name in NAMES)


def test_the_runs_tools_read_its_own_skills_alone(skilled: Server) -> None:
    shed = skilled.app.state.ponder.tool_service
    log: Any = []  # all that is needed of a run's log is that it takes events
    tools = RunTools(
        shed.executor, shed.offered(None, ["citing-sources"]), log, run="run_skills", chat="none", user="local",
        limits=Limits(),
    )  # fmt: skip

    async def read(*names: str) -> list[str]:
        return await tools.run([Call(name, READ, {"name": name}) for name in names])

    good, bad = skilled.on_loop(read("citing-sources", "measuring-text"))
    assert good.startswith("Cite as Author (Year).") and "do not fit read_skill" in bad
    assert tools.tainted_by == set()


def test_a_list_that_is_too_long_for_the_context_is_refused_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(40):
        write(
            tmp_path / "many" / f"skill-{number}" / "SKILL.md",
            f"---\nname: skill-{number}\ndescription: {'Measures many kinds of texts. ' * 10}\n---\n",
        )
    with (
        caplog.at_level(logging.WARNING, "ponder"),
        serving(PEBBLE, tmp_path / "d", skills=(tmp_path / "many",)) as one,
    ):
        assert "The list of 40 skills has" in caplog.text and "have to name fewer skills" in caplog.text
        with httpx.Client(base_url=one.url, timeout=60) as http:
            said = error(post(http, skills="all"), 400, "skills_too_long", "skills")
            assert f"at most {int(SKILLS_SHARE * 4096)} tokens" in said
            error(post(http, tools=[READ]), 400, "skills_too_long", "skills")
            assert post(http, skills=["skill-3"]).status_code == 202
            response = {"model": "default", "input": "hi", "max_output_tokens": 4}
            tool = {"type": "mcp", "server_label": "ponder", "allowed_tools": [READ], "require_approval": "never"}
            assert http.post("/v1/responses", json={**response, "tools": [tool]}).json()["error"]["code"] == (
                "skills_too_long"
            )
