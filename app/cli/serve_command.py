"""`ponder serve`, its options made from the settings, and `ponder settings`, the table of docs/operations.md.

Tables of the configuration file that no option names (`databases`, `mcp`, `efforts`) are for the file alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperGroup
from typer.main import get_command

from app.cli.errors import or_explain, settings_of

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_METAVARS = {"int": "N", "float": "NUMBER", "ByteSize": "SIZE", "Path": "PATH"}
_RENAMED_FLAGS = {"tool_dialect": "--tool-dialect"}


def serve() -> None:
    """Serve a model: the chat page, its API, and OpenAI's API under /v1."""


class Commands(TyperGroup):
    """Adds the options of `serve` when it is run, so that `ponder --help` loads no pydantic."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # typer's signature
        name, command, rest = super().resolve_command(ctx, args)
        if name == "serve":
            app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
            app.command(name="serve", context_settings={"help_option_names": ["-h", "--help"]})(_with_options())
            command = get_command(app)
            command.name = name
        return name, command, rest


def _with_options() -> Callable[..., None]:
    """Returns `serve` with an option for each setting, in the order of --help."""
    from app.config.settings import Settings

    options = [_config_option()]
    for name, field in Settings.model_fields.items():
        if get_origin(field.annotation) is not dict or _extra(field)["flag"]:
            options.append(_option(name, field, _panel(name)))
    options += [
        _parameter(name, str, typer.Option(flag, hidden=True, show_default=False))
        for name, flag in _RENAMED_FLAGS.items()
    ]
    options.sort(key=lambda option: ["Server", "Limits", "Engine"].index(_panel(option.name)))

    def run(**given: Any) -> None:
        from app.config import unknown_variables

        settings = settings_of(given.pop("config"), serving=True, **given)
        for name in unknown_variables():
            typer.echo(f"Warning: {name} is set, but is no setting of Ponder's.", err=True)
        from app.cli.serve import serve as serve_until_stopped

        or_explain(serve_until_stopped, settings)

    run.__doc__ = serve.__doc__
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _panel(name: str) -> str:
    from app.config.engine_settings import EngineSettings
    from app.config.sections import LimitSettings

    return (
        "Engine"
        if name in EngineSettings.model_fields
        else "Limits"
        if name in LimitSettings.model_fields
        else "Server"
    )


def _config_option() -> inspect.Parameter:
    option = typer.Option(
        metavar="FILE", help=r"Configuration file \[ponder.toml, if there is one]", rich_help_panel="Server"
    )
    return _parameter("config", Path, option)


def _option(name: str, field: FieldInfo, panel: str) -> inspect.Parameter:
    kinds = [each for each in (field.annotation, *get_args(field.annotation)) if each is not type(None)]
    words, flag, kind = _plain(field.title or ""), _extra(field)["flag"], kinds[-1]
    choices = [str(each) for each in get_args(field.annotation)] if get_origin(field.annotation) is Literal else []
    if choices:
        words += f" ({', '.join(choices[:-1])} or {choices[-1]})"
    text = f"{words[:1].upper()}{words[1:]}".replace("[", r"\[")
    default = _plain(_default(field))
    if default and not flag and default != "none":
        text += rf" \[{default}]"
    shown: dict[str, Any] = {"help": text, "rich_help_panel": panel, "show_default": False}
    long = "--" + name.replace("_", "-")
    if field.annotation is bool:
        return _parameter(name, bool, typer.Option(f"{long}/--no-{long[2:]}", **shown))
    if flag:
        shown["help"] += ". Repeatable."
        metavar = "NAME=DIR|NAME" if get_origin(field.annotation) is dict else "TEXT"
        return _parameter(name, list[str], typer.Option(flag, metavar=metavar, **shown))
    metavar = "NAME" if choices else _METAVARS.get(getattr(kind, "__name__", ""), "TEXT")
    return _parameter(name, str, typer.Option(long, metavar=metavar, **shown))


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:  # Any: types as values, typer's OptionInfo
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _plain(markdown: str) -> str:
    return _LINK.sub(r"\1", markdown).replace("`", "")


def _extra(field: FieldInfo) -> dict[str, str]:
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return {name: str(value) for name, value in extra.items()}


def _default(field: FieldInfo) -> str:
    """Returns the default in Markdown: the value, or its meaning where it is empty."""
    from pydantic import ByteSize

    value = field.default
    if value is None or value in ((), {}, ""):
        return _extra(field)["unset"]
    if isinstance(value, ByteSize) and value:
        return f"`{value.human_readable(separator='').replace('.0', '')}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def settings_table() -> str:
    """Returns every setting, its default and its meaning as a Markdown table, ending in a newline."""
    from app.config.settings import Settings

    lines = ["| setting | default | |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        more = _extra(field)["more"]
        text = f"{field.title}; {more}" if more else field.title
        lines.append(f"| `{name}` | {_default(field)} | {text} |")
    return "\n".join(lines) + "\n"


def settings() -> None:
    """Print every setting with its default, as a Markdown table."""
    typer.echo(settings_table(), nl=False)
