"""The commands of `ponder documents`, `keys`, `tools`, `backup`, `route`, `kv-store` and `deploy`.

Only arguments and help are here. Each command imports its work when it runs, so `ponder --help` loads no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from app.cli.errors import Config, DataDir, fail, or_explain, settings_of

Scopes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SCOPE", help=r"What it is for, repeatable: chat, v1, sequences, documents, tools, metrics, operator. "
        r"\[all]", show_default=False,
    ),
]  # fmt: skip
Quotas = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=N", help="What it may cost, repeatable: requests_per_minute, tokens_per_minute, "
        "concurrent_requests, requests_per_day, tokens_per_day, tokens_per_month, priority, deadline_s, "
        "max_output_tokens.", show_default=False,
    ),
]  # fmt: skip

Models = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES", help="The models and adapters that it is for, comma-separated, by their own names; all: every "
        "one.", show_default=False,
    ),
]  # fmt: skip

keys = typer.Typer(name="keys", help="API keys, which a server with --auth keys asks for: make, list, revoke.")


@keys.command("create")
def keys_create(
    user: Annotated[str, typer.Option(metavar="ID", help="Whose; made if need be. `local` is whose all is so far.")],
    role: Annotated[
        str | None, typer.Option(metavar="ROLE", help=r"A new user's: operator or user. \[user]", show_default=False)
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help=r"Until when, such as 30d or 12h. \[ever]", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option(metavar="TEXT", help="What it is for, such as laptop.", show_default=False)] = "",
    scope: Scopes = None,
    quota: Quotas = None,
    models: Models = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as POST /api/operator/keys answers.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Make a key and print it. It is not shown again."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli import keys as work

    or_explain(work.create, user, role, expires, name, scope, quota, models, as_json, settings)


@keys.command("list")
def keys_list(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as GET /api/operator/keys answers.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """List the keys: whose they are, how they begin, until when they are valid, when they were last used."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli import keys as work

    or_explain(work.list_keys, as_json, settings)


@keys.command("revoke")
def keys_revoke(
    id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, or how it begins, as `keys list` has them.")],
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """End a key, and the sessions that it opened. It holds at once, also for a server that runs."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli import keys as work

    or_explain(work.revoke, id, settings)


@keys.command("change")
def keys_change(
    id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, or how it begins, as `keys list` has them.")],
    scope: Scopes = None,
    quota: Quotas = None,
    models: Models = None,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Change what a key is for (--scope all: everything) and what it may cost (--quota NAME=none: no limit)."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli import keys as work

    or_explain(work.change, id, scope, quota, models, settings)


@keys.command("disable")
def keys_disable(
    user: Annotated[str, typer.Argument(metavar="USER", help="Whose keys are to be valid no more.")],
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Let a user in no more, and end their sessions. What is theirs stays."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli import keys as work

    or_explain(work.disable, user, True, settings)


@keys.command("enable")
def keys_enable(
    user: Annotated[str, typer.Argument(metavar="USER", help="Whose keys are to be valid again.")],
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Let a user in again who was disabled."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli import keys as work

    or_explain(work.disable, user, False, settings)


documents = typer.Typer(name="documents", help="The documents that were indexed or uploaded: list, delete.")


@documents.command("list")
def documents_list(
    collection: Annotated[
        str | None, typer.Option(metavar="NAME", help=r"Those of this one. \[all]", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as GET /api/documents answers.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """List the documents, the newest first: id, name, collection, kind, size, chunks."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli.documents import documents_command as work

    or_explain(work.list_documents, collection, as_json, settings)


@documents.command("delete")
def documents_delete(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME…", help="Names or ids, as `documents list` has them.", show_default=False),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="PATH", help="All that was indexed from this folder.", show_default=False)
    ] = None,
    collection: Annotated[
        str | None, typer.Option(metavar="NAME", help=r"In this one. \[all]", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Delete documents from the index. The files that they were read from stay."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli.documents import documents_command as work

    or_explain(work.delete, names or [], folder, collection, settings)


tools = typer.Typer(name="tools", help="The tools that models may call: list them, run one, write one.")


@tools.command("list")
def tools_list(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as GET /api/tools answers.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """List the tools there are: name, permission, origin, description."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli import tools_command as work

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
    from app.cli import tools_command as work

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
    from app.cli import tools_command as work

    for file in or_explain(work.new_plugin, name, folder, settings):
        typer.echo(file)


@tools.command("mcp")
def tools_mcp(data_dir: DataDir = None, config: Config = None) -> None:
    """Serve the tools over MCP, on standard input and output."""
    settings = settings_of(config, data_dir=data_dir)
    from app.cli import tools_command as work

    or_explain(work.serve_mcp, settings)


skills = typer.Typer(name="skills", help="Skills in the Agent Skills format: check them.")


@skills.callback()
def _skills() -> None:
    """Keeps `check` a command of its own: typer runs a single command without its name."""


@skills.command("check")
def skills_check(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR…", help="Skills, or folders with skills in them.", show_default=False)
    ],
) -> None:
    """Check skills as a server loads them: each folder with what is wrong and what would be accepted."""
    from app.cli import tools_command as work

    raise typer.Exit(or_explain(work.check_skills, folders))


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


def route(
    replica: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[,EVENTS[,REPLAY]]", show_default=False,
            help="A server, and the endpoints of its K/V events: http://a:8000,tcp://a:5557,tcp://a:5558. Repeatable.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="The port; 0 for any free one.")] = 8080,
    policy: Annotated[
        Literal["prefix_aware", "least_loaded", "round_robin", "random"] | None,
        typer.Option(
            metavar="NAME", help="prefix_aware, least_loaded, round_robin or random. "
            r"\[prefix_aware where all replicas have EVENTS, else least_loaded]", show_default=False,
        ),
    ] = None,
    shared_state: Annotated[
        bool, typer.Option("--shared-state", help="All replicas have one database: chats go on at another one.")
    ] = False,
    health_s: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.05, max=3600, help="Between two health checks of a replica.")
    ] = 2.0,
    drain_s: Annotated[
        int, typer.Option(metavar="SECONDS", min=0, max=86_400, help="That answers may go on after SIGTERM.")
    ] = 30,
    admin_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help=r"What /drain, /replicas and /metrics ask for. \[they answer this machine alone]",
            envvar="PONDER_ROUTER_KEY", show_default=False,
        ),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[,HOST:PORT]", show_default=False,
            help="A server that reads prompts for the others, and where its K/V is: http://c:8000,c:14579. Repeatable.",
        ),
    ] = None,
    both: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[,HOST:PORT]", show_default=False,
            help="A server that answers, or reads prompts for others while all --prefill ones are busy. Repeatable.",
        ),
    ] = None,
    min_remote_tokens: Annotated[
        int, typer.Option(metavar="TOKENS", min=1, help="Of a prompt that a --prefill server reads.")
    ] = 512,
    max_ttft_s: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.001, show_default=False,
                     help="Refuse a request whose first token is predicted to take longer."),
    ] = None,
    max_tpot_s: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.0001, show_default=False,
                     help="Refuse a request whose other tokens are predicted to take longer each."),
    ] = None,
) -> None:  # fmt: skip
    """Send requests to one of several servers: where the prompt's beginning is cached, and below a load cap."""
    from app.cli.route_command import RouteOptions, run
    from app.routing.disaggregation import Objectives

    options = RouteOptions(
        tuple(replica or ()), host, port, policy, shared_state, health_s, drain_s, admin_key, tuple(prefill or ()),
        Objectives(max_ttft_s, max_tpot_s), min_remote_tokens, tuple(both or ()),
    )  # fmt: skip
    or_explain(run, options)


def kv_store(
    secret_file: Annotated[
        str,
        typer.Option(metavar="FILE", help="The secret of the servers' kv_transfer: at least 16 bytes, alike on all."),
    ],
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Of blocks in memory, such as 8GiB.")] = "1GiB",
    disk: Annotated[
        str, typer.Option(metavar="SIZE", help="Of blocks in --dir, for what memory gives up; 0 for none.")
    ] = "0",
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Where --disk keeps blocks.", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="For K/V; 0 for any free one.")] = 14580,
    metrics_port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="For /health and /metrics over HTTP; 0: any free one.")
    ] = 14581,
) -> None:  # fmt: skip
    """Keep K/V for several servers: what one has computed is found by another, and outlives it."""
    from app.cli.kv_store_command import KVStoreOptions, run

    or_explain(run, KVStoreOptions(secret_file, memory, disk, directory, host, port, metrics_port))


deploy = typer.Typer(name="deploy", help="Several servers that are started, watched and scaled.")


@deploy.callback()
def _deploy() -> None:
    pass


@deploy.command("ray", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def deploy_ray(
    context: typer.Context,
    min_replicas: Annotated[int, typer.Option(metavar="N", min=1, help="Servers that there are at least.")] = 1,
    max_replicas: Annotated[int, typer.Option(metavar="N", min=1, help="Servers that there are at most.")] = 4,
    target_requests: Annotated[
        float, typer.Option(metavar="N", help="Requests of a server, on average, waiting ones included.")
    ] = 8.0,
    target_kv_used: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of its KV blocks that sequences hold, on average.")
    ] = 0.7,
    cpus: Annotated[float, typer.Option(metavar="N", min=0, help="CPUs that Ray reserves for a server.")] = 1.0,
    gpus: Annotated[float, typer.Option(metavar="N", min=0, help="GPUs that Ray reserves for a server.")] = 0.0,
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="The port.")] = 8000,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the file for `serve deploy`, and deploy nothing.")
    ] = False,
) -> None:
    """Deploy servers on Ray Serve, scaled by requests and KV memory. What follows `--` are options of `serve`."""
    if min_replicas > max_replicas:
        fail(f"--min-replicas is {min_replicas}; accepted: at most --max-replicas, {max_replicas}.", 2)
    arguments: dict[str, Any] = {
        "options": context.args, "min_replicas": min_replicas, "max_replicas": max_replicas,
        "target_requests": target_requests, "target_kv_used": target_kv_used, "cpus": cpus, "gpus": gpus,
    }  # fmt: skip
    from app.cli.route_command import deploy_on_ray, ray_config

    if print_config:
        typer.echo(ray_config(arguments, host, port), nl=False)
    else:
        or_explain(deploy_on_ray, arguments, host, port)
