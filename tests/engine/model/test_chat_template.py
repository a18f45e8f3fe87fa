"""Histories that a template refuses or leaves out, fitted to it; all others are rendered as they are."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine.model.chat_template import ChatTemplate

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
# As Llama 2's and Mistral's: one system message, then user and assistant in turn.
ALTERNATING = """
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
<system>{{ system }}
{% for m in rest -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('Roles must alternate.') }}{%- endif -%}
<{{ m.role }}>{{ m.content }}
{% endfor %}"""
# As Gemma's.
NO_SYSTEM = """
{%- for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif -%}
<{{ m.role }}>{{ m.content }}
{% endfor %}"""
# Reads the first system message, and leaves later ones out without a word.
FORGETFUL = """
{%- for m in messages %}{% if m.role != 'system' or loop.first -%}
<{{ m.role }}>{{ m.content }}
{% endif %}{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "alternating": ALTERNATING, "no system": NO_SYSTEM, "forgetful": FORGETFUL}


def chat(*said: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in said]


def render(template: str, messages: list[dict[str, Any]]) -> str:
    return ChatTemplate(template, {}).render(messages, tools=None, add_generation_prompt=True, variables={})


PLAIN = chat(("user", "a"), ("assistant", "b"), ("user", "c"))
LATE = chat(("system", "s"), ("user", "a"), ("assistant", "b"), ("system", "t"), ("user", "c"))


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize(
    "roles",
    [
        ("user", "assistant", "user"),
        ("system", "user", "assistant", "system", "user"),
        ("system", "system", "user"),
        ("user", "user", "assistant", "assistant", "user"),
        ("user", "system"),
        ("system",),
    ],
    ids=" ".join,
)
def test_every_text_of_a_history_is_in_the_prompt_once_and_in_order(template: str, roles: tuple[str, ...]) -> None:
    texts = [f"#{at}" for at in range(len(roles))]
    assert re.findall(r"#\d", render(template, chat(*zip(roles, texts, strict=True)))) == texts


def test_what_a_template_takes_is_left_as_it_is() -> None:
    runs = chat(("user", "a"), ("user", "b"))
    assert render(CHATML, LATE) == "<system>s\n<user>a\n<assistant>b\n<system>t\n<user>c\n"
    assert render(CHATML, runs) == "<user>a\n<user>b\n"
    assert ChatTemplate(ALTERNATING, {}).fit(PLAIN) == PLAIN


def test_a_late_system_message_is_a_users_where_the_template_has_no_place_for_it() -> None:
    assert render(ALTERNATING, LATE) == "<system>s\n<user>a\n<assistant>b\n<user>t\n\nc\n"
    assert render(FORGETFUL, LATE) == "<system>s\n<user>a\n<assistant>b\n<user>t\n<user>c\n"
    assert render(NO_SYSTEM, LATE) == "<user>s\n<user>a\n<assistant>b\n<user>t\n<user>c\n"


def test_system_messages_that_begin_a_chat_are_one() -> None:
    messages = chat(("system", "s"), ("system", ""), ("system", "t"), ("user", "a"))
    assert render(CHATML, messages) == "<system>s\n\nt\n<user>a\n"


def test_calls_and_their_results_are_never_joined() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    result = {"role": "tool", "content": "1"}
    messages = [*chat(("user", "a")), call, result, result, *chat(("assistant", "b"))]
    assert ChatTemplate(ALTERNATING, {}).fit(messages) == messages


# As SmolVLM's: content is a list of parts, and a string would be left out without a word.
PARTS = """
{%- for m in messages %}<{{ m.role }}>{% for part in m.content -%}
{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}
{% endfor %}"""


def test_a_template_of_parts_gets_strings_as_parts() -> None:
    said = chat(("system", "Be brief."), ("user", "Hello."), ("assistant", "Hi."))
    assert render(PARTS, said) == "<system>Be brief.<user>Hello.<assistant>Hi."
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}, *said[2:]]
    assert render(PARTS, shown) == "<user><image>What?<assistant>Hi."
    assert render(PARTS, [{"role": "assistant", "content": None}]) == "<assistant>"
