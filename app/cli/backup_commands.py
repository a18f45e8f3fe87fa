"""The words of `ponder backup`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.explained import Config, DataDir, or_explain, settings_of

backup = typer.Typer(
    name="backup", help="Copies of the data directory, made while a server runs: make, verify, put back.",
    no_args_is_help=True,
)  # fmt: skip


@backup.command("create")
def backup_create(
    to: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH", help=r"A file ending in .tar.gz, or a new folder. \[DATA-DIR/backups/ponder-DATE.tar.gz]",
            show_default=False,
        ),
    ] = None,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:  # fmt: skip
    """Copy all that can't be made again: databases, uploaded files, plugins. It holds secrets: only you may read it."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli import backup as work

    or_explain(work.create, to, settings)


@backup.command("verify")
def backup_verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A backup: the file or the folder.")],
) -> None:
    """Compare every file of a backup with its digest."""
    from app.cli import backup as work

    or_explain(work.verify, path)


@backup.command("restore")
def backup_restore(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PATH", help=r"A backup. \[the newest in DATA-DIR/backups]", show_default=False),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=r"Put back this alone, such as ponder.db or documents. Repeatable. \[all]",
                     show_default=False),
    ] = None,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:  # fmt: skip
    """Put a backup in the place of what is there, which is kept beside it. The server must be stopped."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli import backup as work

    or_explain(work.restore, path, only, settings)
