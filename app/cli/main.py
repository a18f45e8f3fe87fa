"""The command line: `ponder serve`, `chat`, `index`, `search`, `tools`, `keys`, `eval`, `bench`. Also `app.cli`.

Options are checked where settings are (app/config/), so that a flag, a variable and the file complain alike; here
they are only named. Imports are made by the command that needs them: `ponder --help` loads no torch.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from app.cli.explained import DataDir, fail, or_explain, settings_of
from app.cli.keys_commands import keys
from app.cli.tools_commands import tools

cli = typer.Typer(
    name="ponder",
    help="A chat server that thinks, on an inference engine of its own.",
    epilog="Every option of `serve` is also a variable (PONDER_PORT) and a key of ponder.toml (port = 8000).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        try:
            typer.echo(f"ponder {importlib.metadata.version('ponder')}")
        except importlib.metadata.PackageNotFoundError:
            typer.echo("ponder (not installed)")
        raise typer.Exit


@cli.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


def _option(help: str, metavar: str, panel: str, *names: str) -> Any:  # Any: typer's OptionInfo, untyped there too
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, show_default=False)


_SERVER, _ENGINE = "Server", "Engine"


@cli.command()
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
    sequences_per_user: Annotated[
        str | None, _option(r"Sequences that one user may hold open. \[256]", "N", _SERVER)
    ] = None,
    sequence_tokens_per_user: Annotated[
        str | None, _option(r"Tokens of a user's open sequences together. \[262144]", "TOKENS", _SERVER)
    ] = None,
    sequence_lease_s: Annotated[
        str | None, _option(r"Longest lease of an open sequence. \[600]", "SECONDS", _SERVER)
    ] = None,
    drain_s: Annotated[
        str | None, _option(r"What runs may go on so long after SIGTERM. \[5]", "SECONDS", _SERVER)
    ] = None,
    log_level: Annotated[
        str | None, _option(r"debug, info, warning or error. \[warning]", "LEVEL", _SERVER)
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
    block_size: Annotated[str | None, _option(r"Tokens in a KV block. \[16]", "TOKENS", _ENGINE)] = None,
    max_batch_tokens: Annotated[
        str | None, _option(r"Tokens through the model in one step. \[512]", "TOKENS", _ENGINE)
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
    prefix_cache: Annotated[
        bool | None,
        typer.Option("--prefix-cache/--no-prefix-cache", help=r"Reuse KV of equal prompt beginnings. \[on]",
                     rich_help_panel=_ENGINE, show_default=False),
    ] = None,
    threads: Annotated[str | None, _option("CPU threads of the model.", "N", _ENGINE)] = None,
    engine: Annotated[
        str | None, _option(r"Where the engine runs: thread, or process. \[thread]", "WHERE", _ENGINE)
    ] = None,
    engine_hang_s: Annotated[
        str | None, _option(r"Silence after which the engine's process is killed. \[60]", "SECONDS", _ENGINE)
    ] = None,
) -> None:  # fmt: skip
    """Serve a model: the chat page, its API, and OpenAI's API under /v1."""
    settings = settings_of(
        config, serving=True, model=model, host=host, port=port, data_dir=data_dir, served_model_name=served_model_name,
        models=also, router=router, router_gate=router_gate, router_bar=router_bar,
        tool_dialect=tool_dialect, embedder=embedder, max_upload=max_upload, plugins=plugins, searxng=searxng, web=web,
        sandbox=sandbox, tool_steps=tool_steps, tool_seconds=tool_seconds, thinking_text=thinking_text,
        summary_model=summary_model, strategy_branches=strategy_branches, strategy_nodes=strategy_nodes,
        strategy_seconds=strategy_seconds,
        sequences_per_user=sequences_per_user, sequence_tokens_per_user=sequence_tokens_per_user,
        sequence_lease_s=sequence_lease_s,
        auth=auth, cors_origins=_joined(cors_origin), allowed_hosts=_joined(allowed_host), log_level=log_level,
        device=device, dtype=dtype, max_model_len=max_model_len, kv_bytes=kv_bytes, kv_blocks=kv_blocks,
        block_size=block_size,
        max_batch_tokens=max_batch_tokens, max_running=max_running, max_waiting=max_waiting,
        policy=policy, itl_goal_s=itl_goal_s, prefix_cache=prefix_cache, threads=threads,
        engine=engine, engine_hang_s=engine_hang_s, drain_s=drain_s,
    )  # fmt: skip
    from app.config import unknown_variables

    for name in unknown_variables():
        typer.echo(f"Warning: {name} is set, but is no setting of Ponder's.", err=True)
    from app.cli.serve import serve as run

    or_explain(run, settings)


@cli.command()
def chat(
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="A server to talk to.", show_default="http://127.0.0.1:8000")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR|NAME", help="No server: load this model here.", show_default=False)
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="An API key, for a server that asks for one.", envvar="PONDER_API_KEY"),
    ] = None,
) -> None:
    """Chat in the terminal. Ctrl-C stops an answer; /new starts over; /exit leaves."""
    if url is not None and model is not None:
        fail("--url and --model exclude each other: a server brings its own model.", 2)
    settings = None if model is None else settings_of(None, model=model)
    from app.cli.terminal import converse

    or_explain(converse, url, settings, key)


@cli.command()
def index(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Files, and folders with all that is in them.")],
    collection: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=r"Where to put them; made if need be. \[Documents]", show_default=False),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Index documents, so that chats and searches find them. Again: only what changed is read."""
    settings = settings_of(None, data_dir=data_dir)
    from app.cli import library

    raise typer.Exit(or_explain(library.index, paths, collection, settings))


@cli.command()
def search(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="A question, or words.")],
    limit: Annotated[int, typer.Option(metavar="N", help="Most passages to show.", min=1, max=1000)] = 10,
    collection: Annotated[
        str | None, typer.Option(metavar="NAME", help=r"Search this one. \[all]", show_default=False)
    ] = None,
    rerank: Annotated[bool, typer.Option("--rerank", help="Compare the best word by word: slower.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as POST /api/search answers.")] = False,
    data_dir: DataDir = None,
) -> None:  # fmt: skip
    """Search the documents that were indexed or uploaded."""
    settings = settings_of(None, data_dir=data_dir)
    from app.cli import library

    or_explain(library.search, query, limit, collection, rerank, as_json, settings)


@cli.command()
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace, as GET /api/runs/{id}/trace gives it.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help=r"A model directory, or a Hugging Face Hub name. \[as for `serve`]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make a recorded run again, with what its tools gave back then, and compare the tokens."""
    settings = settings_of(None, model=model)
    from app.cli.replay import run

    raise typer.Exit(or_explain(run, file, settings))


evaluations = typer.Typer(name="eval", help="Measure how good Ponder is on your own data.", no_args_is_help=True)
cli.add_typer(evaluations)


@evaluations.callback()
def _evaluations() -> None:
    pass


@evaluations.command("retrieval")
def eval_retrieval(
    beir: Annotated[
        Path,
        typer.Option(metavar="DIR", help="A judged set in BEIR's layout: corpus.jsonl, queries.jsonl, qrels/*.tsv."),
    ],
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help=r"Which qrels. \[test, or the first]", show_default=False)
    ] = None,
    rerank: Annotated[bool, typer.Option("--rerank", help="Rerank the best.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON at the end.")] = False,
) -> None:  # fmt: skip
    """Index a judged set and search for its queries: nDCG@10, MRR@10, recall and latency."""
    settings = settings_of(None)
    from app.cli.evaluation import evaluate

    or_explain(evaluate, beir, split, rerank, as_json, settings)


@evaluations.command("reasoning")
def eval_reasoning(
    tasks: Annotated[
        Path, typer.Argument(metavar="TASKS.jsonl", help='A task a line: {"question": "6 times 7?", "answer": 42}.')
    ],
    model: Annotated[
        str | None, typer.Option(metavar="DIR|NAME", help=r"Whom to ask. \[as for `serve`]", show_default=False)
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:JSON]",
            help="How to answer, such as plain or 'best_of_n:{\"n\": [1, 4]}'; lists are tried one by one. Repeatable.",
        ),
    ] = None,
    effort: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EFFORT|TOKENS", help="none, minimal … xhigh, or the most tokens of thinking. Repeatable."
        ),
    ] = None,
    n: Annotated[
        int | None, typer.Option("-n", metavar="N", min=1, help=r"The first N tasks. \[all]", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="TOKENS", min=2, help="Most tokens of an answer, thinking included.")
    ] = 2048,
    as_json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Keep the rows here; those that are there are not measured again."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw accuracy over tokens, with 95% bands.")
    ] = None,
) -> None:  # fmt: skip
    """Accuracy against tokens spent, for strategies and budgets, on tasks of your own."""
    settings = settings_of(None, model=model)
    from app.cli.reasoning import evaluate

    or_explain(evaluate, tasks, strategy or [], effort or [], n, max_tokens, as_json, plot, settings)


for group in (tools, keys):
    cli.add_typer(group, no_args_is_help=True)


@cli.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Run the benchmarks; options are passed on (`ponder bench --help` lists them)."""
    sys.path.insert(0, os.getcwd())
    if importlib.util.find_spec("bench") is None or importlib.util.find_spec("bench.__main__") is None:
        fail("The benchmarks are not installed here: run this in a checkout of Ponder.", 1)
    sys.argv = ["ponder bench", *context.args]
    runpy.run_module("bench", run_name="__main__", alter_sys=False)


def _leave(*_: object) -> NoReturn:
    # Told to stop before anything began: imports are all that can be interrupted here.
    sys.stdout.flush()
    os._exit(0)


def _joined(values: list[str] | None) -> str | None:
    return ",".join(values) if values else None


def main() -> None:
    if sys.argv[1:2] in (["serve"], ["chat"]):
        # torch's threads wait for each other by spinning. Where anything else needs a core (this server's own event
        # loop does) that made a step up to 80 times slower; sleeping instead costs about a tenth on an idle machine. It
        # must be said before torch is imported; docs/performance.md has the figures.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.argv[1:2] == ["serve"]:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _leave)  # until the server has handlers of its own
    cli()
