"""Helpers that the commands share: settings from their sources, and refusals printed as a sentence.

Imports nothing that `ponder --help` has no use for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from app.config import Settings

T = TypeVar("T")

DataDir = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help=r"Where chats, documents and users are kept. \[as for `serve`]", show_default=False
    ),
]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help=r"Configuration file. \[as for `serve`]", show_default=False)
]


def settings_of(config: Path | None, *, serving: bool = False, **flags: Any) -> Settings:
    """`serving`: settings of a server alone are checked, too."""
    from app.config import BadSetting, load_settings

    try:
        settings = load_settings(config, **flags)
        settings.check_chunks()
        if serving:
            settings.check_models()
            settings.check_limits()
            settings.check_processes()
            settings.check_servers()
        return settings
    except BadSetting as error:
        fail(str(error), 2)


def or_explain(work: Callable[..., T], *arguments: Any) -> T:
    """Runs `work` and returns its result; a refusal becomes a sentence and exit code 1."""
    from app.config import BadSetting

    try:
        return work(*arguments)
    except BadSetting as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as error:
        from engine.errors import EngineError

        if not isinstance(error, EngineError):
            raise
        fail(str(error), 1)


def printable(text: str, keep: str = "\n\t") -> str:
    """Returns the text for a terminal: U+FFFD for each control character, but those to `keep`."""
    return "".join(c if c.isprintable() or c in keep else "�" for c in text)


def fail(message: str, code: int) -> NoReturn:
    typer.echo(f"ponder: {message}", err=True)
    raise typer.Exit(code)
