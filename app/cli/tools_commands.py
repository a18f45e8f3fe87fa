"""The words of `ponder tools`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.explained import Config, DataDir, or_explain, settings_of

tools = typer.Typer(name="tools", help="The tools that models may call: list them, run one, write one.")


@tools.command("list")
def tools_list(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as GET /api/tools answers.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """List the tools there are: name, permission, origin, description."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli import tools as work

    or_explain(work.list_tools, as_json, settings)


@tools.command("call")
def tools_call(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tool.")],
    arguments: Annotated[str, typer.Argument(metavar="JSON", help="Its arguments, as a JSON object.")] = "{}",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Approve the call, and ask nothing.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Run one tool and print its result. What writes or executes asks first."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli import tools as work

    raise typer.Exit(or_explain(work.call_tool, name, arguments, yes, settings))


@tools.command("new")
def tools_new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tool's name, as of a Python function.")],
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help=r"Where. \[the plugins' folder]", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Write a plugin and a test of it, to begin with."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli import tools as work

    for file in or_explain(work.new_plugin, name, folder, settings):
        typer.echo(file)


@tools.command("mcp")
def tools_mcp(data_dir: DataDir = None, config: Config = None) -> None:
    """Serve the tools over MCP, on standard input and output."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli import tools as work

    or_explain(work.serve_mcp, settings)
