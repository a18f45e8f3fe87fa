"""The tool for a question: chosen by nearness, or none; and over HTTP, for chat completions and runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.answering.answer_plan import select_call
from app.answering.reasoning_config import ReasoningResolver
from app.answering.served_model import ServedModel
from app.answering.tool_selection import (
    FITS,
    Arguments,
    ToolRanker,
    ToolSelector,
    described,
    is_open,
    required_numbers,
)
from app.runs.trace import Trace, replay
from engine.tool_parsers import ToolSpec
from tests.app.conftest import PEBBLE, Server, serving
from tests.app.gate import GatedEmbedder
from tests.app.runs.test_runs import events
from tests.app.toolbox import named
from tests.app.toolbox import tool as make_tool
from tests.retrieval.words import WordEmbedder
from tools.builtin.builtin_tools import calculator
from tools.calculation import calculate

WEATHER = ToolSpec(
    "get_weather",
    "The weather forecast of a city",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
RECTANGLE = ToolSpec(
    "rectangleArea",
    "The area of a rectangle",
    {
        "type": "object",
        "properties": {side: {"type": "number", "description": f"the {side}"} for side in ("width", "height")},
        "required": ["width", "height"],
    },
)
TOOLS = (WEATHER, RECTANGLE)


@pytest.fixture
def ranker() -> ToolRanker:
    return ToolRanker(WordEmbedder())


def test_the_nearest_tool_is_first(ranker: ToolRanker) -> None:
    assert ranker.rank("get the weather of Oslo", TOOLS)[0].tool is WEATHER
    best = ranker.rank("the rectangle area of width 3 and height 4", TOOLS)[0]
    assert best.tool is RECTANGLE and best.probability > FITS


def test_no_tool_is_likely_for_another_question(ranker: ToolRanker) -> None:
    assert all(each.probability < FITS for each in ranker.rank("Who wrote Hamlet?", TOOLS))


def test_a_tool_that_lacks_its_numbers_is_less_likely(ranker: ToolRanker) -> None:
    def odds(question: str) -> float:
        found = next(each.probability for each in ranker.rank(question, TOOLS) if each.tool is RECTANGLE)
        return found / (1 - found)

    assert required_numbers(RECTANGLE) == 2 and required_numbers(WEATHER) == 0
    assert 10 * odds("the rectangle area, width 3 and x") < odds("the rectangle area, width 3 and four")


def test_a_sum_is_near_to_a_calculator_that_it_does_not_name(ranker: ToolRanker) -> None:
    plain = ToolSpec("calculate", "Work out an arithmetic expression")
    (found,) = ranker.rank("23 * 17", [plain])
    (other,) = ranker.rank("23 apples", [plain])
    assert found.probability > FITS > other.probability


def text_tool(name: str, about: str, parameter: str, **more: Any) -> ToolSpec:
    properties = {parameter: {"type": "string"}, **more}
    return ToolSpec(name, about, {"type": "object", "properties": properties, "required": [parameter]})


MATHS = text_tool("evaluate", "Does maths exactly", "expression", digits={"type": "integer"})


def test_a_tool_is_open_whose_text_is_written_for_it() -> None:
    built_in = ToolSpec(calculator.name, calculator.description, calculator.parameters)
    for tool in (MATHS, built_in, text_tool("find", "Searches documents", "searchQuery"), text_tool("run", "", "code")):
        assert is_open(tool, "What is 5 times 7?"), tool
    assert not is_open(MATHS, "Who wrote Hamlet?") and is_open(text_tool("find", "", "query"), "Who wrote Hamlet?")
    two = ToolSpec("two", "", {"type": "object", "properties": {"a": {}, "query": {"type": "string"}}})
    untyped, other = ToolSpec("calculator", "Does maths"), text_tool("sendTo", "", "country_code")
    for tool in (*TOOLS, untyped, other, text_tool("count", "", "words"), two):
        assert not is_open(tool, "What is 5 times 7?"), tool


def test_a_tool_is_described_by_name_description_and_parameters() -> None:
    assert described(RECTANGLE) == "rectangle Area: The area of a rectangle width: the width; height: the height"
    assert described(ToolSpec("ping")) == "ping:"


def test_odd_schemas_are_ranked(ranker: ToolRanker) -> None:
    odd = [
        ToolSpec("a", None, {"properties": {"x": True}, "required": ["x", "y"]}),
        ToolSpec("_", "", {}),
        ToolSpec("b", "é" * 5_000),
    ]
    assert len(ranker.rank("", odd)) == len(ranker.rank("a" * 10_000, odd)) == 3


def test_vectors_of_a_tool_are_made_once() -> None:
    class Counting(WordEmbedder):
        texts = 0

        def embed(self, texts: Any) -> Any:
            self.texts += len(texts)
            return super().embed(texts)

    embedder = Counting()
    ranker = ToolRanker(embedder)
    ranker.rank("one", TOOLS)
    ranker.rank("two", TOOLS)
    assert embedder.texts == 2 + len(TOOLS)


SHOWN = [
    make_tool("get_weather", dict(WEATHER.parameters or {}), description=WEATHER.description),
    make_tool("rectangleArea", dict(RECTANGLE.parameters or {}), description=RECTANGLE.description),
]
FITTING, OTHER = "get the weather forecast of the city Oslo", "Who wrote Hamlet?"
ASKED = {"role": "user", "content": FITTING}
CALCULATOR = '''
from ponder import tool

@tool(permission="none")
def calculate(expression: str) -> str:
    """Work out an arithmetic expression."""
    return "391"
'''


@pytest.fixture(scope="module")
def selecting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("data")
    (data / "plugins").mkdir()
    (data / "plugins/calculator.py").write_text(CALCULATOR, "utf-8")
    with serving(PEBBLE, data, GatedEmbedder(), tool_selection="auto", sandbox=False) as server:
        yield server


@pytest.fixture
def http(selecting: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=selecting.url, timeout=60) as client:
        yield client


def choice(http: httpx.Client, messages: Any, **fields: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    body = {"model": "pebble", "messages": said, "tools": SHOWN, "temperature": 0, "max_tokens": 200, **fields}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()["choices"][0]
    return found


def called(found: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in found["message"].get("tool_calls", [])]


def begin_bias(server: Server, bias: float) -> dict[str, float]:
    return {str(server.engine.tokenizer.token_id("<tool_call>")): bias}


@pytest.mark.slow
def test_a_question_that_a_tool_fits_gets_a_call_of_it(http: httpx.Client, selecting: Server) -> None:
    for question, name in ((FITTING, "get_weather"), ("rectangle area of width 3 and height 4", "rectangleArea")):
        found = choice(http, question, logit_bias=begin_bias(selecting, -50.0), parallel_tool_calls=False)
        assert called(found) == [name] and found["finish_reason"] == "tool_calls"


@pytest.mark.slow
def test_a_question_that_no_tool_fits_gets_a_plain_answer(http: httpx.Client, selecting: Server) -> None:
    found = choice(http, OTHER, logit_bias=begin_bias(selecting, 100.0))
    assert called(found) == [] and found["message"]["content"]
    assert called(choice(http, OTHER, tools=SHOWN[:1], tool_choice="required")) != []
    assert called(choice(http, OTHER, tool_choice=named("get_weather"))) == ["get_weather"]


@pytest.mark.slow
def test_arguments_are_copied_from_the_question_of_a_tiny_model(selecting: Server) -> None:
    served, ranker, said = ServedModel(selecting.engine, "pebble"), ToolRanker(WordEmbedder()), [ASKED]

    def selected(selector: ToolSelector) -> ToolSpec:
        (tool,) = selecting.on_loop(selector.select(served, said, TOOLS)) or ()
        return tool

    both: tuple[Arguments, ...] = ("auto", "copied")
    for arguments in both:
        parameters = selected(ToolSelector("embedding", ranker, arguments)).parameters
        assert parameters is not None and "Oslo" in parameters["properties"]["city"]["enum"]
    assert selected(ToolSelector("embedding", ranker, "free")) is WEATHER
    served.parameters = 200_000_000
    assert selected(ToolSelector("embedding", ranker, "auto")) is WEATHER


@pytest.mark.slow
def test_where_no_tool_is_near_an_open_one_leaves_the_model_free(selecting: Server) -> None:
    served, selector = ServedModel(selecting.engine, "pebble"), ToolSelector("embedding", ToolRanker(WordEmbedder()))

    def selected(question: str, *tools: ToolSpec) -> tuple[ToolSpec, ...] | None:
        said = [{"role": "user", "content": question}]
        return selecting.on_loop(selector.select(served, said, tools))

    assert selected("What do 31 and 19 make together?", *TOOLS, MATHS) is None
    assert selected("What do 31 and 19 make together?", *TOOLS) == ()
    assert selected("Evaluate: does maths exactly, the expression 31 and 19", *TOOLS, MATHS) == (MATHS,)  # not held
    (near,) = selected("the rectangle area of width 3 and height 4", *TOOLS, MATHS) or ()
    assert near.name == RECTANGLE.name


@pytest.mark.slow
def test_with_a_calculator_the_bundled_model_writes_the_expression(tmp_path: Path) -> None:
    offered = (WEATHER, ToolSpec(calculator.name, calculator.description, calculator.parameters))
    body = {"model": "default", "temperature": 0, "tools": [
        {"type": "function", "function": {"name": each.name, "description": each.description,
                                          "parameters": each.parameters}} for each in offered
    ]}  # fmt: skip
    with serving(PEBBLE, tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        for question, right in (("What is 17 plus 25?", 42), ("the sum of 64 and 4", 68)):
            said = [{"role": "user", "content": question}]
            reply = http.post("/v1/chat/completions", json={**body, "messages": said})
            (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == "calculator"
            assert calculate(json.loads(call["function"]["arguments"])["expression"]).number == right, reply.text


@pytest.mark.slow
def test_a_tool_that_cannot_be_narrowed_is_called_as_it_was_given(selecting: Server) -> None:
    served = ServedModel(selecting.engine, "pebble")
    refused = {"type": "object", "properties": {"city": {"enum": ["Oslo"], "maxLength": 2}}, "required": ["city"]}
    narrowed = ToolSpec(WEATHER.name, WEATHER.description, refused)
    call = selecting.on_loop(select_call(served, [narrowed], TOOLS, False))
    assert call is not None and call.tools == (WEATHER,)


@pytest.mark.slow
def test_after_a_result_the_model_is_free(http: httpx.Client, selecting: Server) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    said = [
        {"role": "user", "content": FITTING},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": '{"sky": "rain"}'},
    ]
    assert called(choice(http, said, logit_bias=begin_bias(selecting, -100.0))) == []


@pytest.mark.slow
def test_a_run_calls_the_fitting_tool_and_only_then(http: httpx.Client, selecting: Server) -> None:
    run = ""

    def kinds(question: str) -> list[str]:
        nonlocal run
        chat = http.post("/api/chats", json={}).json()["id"]
        body = {"content": question, "tools": ["calculate"], "temperature": 0, "max_tokens": 200}
        reply = http.post(f"/api/chats/{chat}/runs", json=body)
        assert reply.status_code == 202, reply.text
        run = reply.json()["run_id"]
        return [data["type"] for _, _, data in events(http, run)]

    assert "tool.call" in (fitting := kinds("calculate 23 * 17")) and fitting[-1] == "run.completed"
    trace = Trace.loads(http.get(f"/api/runs/{run}/trace").text.partition("\n")[0])
    assert [tool["function"]["name"] for tool in trace.selected] == ["calculate"]
    served = ServedModel(selecting.engine, "pebble")
    again = selecting.on_loop(replay(served, trace, ReasoningResolver()))
    assert again.differs_at is None
    assert "tool.call" not in kinds(OTHER)


@pytest.mark.slow
def test_the_setting_and_the_models_size_decide(selecting: Server) -> None:
    served = ServedModel(selecting.engine, "pebble")
    ranker = ToolRanker(WordEmbedder())
    assert ToolSelector("auto", ranker).selects(served) and ToolSelector("embedding", ranker).selects(served)
    assert not ToolSelector("model", ranker).selects(served)
    served.parameters = 2_000_000_000
    assert not ToolSelector("auto", ranker).selects(served) and ToolSelector("embedding", ranker).selects(served)


@pytest.mark.slow
def test_a_task_for_others_is_not_among_all_tools_of_a_tiny_model(http: httpx.Client) -> None:
    def offered(tools: Any) -> set[str]:
        chat = http.post("/api/chats", json={}).json()["id"]
        body = {"content": OTHER, "tools": tools, "max_tokens": 16}
        run = http.post(f"/api/chats/{chat}/runs", json=body).json()["run_id"]
        assert list(events(http, run))
        trace = Trace.loads(http.get(f"/api/runs/{run}/trace").text.partition("\n")[0])
        return {tool["function"]["name"] for tool in trace.tools}

    assert "delegate" not in offered("all") and len(offered("all")) > 1
    assert offered(["delegate"]) == {"delegate"}
