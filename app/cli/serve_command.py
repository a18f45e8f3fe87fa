"""`ponder serve`, its options made from the settings, and `ponder settings`, the table of docs/operations.md.

Tables of the configuration file that no option names (`databases`, `mcp`, `efforts`, `remote`) are for the file alone.
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
_METAVARS = {"int": "N", "float": "NUMBER", "ByteSize": "SIZE", "Path": "PATH", "SecretStr": "URL"}
_PANELS = ("Server", "Limits", "Engine")  # of --help, in its order


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
    from app.config.load import RENAMED
    from app.config.settings import Settings

    options = [_config_option()]
    for name, field in Settings.model_fields.items():
        if not _is_table(field) or _extra(field)["flag"]:
            options.append(_option(name, field))
    options += [_parameter(name, str, typer.Option(_flag(name), hidden=True, show_default=False)) for name in RENAMED]
    options.sort(key=lambda option: _PANELS.index(_panel(option.name)))

    def run(**values: Any) -> None:
        from app.config import unknown_variables

        settings = settings_of(values.pop("config"), serving=True, **values)
        for name in unknown_variables():
            typer.echo(f"Warning: {name} is set, but is no setting of Ponder's.", err=True)
        from app.cli.serve import serve as serve_until_stopped

        or_explain(serve_until_stopped, settings)

    # typer makes a command's options from its signature and annotations, and its help from its docstring.
    run.__doc__ = serve.__doc__
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # inspect's; not in typeshed
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _is_table(field: FieldInfo) -> bool:
    """Returns whether a setting's value is a table, or a list of tables."""
    inside = get_args(field.annotation)[:1]
    return get_origin(field.annotation) is dict or any(hasattr(each, "model_fields") for each in inside)


def _panel(setting: str) -> str:
    """Returns the panel of --help that a setting's option is in."""
    from app.config.engine_settings import EngineSettings
    from app.config.sections import LimitSettings

    if setting in EngineSettings.model_fields:
        return "Engine"
    if setting in LimitSettings.model_fields:
        return "Limits"
    return "Server"


def _flag(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def _config_option() -> inspect.Parameter:
    option = typer.Option(
        metavar="FILE", help=r"Configuration file \[ponder.toml, if there is one]", rich_help_panel="Server"
    )
    return _parameter("config", Path, option)


def _option(setting: str, field: FieldInfo) -> inspect.Parameter:
    """Returns the option of a setting: a switch, one that is repeatable, or one with a value, which pydantic parses."""
    is_literal = get_origin(field.annotation) is Literal
    choices = [str(choice) for choice in get_args(field.annotation)] if is_literal else []
    one = any(hasattr(each, "model_fields") for each in get_args(field.annotation))  # a table's main value
    repeatable = "" if one else _extra(field)["flag"]  # such an option has a name of its own
    text = _plain(field.title or "")
    if choices:
        text += f" ({', '.join(choices[:-1])} or {choices[-1]})"
    text = f"{text[:1].upper()}{text[1:]}".replace("[", r"\[")
    default = _plain(_default(field))
    if default and not repeatable and default != "none":
        text += rf" \[{default}]"
    if repeatable:
        text += ". Repeatable."
    shown: dict[str, Any] = {"help": text, "rich_help_panel": _panel(setting), "show_default": False}
    flag = _flag(setting)
    if field.annotation is bool:
        return _parameter(setting, bool, typer.Option(f"{flag}/--no-{flag[2:]}", **shown))
    if repeatable:
        paths = Path in get_args(field.annotation)
        metavar = "NAME=DIR|NAME" if get_origin(field.annotation) is dict else "DIR" if paths else "TEXT"
        return _parameter(setting, list[str], typer.Option(repeatable, metavar=metavar, **shown))
    if one:
        metavar = "JSON" if _extra(field)["flag"].endswith("-config") else "URL"
        return _parameter(setting, str, typer.Option(_extra(field)["flag"], metavar=metavar, **shown))
    metavar = "NAME" if choices else _metavar(field.annotation)
    return _parameter(setting, str, typer.Option(flag, metavar=metavar, **shown))


def _metavar(annotation: Any) -> str:  # Any: a type, or one or None
    some = [kind for kind in (annotation, *get_args(annotation)) if kind is not type(None)]
    return _METAVARS.get(getattr(some[-1], "__name__", ""), "TEXT")


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
