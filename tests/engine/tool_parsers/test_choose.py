"""Tests which tool parser is chosen for which model: by the marks of its template and the tokens of its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import CheckpointError, InvalidParameter
from engine.model.tokenizer import Tokenizer
from engine.tool_parsers import TOOL_PARSERS, choose_parser, read_tools
from tests.engine.model.test_tokenizer import CHATML, STRICT, THINKING
from tests.engine.tool_parsers.samples import TEMPLATES, TOKENS, ByteTokens, accepts
from tests.tiny import TEMPLATE

TOOLS = read_tools([{"type": "function", "function": {"name": "f"}}])
# Others that have `<tool_call>` or braces, and mean something else by them.
GLM = (
    """{{ '\\n<tool_call>' + tc.name }}{% for k, v in tc.arguments.items() %}{{ '\\n<arg_key>' + k + '</arg_key>' }}"""
)
R1 = "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] }}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_chooses_its_parser(name: str) -> None:
    found = choose_parser(TOKENS, TEMPLATES[name])
    assert found is not None
    assert found.name == name.split()[0]


def test_quotes_may_be_escaped_in_the_templates_source() -> None:
    source = (
        """{{- "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}"""
    )
    found = choose_parser(TOKENS, source)
    assert found is not None
    assert found.name == "hermes"


@pytest.mark.parametrize("model", ["pebble", "pebble-draft"])
def test_the_bundled_models_speak_hermes(model: str) -> None:
    tokenizer = Tokenizer.load(Path(__file__).parents[3] / "models" / model)
    found = choose_parser(tokenizer, tokenizer.chat_template)
    assert found is not None
    assert found.name == "hermes"


@pytest.mark.parametrize("source", [None, CHATML, STRICT, THINKING, TEMPLATE, GLM, R1])
def test_a_template_that_writes_no_known_calls_has_none(source: str | None) -> None:
    assert choose_parser(TOKENS, source) is None


def test_a_template_whose_tags_are_no_tokens_has_none() -> None:
    assert choose_parser(ByteTokens(["<tool_call>"]), TEMPLATES["hermes"]) is None
    assert choose_parser(ByteTokens([]), TEMPLATES["mistral"]) is None


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_a_parser_may_be_asked_for_by_name(name: str) -> None:
    found = choose_parser(TOKENS, None, name)
    assert found is not None
    assert found.name == name.split()[0]


@pytest.mark.parametrize(
    ("name", "token"), [("hermes", "</tool_call>"), ("qwen3_coder", "</tool_call>"), ("mistral", "[TOOL_CALLS]")]
)
def test_a_parser_asked_for_without_its_token_is_refused_by_the_tokens_name(name: str, token: str) -> None:
    without = ByteTokens([text for text in ByteTokens.CONTROL if text != token])
    with pytest.raises(CheckpointError, match="needs the token " + token.replace("[", r"\[")):
        choose_parser(without, TEMPLATES[name], name)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        InvalidParameter,
        match="'xml'; accepted: auto, qwen3_coder, hermes, gemma4, harmony, mistral, llama3_json, llama4_json",
    ):
        choose_parser(TOKENS, None, "xml")


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("mistral", '[{"name": "f", "arguments": {}}]'),
        ("mistral args", "f[ARGS]{}"),
        ("mistral ids", "f[CALL_ID]123456789[ARGS]{}"),
        (None, "f[ARGS]{}"),
    ],
)
def test_the_template_says_in_which_form_mistral_writes_calls(template: str | None, form: str) -> None:
    """Without a template that writes calls the tokens do."""
    found = choose_parser(ByteTokens(), template and TEMPLATES[template], "mistral")
    assert found is not None
    assert accepts(found.plan(TOOLS, "auto").body, form)
