"""Answers held to a form, seen from outside: each is judged by `json`, `jsonschema`, `re` or Python's own parser. The
model is far too small to say anything sensible in them: what is tested is that no answer can have another form."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from app.errors import ApiError
from app.openai.text_constraints import Calling, TextConstraint
from engine.structured_output.layout import Constrained, Layout
from engine.structured_output.matcher import CompileTimeout
from engine.structured_output.spec import Regex
from engine.tool_parsers import ToolPlan
from engine.tool_parsers.json_calls import one_call
from tests.app.conftest import Server
from tests.app.toolbox import TOOLS, ask, chat, join, refusal, stream, without_ids

pytestmark = [pytest.mark.usefixtures("nothing_lost_by_pebble"), pytest.mark.slow]

Json = dict[str, Any]
NO_THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
OPEN_THINKING: dict[str, Any] = {"chat_template_kwargs": {"open_thinking": True}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}, "y": {"type": "number", "enum": [0.5, 1]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Json] = {
    "object": _POINT,
    "nested": {
        "$defs": {"point": _POINT},
        "type": "object",
        "properties": {
            "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 2},
            "größe": {"enum": ["klein", "groß", 'sehr "groß"']},
            "note": {"type": ["string", "null"], "maxLength": 5},
        },
        "required": ["points", "größe", "note"],
        "additionalProperties": False,
    },
    "alternatives": {
        "anyOf": [{"const": {"a": None}}, _POINT, {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}]
    },
    "pattern": {"type": "string", "pattern": "^[A-Z][0-9]{2}-(ab|cd)$"},
    "number": {"type": "integer", "minimum": 100, "maximum": 250},
}  # fmt: skip
# keyword -> a schema that nobody holds because of it
HELD_BY_NOBODY: dict[str, Json] = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 3}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 9}},
    "look-ahead": {"type": "string", "pattern": "^(?=a)b"},
}
REGEXES = [r"[0-9]{3}-[0-9]{4}", r"(yes|no|maybe)!{1,3}", r"[a-c]+d", r"Ü[äöü]{2}🚲?", r"\{\"k\": (0|[1-9][0-9]?)\}"]
SUM = """
start: term (op term){0,3}
term: NUMBER | "(" NUMBER op NUMBER ")"
op: " + " | " * "
NUMBER: /[1-9][0-9]?/
"""


def form(schema: Json, **more: Any) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def answers(http: httpx.Client, path: str, **fields: Any) -> list[tuple[str, str]]:
    """The texts and finish reasons of a request that is accepted, whichever the endpoint."""
    if path == CHAT:
        choices = ask(http, **{**NO_THINKING, **fields})["choices"]
        return [(choice["message"]["content"], choice["finish_reason"]) for choice in choices]
    reply = http.post(path, json={"model": "default", "prompt": "An answer: ", "max_tokens": 60, **fields})
    assert reply.status_code == 200, reply.text
    return [(choice["text"], choice["finish_reason"]) for choice in reply.json()["choices"]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_is_valid_against_its_schema(pebble_http: httpx.Client, path: str, name: str) -> None:
    schema = SCHEMAS[name]
    asked: list[Json] = [
        {"response_format": form(schema, strict=True)}, {"response_format": form(schema)},
        {"response_format": form(schema, strict=False, description="Whatever.")},
        {"guided_json": schema}, {"guided_json": json.dumps(schema)},
    ]  # fmt: skip
    texts = []
    for fields in asked:
        for text, finish in answers(pebble_http, path, n=3, temperature=2, seed=4, max_tokens=200, **fields):
            assert finish == "stop"
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
            texts.append(text)
    assert len(set(texts)) > 1 and texts == texts[:3] * 5  # one constraint in five spellings


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_json_object_is_one(pebble: Server, pebble_http: httpx.Client, path: str) -> None:
    asked: Json = {"response_format": {"type": "json_object"}, "temperature": 2, "n": 6, "seed": 1}
    for text, finish in answers(pebble_http, path, **asked):
        assert text.startswith("{") and (finish == "length" or isinstance(json.loads(text), dict))
    braces = {str(id): 100 for brace in "{}" for id in pebble.engine.tokenizer.encode(brace)}
    for text, finish in answers(pebble_http, path, **asked, logit_bias=braces):
        assert (text, finish) == ("{}", "stop")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("pattern", REGEXES)
def test_an_answer_matches_its_expression_as_a_whole(pebble_http: httpx.Client, path: str, pattern: str) -> None:
    for text, finish in answers(pebble_http, path, guided_regex=pattern, n=4, temperature=1.5, seed=2):
        if finish == "stop":
            assert re.fullmatch(pattern, text), text
        else:
            assert pattern == "[a-c]+d" and re.fullmatch("[a-c]+", text)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "choices", [["yes", "no"], ["a", "ab", "abc", "b"], ["Grün", "grün\n", " 🚲", '"'], ["only this"]]
)
def test_an_answer_is_one_of_its_choices(pebble_http: httpx.Client, path: str, choices: list[str]) -> None:
    made = answers(pebble_http, path, guided_choice=choices, n=6, temperature=2, seed=3)
    assert {text for text, _ in made} <= set(choices) and {finish for _, finish in made} == {"stop"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_follows_its_grammar(pebble_http: httpx.Client, path: str) -> None:
    for text, finish in answers(pebble_http, path, guided_grammar=SUM, n=6, temperature=2, seed=1):
        assert finish == "stop"
        nodes = {type(node) for node in ast.walk(ast.parse(text, mode="eval"))}
        assert nodes <= {ast.Expression, ast.BinOp, ast.Add, ast.Mult, ast.Constant}


def test_a_stream_says_what_the_whole_reply_says(pebble_http: httpx.Client) -> None:
    forms: list[Json] = [
        {"response_format": form(SCHEMAS["nested"])}, {"response_format": {"type": "json_object"}},
        {"guided_regex": REGEXES[0]}, {"guided_choice": ["a", "ab"]}, {"guided_grammar": SUM},
    ]  # fmt: skip
    for at, fields in enumerate(forms):
        for variables in (NO_THINKING, OPEN_THINKING):
            body = chat("17 + 26?", **fields, **variables, temperature=1.2, seed=at, n=2, max_tokens=90)
            whole = pebble_http.post(CHAT, json=body).json()
            assert without_ids(join(stream(pebble_http, body))["choices"]) == without_ids(whole["choices"])
        body = {"model": "default", "prompt": ["So", "Thus"], "n": 2, "seed": at, "temperature": 1.2, **fields}
        whole_texts = [c["text"] for c in pebble_http.post(COMPLETIONS, json=body).json()["choices"]]
        streamed: dict[int, str] = {}
        for line in pebble_http.post(COMPLETIONS, json={**body, "stream": True}).text.split("\n\n"):
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
        assert [streamed[i] for i in range(4)] == whole_texts


@pytest.mark.parametrize("variables", [{}, OPEN_THINKING], ids=["may think", "thinks"])
def test_thinking_comes_before_the_form_and_is_no_way_around_it(
    pebble: Server, pebble_http: httpx.Client, variables: Any
) -> None:
    """The end of the answer is made as likely as can be, in the thinking too."""
    end = {str(id): 100 for id in pebble.engine.tokenizer.eos_token_ids}
    for prompt in ("Who are you?", "Use 4, 6 and 9 to make 33.", "What is 17 + 26?"):
        reply = ask(
            pebble_http, prompt, response_format=form(SCHEMAS["object"]), max_tokens=300, logit_bias=end, **variables
        )
        (choice,) = reply["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMAS["object"])
        else:
            assert choice["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == 300


def test_a_marker_of_thinking_after_the_form_ends_the_answer(pebble: Server, pebble_http: httpx.Client) -> None:
    """`a` may end there, so that a marker may come; a second answer must not follow it."""
    for marker in ("<think>", "</think>"):
        bias = {str(pebble.engine.tokenizer.token_id(marker)): 100}
        reply = ask(pebble_http, guided_choice=["a", "ab", "abb"], logit_bias=bias, max_tokens=30)
        (choice,) = reply["choices"]
        if choice["finish_reason"] == "stop":
            assert choice["message"]["content"] in ("a", "ab", "abb")
        else:
            assert choice["message"]["content"] == "" and marker == "<think>"  # it opened its thinking ever again


def test_max_tokens_inside_json_says_length(pebble_http: httpx.Client) -> None:
    asked: Json = {"response_format": form(SCHEMAS["nested"]), "temperature": 0}
    ((whole, finish),) = answers(pebble_http, CHAT, **asked, max_tokens=300)
    assert finish == "stop"
    cut = set()
    for limit in range(1, 16, 2):
        ((text, finish),) = answers(pebble_http, CHAT, **asked, max_tokens=limit)
        assert finish == "length" and whole.startswith(text) and text != whole
        cut.add(text)
    assert len(cut) > 2


def test_a_stop_string_ends_the_answer_before_it(pebble_http: httpx.Client) -> None:
    schema = {"const": {"first": "one", "second": "two"}}
    for path in (CHAT, COMPLETIONS):
        ((text, finish),) = answers(pebble_http, path, guided_json=schema, stop=['"second"', "zzz"])
        assert (text.replace(" ", ""), finish) == ('{"first":"one",', "stop")


def test_options_that_move_probabilities_never_break_the_form(pebble: Server, pebble_http: httpx.Client) -> None:
    (letter,) = pebble.engine.tokenizer.encode("x")
    eos = pebble.engine.tokenizer.eos_token_ids[0]
    for fields in (
        {"logit_bias": {str(letter): 100}}, {"logit_bias": {str(eos): 100}}, {"min_tokens": 20}, {"top_k": 1},
        {"repetition_penalty": 50.0}, {"presence_penalty": 2.0, "frequency_penalty": 2.0}, {"top_p": 0.01},
        {"min_p": 0.99, "temperature": 2.0}, {"logprobs": True},
    ):  # fmt: skip
        ((text, finish),) = answers(pebble_http, CHAT, response_format=form(SCHEMAS["object"]), **fields)
        assert finish == "stop", fields
        jsonschema.validate(json.loads(text), SCHEMAS["object"])


def test_logprobs_are_those_of_the_tokens_in_the_answer(pebble_http: httpx.Client) -> None:
    reply = ask(pebble_http, guided_regex="[0-9]{3}-[0-9]{4}", logprobs=True, top_logprobs=2, **NO_THINKING)
    (choice,) = reply["choices"]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(tokens).strip() == choice["message"]["content"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("keyword", HELD_BY_NOBODY)
def test_a_schema_that_cannot_be_held_is_refused_by_keyword(pebble_http: httpx.Client, path: str, keyword: str) -> None:
    schema = {"type": "object", "properties": {"deep": {"type": "array", "items": HELD_BY_NOBODY[keyword]}}}
    body: Json = chat("hi") if path == CHAT else {"model": "default", "prompt": "hi"}
    for field, value in (
        ("response_format", form(schema, strict=True)), ("response_format", form(schema)), ("guided_json", schema),
        ("guided_json", json.dumps(schema)),
    ):  # fmt: skip
        error = refusal(pebble_http, path, **{**body, field: value})
        assert (error["param"], error["code"]) == (field, "constraint_refused") and keyword in error["message"]


def _deep(levels: int) -> Json:
    return {"properties": {"a": _deep(levels - 1)}} if levels else {}


BAD: list[tuple[Json, str, str]] = [
    ({"response_format": "json"}, "response_format", "json_object"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": form(None)}, "response_format.json_schema.schema", "missing"),  # type: ignore[arg-type]
    ({"response_format": form(True)}, "response_format.json_schema.schema", "object"),  # type: ignore[arg-type]
    ({"response_format": form({}, colour="red")}, "response_format.json_schema.colour", "not known"),
    ({"response_format": form({}, strict="yes")}, "response_format.json_schema.strict", "true or false"),
    ({"response_format": form({}, name=5)}, "response_format.json_schema.name", "string"),
    ({"response_format": form({"type": 5})}, "response_format.json_schema.schema.type", "name"),
    ({"response_format": form({"properties": [1]})}, "response_format.json_schema.schema.properties", "object"),
    ({"response_format": form({"$ref": "https://example.org/s"})}, "response_format", "$ref"),
    ({"response_format": form(_deep(80))}, "response_format.json_schema.schema", "deeply"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": '{"a":' * 10**5}, "guided_json", "deeply"),
    ({"guided_json": '{"const": "\\ud800"}'}, "guided_json", "surrogate"),
    ({"guided_json": "[]"}, "guided_json", "object"),
    ({"guided_json": 5}, "guided_json", "object"),
    ({"guided_json": {"enum": [f"{i}" * 9 for i in range(30_000)]}}, "guided_json", "at most"),
    ({"guided_regex": "("}, "guided_regex", "unclosed"),
    ({"guided_regex": "(a)\\1"}, "guided_regex", "backreferences"),
    ({"guided_regex": ""}, "guided_regex", "10000"),
    ({"guided_regex": "a" * 10_001}, "guided_regex", "10000"),
    ({"guided_regex": ["a"]}, "guided_regex", "expression"),
    ({"guided_choice": []}, "guided_choice", "4096"),
    ({"guided_choice": [""]}, "guided_choice[0]", "non-empty"),
    ({"guided_choice": "yes"}, "guided_choice", "list"),
    ({"guided_choice": ["yes", 1]}, "guided_choice[1]", "strings"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_grammar": "x: \"a\""}, "guided_grammar", "start"),
    ({"guided_grammar": "start: <|im_end|>"}, "guided_grammar", "token"),
    ({"guided_grammar": 5}, "guided_grammar", "Lark"),
    ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "one of them"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json", "one of them"),
    ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "guided_choice"),
    ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "not a field"),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("change", "param", "word"), BAD, ids=[f"{i} {b[1]}" for i, b in enumerate(BAD)])
def test_a_form_that_is_none_is_refused_by_name(
    pebble_http: httpx.Client, path: str, change: Json, param: str, word: str
) -> None:
    body: Json = chat("hi") if path == CHAT else {"model": "default", "prompt": "hi", "max_tokens": 2}
    error = refusal(pebble_http, path, **{**body, **change})
    assert error["param"] == param and word in error["message"], error


def test_text_is_no_form(pebble_http: httpx.Client) -> None:
    plain = answers(pebble_http, CHAT, seed=1)
    assert answers(pebble_http, CHAT, seed=1, response_format={"type": "text"}) == plain
    together = ask(pebble_http, response_format={"type": "text"}, ignore_eos=True, max_tokens=5, tools=[])
    assert together["usage"]["completion_tokens"] == 5


def test_what_takes_too_long_to_compile_is_refused_as_such(
    pebble: Server, pebble_http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(constraint: object, tenant: str) -> None:
        raise CompileTimeout("compiling it takes longer than 2 s")

    monkeypatch.setattr(pebble.engine, "compile", never)
    loose: Json = {"tools": TOOLS[:1]}  # not strict, and refused all the same
    for fields, param in (({"guided_regex": "a"}, "guided_regex"), (loose, "tools")):
        error = refusal(pebble_http, **chat("hi", **fields))
        assert (error["param"], error["code"]) == (param, "constraint_timeout") and "2 s" in error["message"]


class Place(BaseModel):
    name: Literal["Köln", "東京"]
    people: int = Field(ge=0, le=10**6)
    sights: list[Literal["cathedral", "tower"]] = Field(max_length=2)


def test_the_official_client_parses_answers_into_models(pebble_client: openai.OpenAI) -> None:
    for variables in (NO_THINKING, OPEN_THINKING):
        try:
            reply = pebble_client.chat.completions.parse(
                model="default", messages=[{"role": "user", "content": "Which place?"}], response_format=Place,
                max_tokens=300, temperature=1, seed=1, extra_body=variables,
            )  # fmt: skip
        except openai.LengthFinishReasonError:
            assert variables is OPEN_THINKING  # it thought and thought
        else:
            assert isinstance(reply.choices[0].message.parsed, Place)


def test_a_form_that_no_token_tells_from_calls_is_refused_by_its_own_name() -> None:
    plan = ToolPlan(Layout(free=True, openers=frozenset({1})), Regex("a"), one_call)
    held = TextConstraint("guided_regex", Constrained(Regex("b"), Layout()))
    with pytest.raises(ApiError, match="guided_regex and tools are both given") as refused:
        Calling.or_answer(plan, held)
    assert refused.value.param == "guided_regex"
