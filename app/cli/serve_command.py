"""The words of `ponder serve`: an option for each setting, named as the setting is; tables are for the file alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.errors import or_explain, settings_of


def _option(help: str, metavar: str, panel: str, *names: str) -> Any:  # Any: typer's OptionInfo, untyped there too
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, show_default=False)


_SERVER, _LIMITS, _ENGINE = "Server", "Limits", "Engine"


def _joined(values: list[str] | None) -> str | None:
    return ",".join(values) if values else None


def serve(
    model: Annotated[str | None, _option(r"What to serve. \[models/pebble]", "DIR|NAME", _SERVER)] = None,
    host: Annotated[str | None, _option(r"Address to listen on. \[127.0.0.1]", "ADDRESS", _SERVER)] = None,
    port: Annotated[str | None, _option(r"Port; 0 picks a free one. \[8000]", "PORT", _SERVER)] = None,
    data_dir: Annotated[
        str | None,
        _option("Where chats and documents are kept. [the user's data directory]".replace("[", r"\["), "DIR", _SERVER),
    ] = None,
    config: Annotated[
        Path | None, _option(r"Configuration file. \[ponder.toml, if there is one]", "FILE", _SERVER)
    ] = None,
    served_model_name: Annotated[
        str | None, _option("The model's name for clients. [its directory's]".replace("[", r"\["), "NAME", _SERVER)
    ] = None,
    also: Annotated[
        list[str] | None, _option("A further model to serve under this name. Repeatable.", "NAME=DIR|NAME", _SERVER)
    ] = None,
    router: Annotated[
        str | None,
        _option(r"The models that `auto` asks, in order. \[all, the smallest first]", "NAME,NAME", _SERVER),
    ] = None,
    router_gate: Annotated[
        str | None,
        _option(r"What an answer is judged by: confidence, entropy or whole. \[confidence]", "GATE", _SERVER),
    ] = None,
    router_bar: Annotated[
        str | None, _option("What it must measure to be given. [by the gate]".replace("[", r"\["), "NUMBER", _SERVER)
    ] = None,
    tool_dialect: Annotated[
        str | None,
        _option(r"How the model writes tool calls: auto, hermes, llama3_json, qwen3_coder or mistral. \[auto]",
                "DIALECT", _SERVER),
    ] = None,
    auth: Annotated[
        str | None, _option(r"Who may use it: off (everybody) or keys. \[off]", "HOW", _SERVER)
    ] = None,
    cors_origin: Annotated[
        list[str] | None, _option("A web origin that may call this server. Repeatable.", "ORIGIN", _SERVER)
    ] = None,
    allowed_host: Annotated[
        list[str] | None, _option("A host name that is ours, say behind a proxy. Repeatable.", "NAME", _SERVER)
    ] = None,
    max_connections: Annotated[
        str | None, _option("Connections at once. [20000, or what the system allows]".replace("[", r"\["), "N", _SERVER)
    ] = None,
    embedder: Annotated[
        str | None,
        _option(r"A sentence-transformers model, by name or directory, for documents. \[all-MiniLM-L6-v2]",
                "NAME|DIR", _SERVER),
    ] = None,
    max_upload: Annotated[
        str | None, _option(r"Most that one upload may bring. \[200MiB]", "SIZE", _SERVER)
    ] = None,
    plugins: Annotated[
        str | None, _option("Where tool plugins are. [DATA-DIR/plugins]".replace("[", r"\["), "DIR", _SERVER)
    ] = None,
    searxng: Annotated[
        str | None, _option("Address of a SearXNG server, for searching the web.", "URL", _SERVER)
    ] = None,
    web: Annotated[
        bool | None,
        typer.Option("--web/--no-web", help=r"Tools may fetch public pages. \[on]", rich_help_panel=_SERVER,
                     show_default=False),
    ] = None,
    sandbox: Annotated[
        bool | None,
        typer.Option("--sandbox/--no-sandbox", help=r"A tool may run Python in a jail. \[on]", rich_help_panel=_SERVER,
                     show_default=False),
    ] = None,
    tool_steps: Annotated[
        str | None, _option(r"Turns of an answer that may call tools. \[8]", "N", _SERVER)
    ] = None,
    tool_seconds: Annotated[
        str | None, _option(r"Seconds of an answer with tools. \[300]", "SECONDS", _SERVER)
    ] = None,
    thinking_text: Annotated[
        str | None, _option(r"What is seen of thinking: shown, summarised or hidden. \[shown]", "HOW", _SERVER)
    ] = None,
    summary_model: Annotated[
        str | None, _option("The served model that writes summaries. [the first]".replace("[", r"\["), "NAME", _SERVER)
    ] = None,
    strategy_branches: Annotated[
        str | None, _option(r"Sequences of a strategy side by side. \[64]", "N", _SERVER)
    ] = None,
    strategy_nodes: Annotated[
        str | None, _option(r"Nodes of a strategy's search. \[2000]", "N", _SERVER)
    ] = None,
    strategy_seconds: Annotated[
        str | None, _option(r"Seconds of an answer's strategy. \[600]", "SECONDS", _SERVER)
    ] = None,
    storage_per_user: Annotated[
        str | None, _option(r"Files of one user's documents together. \[4GiB with --auth keys]", "SIZE", _SERVER)
    ] = None,
    sequences_per_user: Annotated[
        str | None, _option(r"Sequences that one user may hold open. \[256]", "N", _SERVER)
    ] = None,
    sequence_tokens_per_user: Annotated[
        str | None, _option(r"Tokens of a user's open sequences together. \[262144]", "TOKENS", _SERVER)
    ] = None,
    sequence_lease_s: Annotated[
        str | None, _option(r"Longest lease of an open sequence. \[600]", "SECONDS", _SERVER)
    ] = None,
    mcp_idle_s: Annotated[
        str | None, _option(r"When an MCP session without a request ends. \[1800]", "SECONDS", _SERVER)
    ] = None,
    drain_s: Annotated[
        str | None, _option(r"What runs may go on so long after SIGTERM. \[5]", "SECONDS", _SERVER)
    ] = None,
    requests_per_minute: Annotated[
        str | None, _option("Requests of one key in a minute. [no limit]".replace("[", r"\["), "N", _LIMITS)
    ] = None,
    tokens_per_minute: Annotated[
        str | None, _option("Tokens of one key in a minute. [no limit]".replace("[", r"\["), "TOKENS", _LIMITS)
    ] = None,
    concurrent_requests: Annotated[
        str | None, _option("Requests of one key at the same time. [no limit]".replace("[", r"\["), "N", _LIMITS)
    ] = None,
    max_output_tokens: Annotated[
        str | None, _option(r"Tokens of one answer, thinking included. \[no limit]", "TOKENS", _LIMITS)
    ] = None,
    deadline_s: Annotated[
        str | None, _option(r"Seconds that one answer may take. \[no limit]", "SECONDS", _LIMITS)
    ] = None,
    max_wait_s: Annotated[
        str | None, _option(r"Waiting from which on requests are refused. \[60]", "SECONDS", _LIMITS)
    ] = None,
    reduce: Annotated[
        bool | None,
        typer.Option("--reduce/--no-reduce", help=r"Shorter answers before any is refused. \[on]",
                     rich_help_panel=_LIMITS, show_default=False),
    ] = None,
    reduce_wait_s: Annotated[
        str | None, _option("Waiting from which on answers are shorter. [a quarter of --max-wait-s]"
                            .replace("[", r"\["), "SECONDS", _LIMITS)
    ] = None,
    reduced_thinking: Annotated[
        str | None, _option(r"Tokens of thinking that are left then. \[256]", "TOKENS", _LIMITS)
    ] = None,
    log_level: Annotated[
        str | None, _option(r"debug, info, warning or error. \[warning]", "LEVEL", _SERVER)
    ] = None,
    log_format: Annotated[str | None, _option(r"text, or json: a line of JSON each. \[text]", "FORM", _SERVER)] = None,
    slo_ttft_ms: Annotated[
        str | None, _option(r"Goodput: milliseconds to the first token. \[2000]", "MS", _SERVER)
    ] = None,
    slo_itl_ms: Annotated[
        str | None, _option(r"Goodput: milliseconds between two tokens. \[200]", "MS", _SERVER)
    ] = None,
    price_per_hour: Annotated[
        str | None, _option("What an hour of the machine costs, for the cost of tokens.", "PRICE", _SERVER)
    ] = None,
    device: Annotated[str | None, _option(r"auto, cpu, cuda or cuda:N. \[auto]", "DEVICE", _ENGINE)] = None,
    dtype: Annotated[
        str | None, _option(r"auto, float32, bfloat16 or float16. \[auto]", "TYPE", _ENGINE)
    ] = None,
    max_model_len: Annotated[
        str | None, _option("Tokens of context. [what the model allows]".replace("[", r"\["), "TOKENS", _ENGINE)
    ] = None,
    kv_bytes: Annotated[
        str | None, _option("Memory for the KV cache, such as 2GiB. [chosen by the machine's]".replace("[", r"\["),
                            "SIZE", _ENGINE)
    ] = None,
    kv_blocks: Annotated[str | None, _option("The same, as a number of blocks.", "N", _ENGINE)] = None,
    kv_tenant_share: Annotated[
        str | None, _option(r"Of the KV cache, that a user may have when others want it. \[1]", "SHARE", _ENGINE)
    ] = None,
    kv_dtype: Annotated[
        str | None, _option(r"auto, int8 or fp8: twice as many tokens, a little less exact. \[auto]", "TYPE", _ENGINE)
    ] = None,
    kv_host_bytes: Annotated[
        str | None, _option("Memory for KV that a GPU's cache gives up, such as 16GiB.", "SIZE", _ENGINE)
    ] = None,
    kv_disk_bytes: Annotated[
        str | None, _option("Disk for KV that the cache gives up, kept over restarts.", "SIZE", _ENGINE)
    ] = None,
    block_size: Annotated[str | None, _option(r"Tokens in a KV block. \[16]", "TOKENS", _ENGINE)] = None,
    max_batch_tokens: Annotated[
        str | None, _option(r"Tokens through the model in one step. \[512, on a GPU 8192]", "TOKENS", _ENGINE)
    ] = None,
    max_running: Annotated[str | None, _option(r"Sequences in one step. \[64]", "N", _ENGINE)] = None,
    max_waiting: Annotated[
        str | None, _option(r"Sequences that may wait before others are turned away. \[1024]", "N", _ENGINE)
    ] = None,
    policy: Annotated[
        str | None, _option(r"Who runs in a step, see docs/operations.md. \[decode-first]", "NAME", _ENGINE)
    ] = None,
    itl_goal_s: Annotated[
        str | None, _option("Seconds between two tokens that reading prompts must not exceed.", "SECONDS", _ENGINE)
    ] = None,
    kernels: Annotated[
        str | None, _option(r"auto: our own where they run the model; torch; or triton. \[auto]", "NAME", _ENGINE)
    ] = None,
    quantization: Annotated[
        str | None, _option(r"int8 (AMX, CUDA) or int4 (CUDA): weights rounded at load. \[none]", "NAME", _ENGINE)
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option("--deterministic/--no-deterministic",
                     help=r"Give a request the same bits whatever else runs. \[off]",
                     rich_help_panel=_ENGINE, show_default=False),
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option("--prefix-cache/--no-prefix-cache", help=r"Reuse KV of equal prompt beginnings. \[on]",
                     rich_help_panel=_ENGINE, show_default=False),
    ] = None,
    threads: Annotated[str | None, _option("CPU threads of the model.", "N", _ENGINE)] = None,
    loop: Annotated[
        str | None, _option(r"plain, or overlapped: replies are made during the next step. \[auto]", "NAME", _ENGINE)
    ] = None,
    engine: Annotated[
        str | None, _option(r"Where the engine runs: thread, or process. \[thread]", "WHERE", _ENGINE)
    ] = None,
    api_workers: Annotated[
        str | None, _option(r"Processes that answer /v1; more than 1 need --engine process. \[1]", "N", _ENGINE)
    ] = None,
    engine_hang_s: Annotated[
        str | None, _option(r"Silence after which the engine's process is killed. \[60]", "SECONDS", _ENGINE)
    ] = None,
) -> None:  # fmt: skip
    """Serve a model: the chat page, its API, and OpenAI's API under /v1."""
    given = dict(locals())
    cors_origins, allowed_hosts = _joined(given.pop("cors_origin")), _joined(given.pop("allowed_host"))
    settings = settings_of(
        given.pop("config"), serving=True, models=given.pop("also"), cors_origins=cors_origins,
        allowed_hosts=allowed_hosts, **given,
    )  # fmt: skip
    from app.config import unknown_variables

    for name in unknown_variables():
        typer.echo(f"Warning: {name} is set, but is no setting of Ponder's.", err=True)
    from app.cli.serve import serve as run

    or_explain(run, settings)
