"""The command line, also `app.cli`: `ponder serve`, `chat`, `index`, `search`, `tools`, `keys`, `train-lora` …

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
from typing import Annotated, Literal, NoReturn

import typer

from app.cli.commands import backup, deploy, documents, keys, kv_store, route, skills, tools
from app.cli.errors import Config, DataDir, fail, or_explain, settings_of
from app.cli.serve_command import Commands, serve, settings

cli = typer.Typer(
    cls=Commands,
    name="ponder",
    help="A chat server that thinks, on an inference engine of its own.",
    epilog="Every option of `serve` is also a variable (PONDER_PORT) and a key of ponder.toml (port = 8000).",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


cli.command()(serve)
cli.command()(settings)
cli.command()(route)
cli.command("kv-store")(kv_store)


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
    os.umask(0o077)  # what a command writes is its user's alone, and so is what its processes write


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
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="An image to show with the first question; may be given several times."),
    ] = None,
) -> None:
    """Chat in the terminal. Ctrl-C stops an answer; /new starts over; /exit leaves."""
    if url is not None and model is not None:
        fail("--url and --model exclude each other: a server brings its own model.", 2)
    settings = None if model is None else settings_of(None, model=model)
    from app.cli.terminal import converse

    or_explain(converse, url, settings, key, image or [])


@cli.command()
def diffuse(
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help='A prompt, such as "27+5-4 =", or a text, _ for each missing byte.')
    ],
    model: Annotated[
        str, typer.Option(metavar="DIR|NAME", help="A masked-diffusion model, as training makes it.")
    ],
    length: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help=r"Most tokens after a prompt. \[as trained]", show_default=False),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help=r"Places that are filled together. \[the largest trained]",
                     show_default=False),
    ] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(metavar="N", help=r"Places that a pass fills. \[1]", show_default=False)
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(metavar="P", help="Instead: fill all places of this probability or more.", show_default=False),
    ] = None,
    temperature: Annotated[float, typer.Option(metavar="T", help="Of samples; 0 takes the likeliest.")] = 0.0,
    seed: Annotated[int, typer.Option(metavar="SEED", help="Of samples.")] = 0,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to run.")] = "auto",
    passes: Annotated[bool, typer.Option("--passes", help="Print the text after each pass.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each pass, then one.")] = False,
) -> None:  # fmt: skip
    """Fill gaps in any order, several places a pass, with a masked-diffusion model (an experiment)."""

    def run() -> None:
        from app.cli import diffuse_command as work
        from engine.diffusion import DiffuseRequest

        request = DiffuseRequest(text, length, block_size, tokens_per_step, threshold, temperature, seed)
        work.diffuse(model, device, request, passes, as_json)

    or_explain(run)


@cli.command()
def index(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Files, and folders with all that is in them.")],
    collection: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=r"Where to put them; made if need be. \[Documents]", show_default=False),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove the documents whose files are gone from the folders.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Index documents, so that chats and searches find them. Again: only what changed is read."""
    settings = settings_of(None, data_dir=data_dir)
    from app.cli.documents import index_command

    raise typer.Exit(or_explain(index_command.index, paths, collection, prune, settings))


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
    from app.cli.documents import index_command

    or_explain(index_command.search, query, limit, collection, rerank, as_json, settings)


@cli.command()
def migrate(
    data_dir: Annotated[
        str | None,
        typer.Option(
            "--from", "--data-dir", metavar="DIR", help=r"The data directory. \[as for `serve`]", show_default=False
        ),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            "--to", "--database", metavar="URL", help=r"An empty PostgreSQL database. \[as for `serve`]",
            show_default=False,
        ),
    ] = None,
    documents_only: Annotated[
        bool, typer.Option("--documents-only", help="Copy documents alone, beside chats that are there.")
    ] = False,
    config: Config = None,
) -> None:  # fmt: skip
    """Copy chats, runs, users and documents from SQLite into PostgreSQL, all or nothing, with no server on either."""
    settings = settings_of(config, data_dir=data_dir, database=database)
    from app.cli.migrate_command import migrate_to_postgres

    or_explain(lambda given: migrate_to_postgres(given, documents_only=documents_only), settings)


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
    force: Annotated[
        bool, typer.Option("--force", help="Compare even where the numerics or the model's files are others.")
    ] = False,
) -> None:
    """Make a recorded run again, with what its tools gave back then, and compare the tokens."""
    settings = settings_of(None, model=model)
    from app.cli.replay import run

    raise typer.Exit(or_explain(run, file, settings, force))


@cli.command()
def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model directory, or a Hugging Face Hub name.")],
    text: Annotated[
        Path, typer.Option(metavar="FILE", help="What the model is for: .txt, .md, or .jsonl with a chat on each line.")
    ],
    to: Annotated[
        Literal["int8", "int4"] | None,
        typer.Option(metavar="int8|int4", help="The form of weights; with --compare, both.", show_default=False),
    ] = None,
    method: Annotated[
        Literal["rtn", "gptq", "awq", "smoothquant"] | None,
        typer.Option(
            metavar="METHOD", help=r"rtn, gptq, awq or, for int8, smoothquant. \[int4: gptq; int8: rtn]",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(metavar="32|64|128", help=r"Columns of a scale of int4. \[32]", show_default=False),
    ] = None,
    act_order: Annotated[
        bool | None,
        typer.Option(help=r"gptq: columns with the largest inputs first. \[act-order]", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help=r"Where to write it. \[NAME-int4-gptq, here]", show_default=False),
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help=r"Measure on this text. \[every fifth part of --text, which is not calibrated on]",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(metavar="N", min=1, help="Most texts to calibrate on.")] = 512,
    length: Annotated[int, typer.Option(metavar="TOKENS", min=32, help="Most tokens of a text.")] = 512,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run wrote.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Try all methods, each in a directory below --out.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    """Round a model's weights to 8 or 4 bits, calibrated on a text, and measure what it cost."""
    from app.cli.weights import quantize_command as work

    request = work.QuantizeRequest(
        model, text, to, method, group, act_order, out, held_out, samples, length, resume, overwrite, compare
    )
    or_explain(work.quantize_and_measure, request, as_json)


@cli.command("train-lora")
def train_lora(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model directory, or a Hugging Face Hub name.")],
    data: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help="A chat on each line, in OpenAI's fine-tuning format.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the adapter and its report.")],
    eval_data: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help=r"Measure on these chats. \[a share of --data]", show_default=False),
    ] = None,
    eval_share: Annotated[
        float, typer.Option(metavar="SHARE", min=0, max=0.9, help="Chats of --data that are held out.")
    ] = 0.1,
    rank: Annotated[int, typer.Option(metavar="RANK", help="Rank of the updates, 1 to 256.")] = 8,
    alpha: Annotated[
        float | None, typer.Option(metavar="ALPHA", help=r"Updates are scaled by alpha/rank. \[twice the rank]",
                                   show_default=False),
    ] = None,
    target_modules: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help=r"Projections, such as q_proj,v_proj. \[all that adapters may change]",
            show_default=False,
        ),
    ] = "",
    learning_rate: Annotated[
        float, typer.Option(metavar="RATE", help="Its peak: it rises over --warmup and falls by a cosine.")
    ] = 2e-4,
    warmup: Annotated[float, typer.Option(metavar="SHARE", help="Share of the steps over which it rises.")] = 0.05,
    epochs: Annotated[int, typer.Option(metavar="N", help="How often each chat is learned.")] = 3,
    batch_tokens: Annotated[int, typer.Option(metavar="TOKENS", help="Most tokens of a step's chats.")] = 2048,
    length: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=2, help=r"Longer chats are left out. \[2048, or the model's positions]",
                     show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="SEED", help="Of the split, the order and the first matrices.")] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(metavar="float32|bfloat16", help="Of the frozen weights.")
    ] = "float32",
    samples: Annotated[
        int, typer.Option(metavar="N", min=0, help="Held-out turns that are answered before and after.")
    ] = 50,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to train.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    """Teach a model a style or a tool from chats: train a LoRA adapter that `serve --lora` takes."""

    def run() -> None:
        from app.cli.weights import train_lora_command as work
        from engine.model.finetuning.lora_trainer import LoraRecipe

        targets = tuple(name.strip() for name in target_modules.split(",") if name.strip())
        recipe = LoraRecipe(
            rank, 2.0 * rank if alpha is None else alpha, targets, learning_rate, epochs, batch_tokens, warmup, seed,
            dtype,
        )  # fmt: skip
        request = work.TrainingRequest(
            model, data, out, recipe, eval_data, eval_share, length, samples, device, resume
        )  # fmt: skip
        work.train_lora(request, as_json)

    or_explain(run)


@cli.command()
def simulate(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Azure's CSV or Mooncake's JSON lines of recorded requests.")
    ],
    replicas: Annotated[int, typer.Option(metavar="N", min=1, help="Engines behind the router.")] = 1,
    router: Annotated[
        Literal["prefix_aware", "least_loaded", "round_robin", "random"],
        typer.Option(metavar="NAME", help="prefix_aware, least_loaded, round_robin or random."),
    ] = "prefix_aware",
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help=r"Order of a step. \[as for `serve`]", show_default=False)
    ] = None,
    cost: Annotated[
        str, typer.Option(metavar="FILE|NAME", help="What a step takes: h200, h200-measured, or a fitted cost.")
    ] = "h200",
    copies: Annotated[int, typer.Option(metavar="N", min=1, help="Copies of the trace at once.")] = 1,
    hours: Annotated[
        float | None,
        typer.Option(metavar="HOURS", min=0.001, max=240, help=r"Repeat it for so long. \[once]", show_default=False),
    ] = None,
    peak: Annotated[float, typer.Option(metavar="TIMES", min=1, max=2, help="Busiest rate over the mean one.")] = 1.0,
    seed: Annotated[int, typer.Option(metavar="SEED", help="Of the copies' beginnings, and of random routing.")] = 0,
    block_size: Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Tokens of a K/V block.")] = 16,
    max_running: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help=r"Sequences in one step. \[as for `serve`]", show_default=False),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, help=r"Of each K/V pool. \[the device's]", show_default=False),
    ] = None,
    max_wait_s: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help=r"Refuse beyond this wait. \[as for `serve`]", show_default=False),
    ] = None,
    admission: Annotated[bool, typer.Option(help="Refuse requests as the server would.")] = True,
    price: Annotated[
        float | None,
        typer.Option(metavar="PRICE", min=0, help="Of a replica's hour: adds the cost of tokens.", show_default=False),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the run; or FILE.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:  # fmt: skip
    """Replay a recorded trace on simulated replicas: the real scheduler and admission, on a virtual clock."""
    settings = settings_of(None, policy=policy, max_wait_s=max_wait_s)
    from app.cli import simulate_command as work

    request = work.SimulateRequest(
        trace, replicas, router, cost, copies, hours, peak, seed, block_size, max_running, kv_tokens, admission, price,
        plot,
    )  # fmt: skip
    or_explain(work.simulate, request, settings, as_json)


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

    from app.cli.evaluation import evaluate_retrieval

    or_explain(evaluate_retrieval, beir, split, rerank, as_json, settings)


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
    from app.cli.evaluation import evaluate_reasoning

    or_explain(evaluate_reasoning, tasks, strategy or [], effort or [], n, max_tokens, as_json, plot, settings)


for group in (documents, tools, skills, keys, backup, deploy):
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


def main() -> None:
    if sys.argv[1:2] in (["serve"], ["chat"], ["diffuse"], ["quantize"], ["train-lora"]):
        # torch's threads wait for each other by spinning. Where anything else needs a core (this server's own event
        # loop does) that made a step up to 80 times slower; sleeping instead costs about a tenth on an idle machine. It
        # must be said before torch is imported; docs/performance.md has the figures.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.argv[1:2] == ["serve"]:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _leave)  # until the server has handlers of its own
    cli()
