"""Chat templates: a model's own Jinja template over messages, in a sandbox. Knows nothing of token ids.

Clients send histories that not every template takes: several system messages, later ones, two of a user's in a row.
Where a template refuses such messages or leaves them out, they are put into a form that it takes (`ChatTemplate.fit`).

The template comes with the checkpoint and expects the surroundings that Hugging Face gives it: block trimming, loop
controls, `raise_exception`, `strftime_now`, a `tojson` that leaves HTML alone, and `{% generation %}` marks, which only
training needs and which are transparent here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ChatTemplateError


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` renders its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_BREAK = "\n\n"  # between messages that become one
# Harmony (gpt-oss): the beginning of a turn, and the headers of the channels of its thinking and its answer
ASSISTANT, CHANNEL = "<|start|>assistant", "<|channel|>"
ANALYSIS, FINAL = f"{CHANNEL}analysis<|message|>", f"{CHANNEL}final<|message|>"


class ChatTemplate:
    """One compiled template.

    `tokens` are the names of special tokens that templates may write (`bos_token`, `eos_token`, …).

    Raises:
        ChatTemplateError: the template is not valid Jinja.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source
        self._tokens = dict(tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template cannot be parsed: {error}.") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        """Renders the prompt, its messages fitted. Any: messages and tools are JSON, of any content that the template
        accepts.

        Harmony leaves the channel of the turn to the model: the one of thinking is opened here, or the answer's where
        `enable_thinking` is false. With tools that one may be a call's, too, and stays without a name.

        Raises:
            ChatTemplateError: the template refuses these messages, in its own words, or fails on them.
        """
        try:
            text = self._template.render(
                **{**self._tokens, **variables},
                messages=self.fit(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
            if add_generation_prompt and text.endswith(ASSISTANT) and CHANNEL in self.source:
                answer = CHANNEL if tools else FINAL
                text += answer if variables.get("enable_thinking") is False else ANALYSIS
            return text
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refused the messages: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, ZeroDivisionError) as error:
            raise ChatTemplateError(
                f"the model's chat template failed on the messages ({type(error).__name__}: {error}); check that roles "
                "and content are what this model supports."
            ) from error

    def fit(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the messages in a form that this template takes.

        System messages that begin a chat become one. A later one, or any where the template has no place for such, is a
        user's. Messages of a user, or of an assistant without calls, that follow each other become one where the
        template refuses that. Content is a list of parts where the template leaves out a string.
        """
        first = next((at for at, message in enumerate(messages) if message.get("role") != "system"), len(messages))
        if not self._takes_strings:
            messages = [_in_parts(message) for message in messages]
        fitted = [*_joined(messages[:first]), *messages[first:]]
        lead = 1 if first and self._takes_system else 0
        if any(message.get("role") == "system" for message in fitted[lead:]) and not self._takes_late_system:
            fitted[lead:] = [
                {**message, "role": "user"} if message.get("role") == "system" else message for message in fitted[lead:]
            ]
        roles = [_run(message) for message in fitted]
        if any(a == b is not None for a, b in pairwise(roles)) and not self._takes_runs:
            fitted = [
                one for role, run in groupby(fitted, _run) for one in (_joined(list(run)) if role is not None else run)
            ]
        return fitted

    @cached_property
    def _takes_strings(self) -> bool:
        messages = [{"role": "user", "content": "message 0"}]
        return self._renders(messages) or not self._renders([_in_parts(message) for message in messages])

    @cached_property
    def _takes_system(self) -> bool:
        return self._takes("system", "user")

    @cached_property
    def _takes_late_system(self) -> bool:
        return self._takes("system", "user", "assistant", "system", "user")

    @cached_property
    def _takes_runs(self) -> bool:
        return self._takes("user", "user", "assistant", "assistant", "user")

    def _takes(self, *roles: str) -> bool:
        """Returns whether the template renders messages of these roles, each with its content."""
        messages = [{"role": role, "content": f"message {at}"} for at, role in enumerate(roles)]
        return self._renders(messages if self._takes_strings else [_in_parts(message) for message in messages])

    def _renders(self, messages: list[dict[str, Any]]) -> bool:
        """Returns whether the texts of the messages, which are numbered, are in the prompt."""
        try:
            text = self._template.render(
                **self._tokens, messages=messages, tools=None, documents=None, add_generation_prompt=True
            )
        except Exception:  # whatever a template fails with, it does not take them
            return False
        return all(f"message {at}" in text for at in range(len(messages)))


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose content is a list of parts."""
    content = message.get("content")
    return message if isinstance(content, list) else {**message, "content": [{"type": "text", "text": content or ""}]}


def _run(message: Mapping[str, Any]) -> str | None:
    """Returns the role of a message that may be joined with its neighbours, else None."""
    role = message.get("role")
    plain = isinstance(message.get("content"), str) and not message.get("tool_calls")
    return role if plain and role in ("user", "assistant") else None


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages of one role as one."""
    if len(messages) < 2 or not all(isinstance(message.get("content"), str) for message in messages):
        return list(messages)
    texts = [message["content"] for message in messages if message["content"]]
    return [{**messages[-1], "content": _BREAK.join(texts)}]
