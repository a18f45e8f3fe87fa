"""Checkers of requests: each kind scores, is held to its limits, and is refused by name where it can't be had."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from app.answering.checkers import Checkers
from app.errors import ApiError
from engine.errors import InvalidParameter
from reasoning.verify import run_check
from tests.app.chatting import begin, log_of, new_chat
from tests.app.conftest import Server

pytestmark = pytest.mark.slow

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PLUGIN = '''
from ponder import tool


@tool(permission="none")
async def vowels(answer: str, atleast: int = 1) -> bool:
    """Whether a text has so many vowels.

    Args:
        answer: the text
        atleast: how many
    """
    return sum(c in "aeiou" for c in answer) >= atleast


@tool(permission="none")
async def praise(answer: str) -> str:
    """Says something nice.

    Args:
        answer: the text
    """
    return "very good"


@tool(permission="write", approval="always")
async def careful(answer: str) -> bool:
    """Needs a person.

    Args:
        answer: the text
    """
    return True
'''


@pytest.fixture
async def checkers() -> Any:
    made = Checkers()
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"type": "exact", "answer": "Rome"}, " rome.\n", "Rom"),
        ({"type": "number", "answer": 42}, "So it is 42.", "It is 41"),
        ({"type": "contains", "answer": ["a", "b"]}, "b, a", "b"),
        ({"type": "choice", "answer": "b", "choices": ["a", "b"]}, "not a but b", "b or rather a"),
        ({"type": "regex", "answer": r"^\d{3}$"}, "123", "1234"),
        ({"type": "puzzle", "answer": {"numbers": [4, 6, 9, 1], "target": 24}}, "6 * (9 - 4 - 1)", "(4 - 1) * (6 + 9)"),
        ({"type": "json_schema", "schema": {"type": "object", "required": ["a"]}}, '{"a": 1}', "{a: 1}"),
        ({"type": "python", "code": "len(answer) == 3"}, "abc", "abcd"),
        ({"type": "python", "code": "def f(x):\n    return 1.0 if 'ö' in x else 0\nf(answer)"}, "'ö\"\n", "o"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else None,
)  # fmt: skip
async def test_each_kind_tells_right_from_wrong(
    checkers: Checkers, fields: dict[str, Any], right: str, wrong: str
) -> None:
    check = checkers.make(fields, "me")
    assert (await run_check(check, right), await run_check(check, wrong)) == (1.0, 0.0)


async def test_a_score_between_is_kept(checkers: Checkers) -> None:
    assert await run_check(checkers.make({"type": "python", "code": "min(1, len(answer) / 8)"}, "me"), "ab") == 0.25


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"type": "regex", "answer": r"(a+)+$"}, "2 s"),
        ({"type": "python", "code": "while True: pass"}, "timeout"),
        ({"type": "python", "code": "1 / 0"}, "division"),
        ({"type": "python", "code": "len(answer)"}, "from 0 to 1"),
        ({"type": "python", "code": "'yes'"}, "true, false"),
    ],
)
async def test_a_check_that_fails_or_runs_on_says_why(checkers: Checkers, fields: dict[str, Any], says: str) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidParameter, match=says):
        await run_check(checkers.make(fields, "me"), "a" * 60 + "!")
    assert time.monotonic() - began < 60
    after = checkers.make({"type": "regex", "answer": "a"}, "me")
    assert await run_check(after, "a") == 1.0


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "checker.type", "exact"),
        ({"type": "guess"}, "checker.type", "python"),
        ({"type": "exact"}, "checker.answer", "text"),
        ({"type": "exact", "answer": ""}, "checker.answer", "text"),
        ({"type": "exact", "answer": "a", "code": "b"}, "checker.code", "answer"),
        ({"type": "number", "answer": "none"}, "checker.answer", "number"),
        ({"type": "choice", "answer": "c", "choices": ["a", "b"]}, "checker.answer", "choices"),
        ({"type": "puzzle", "answer": {"numbers": [1.5], "target": 24}}, "checker.answer", "numbers"),
        ({"type": "regex", "answer": "("}, "checker.answer", "re"),
        ({"type": "regex", "answer": "a" * 1001}, "checker.answer", "1,000"),
        ({"type": "json_schema", "schema": []}, "checker.schema", "object"),
        ({"type": "json_schema", "schema": {"type": "thing"}}, "checker.schema", "no JSON Schema"),
        ({"type": "json_schema", "schema": {"$ref": "http://127.0.0.1/x"}}, "checker.schema", "within"),
        ({"type": "json_schema", "schema": {"enum": list(range(6000))}}, "checker", "5,000"),
        ({"type": "json_schema", "schema": {"title": "x" * 20_001}}, "checker", "20,000"),
        ({"type": "python", "code": ""}, "checker.code", "20000"),
        ({"type": "tool", "name": "vowels"}, "checker.type", "no tools"),
    ],
)
async def test_what_is_no_checker_is_refused(checkers: Checkers, fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        checkers.make(fields, "me")
    assert caught.value.status == 400 and caught.value.param == param and says in str(caught.value)


def request(**fields: Any) -> dict[str, Any]:
    body = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 60, "seed": 1}
    return {**body, "strategy": "best_of_n", "strategy_options": {"n": 6}, **fields}


def test_best_of_n_gives_an_answer_that_its_checker_likes(http: httpx.Client) -> None:
    for letter in "abc":
        reply = http.post(CHAT, json=request(checker={"type": "contains", "answer": letter}))
        assert reply.status_code == 200, reply.text
        log = log_of(
            http,
            begin(
                http, new_chat(http), "hello", strategy="best_of_n", strategy_options={"n": 6}, max_tokens=60, seed=1,
                checker={"type": "contains", "answer": letter},
            )["run_id"],
        )  # fmt: skip
        scores = {e["index"]: e["score"] for e in log if e["type"] == "candidate.done"}
        texts = {e["index"]: e["text"] for e in log if e["type"] == "candidate.done"}
        assert scores == {index: float(letter in text) for index, text in texts.items()}
        (chosen,) = [e for e in log if e["type"] == "candidate.chosen"]
        assert chosen["score"] == max(scores.values())


def test_responses_and_trees_take_a_checker(http: httpx.Client) -> None:
    checker = {"type": "python", "code": "'a' in answer"}
    body = {"model": "default", "input": "hello", "strategy": "best_of_n", "max_output_tokens": 40, "checker": checker}
    reply = http.post(RESPONSES, json=body)
    assert reply.status_code == 200, reply.text
    options = {"beam": 2, "depth": 3, "samples": 3, "step_tokens": 24}
    log = log_of(
        http,
        begin(http, new_chat(http), "hello", strategy="tree", strategy_options=options, checker=checker, max_tokens=60)[
            "run_id"
        ],
    )
    (done,) = [e for e in log if e["type"] == "search.done"]
    said = next(e["text"] for e in log if e["type"] == "answer.done")
    assert not done["solved"] or "a" in said


@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": None, "strategy_options": None},
        {"strategy": "beam", "strategy_options": {}},
        {"strategy": "budget", "strategy_options": {}},
        {"strategy": "self_consistency", "strategy_options": {}},
        {"strategy_options": {"verifier": "judge"}},
    ],
)
def test_a_checker_that_nobody_would_ask_is_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    reply = http.post(CHAT, json=request(**fields, checker={"type": "exact", "answer": "a"}))
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "checker", reply.text
    assert "best_of_n" in reply.json()["error"]["message"]


def test_a_plugins_tool_scores_answers(http: httpx.Client, server: Server) -> None:
    file = server.data / "plugins" / "scoring.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(PLUGIN)
    try:
        while "vowels" not in http.get("/api/tools").text:
            time.sleep(0.05)
        for name, status, says in (("vowels", 200, ""), ("praise", 400, "true, false"), ("careful", 400, "approval")):
            reply = http.post(CHAT, json=request(checker={"type": "tool", "name": name}))
            assert reply.status_code == status and says in reply.text, reply.text
        checker = {"type": "tool", "name": "vowels", "arguments": {"atleast": 10**6}}
        assert http.post(CHAT, json=request(checker=checker)).status_code == 200
        wrong = {"type": "tool", "name": "vowels", "arguments": {"atleast": "many"}}
        assert http.post(CHAT, json=request(checker=wrong)).status_code == 400
        missing = http.post(CHAT, json=request(checker={"type": "tool", "name": "nobody"}))
        assert missing.status_code == 400 and "vowels" in missing.text
    finally:
        file.unlink()
