"""Chat templates: a model's own Jinja template over messages, in a sandbox. Knows nothing of token ids.

The template comes with the checkpoint and expects the surroundings that Hugging Face gives it: block trimming, loop
controls, `raise_exception`, `strftime_now`, a `tojson` that leaves HTML alone, and `{% generation %}` marks, which only
training needs and which are transparent here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
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
        """Renders the prompt. Any: messages and tools are JSON, of any content that the template accepts.

        Raises:
            ChatTemplateError: the template refuses these messages, in its own words, or fails on them.
        """
        try:
            return self._template.render(
                **{**self._tokens, **variables},
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refused the messages: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, ZeroDivisionError) as error:
            raise ChatTemplateError(
                f"the model's chat template failed on the messages ({type(error).__name__}: {error}); check that roles "
                "and content are what this model supports."
            ) from error
