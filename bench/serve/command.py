"""`ponder bench serve`: load on an OpenAI-compatible server, and on others beside it with the very same requests."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.progress import Progress

from bench import hardware
from bench.serve import asks as arrivals
from bench.serve import serve_report
from bench.serve.asks import KINDS, LoadKind, LoadRequest, azure, mixed, mooncake
from bench.serve.load_client import Load, LoadTarget, load
from bench.serve.measured import Objective, summary


class LoadShape(StrEnum):
    POISSON = "poisson"
    BURSTY = "bursty"
    RAMP = "ramp"


def serve(
    url: Annotated[str, typer.Option(help="The server's address with /v1.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str, typer.Option(help="The model to ask for; the first that it serves if left out.")] = "",
    key: Annotated[str, typer.Option(help="An API key, if it wants one.", envvar="PONDER_BENCH_KEY")] = "",
    peer: Annotated[
        list[str] | None,
        typer.Option(help="NAME=URL of another server for the same requests, to its first model. May be repeated."),
    ] = None,
    shape: Annotated[LoadShape, typer.Option(help="How requests come.")] = LoadShape.POISSON,
    rate: Annotated[float, typer.Option(min=0.001, help="Conversations a second.")] = 1.0,
    to_rate: Annotated[float, typer.Option(min=0.001, help="Where a ramp ends.")] = 5.0,
    variation: Annotated[float, typer.Option(min=0.05, help="Of bursty gaps: deviation over mean.")] = 3.0,
    seconds: Annotated[float, typer.Option(min=1, help="How long requests come.")] = 60.0,
    mix: Annotated[str, typer.Option(help=f"Classes and shares, of {', '.join(KINDS)}.")] = "chat=1",
    prefixes: Annotated[int, typer.Option(min=0, help="How many texts prompts share as their beginnings.")] = 0,
    prefix_words: Annotated[int, typer.Option(min=1, help="Their length.")] = 200,
    trace: Annotated[Path | None, typer.Option(help="A recorded trace: Azure's CSV or Mooncake's JSON lines.")] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="How many times as fast a trace comes.")] = 1.0,
    scale: Annotated[float, typer.Option(min=0.0001, help="What lengths are multiplied with.")] = 1.0,
    longest: Annotated[int, typer.Option(min=1, help="Words or tokens at most, of a trace.")] = 2000,
    block_words: Annotated[int, typer.Option(min=1, help="Words of a block of a Mooncake trace.")] = 16,
    slo_ttft: Annotated[float | None, typer.Option(help="Objective: seconds to the first token.")] = None,
    slo_itl: Annotated[float | None, typer.Option(help="Objective: seconds between tokens, on average.")] = None,
    slo_e2e: Annotated[float | None, typer.Option(help="Objective: seconds of the whole answer.")] = None,
    patience: Annotated[float, typer.Option(help="Seconds after the last arrival that answers are waited for.")] = 120,
    ignore_eos: Annotated[bool, typer.Option(help="Answers go on to their limit; where the server takes it.")] = True,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes; a picture lies beside it.")] = None,
) -> None:
    """Load a server as its users would: requests come when they come, and percentiles are what counts."""
    console = Console()
    rng = Random(seed)
    if trace is not None:
        asks = _of_trace(trace, seconds, speed, scale, longest, block_words, rng)
    else:
        when = {
            LoadShape.POISSON: lambda: arrivals.poisson(rate, seconds, rng),
            LoadShape.BURSTY: lambda: arrivals.bursty(rate, seconds, variation, rng),
            LoadShape.RAMP: lambda: arrivals.ramp(rate, to_rate, seconds, rng),
        }[shape]()
        asks = mixed(when, _shares(mix), rng, scale=scale, prefixes=prefixes, prefix_words=prefix_words)
    if not asks:
        raise typer.BadParameter("No request comes in this time; a higher --rate or more --seconds would have some.")
    targets = [_target("server", url, model, key), *(_peer(text) for text in peer or ())]
    objective = Objective(slo_ttft, slo_itl, slo_e2e)
    extra = {"ignore_eos": True} if ignore_eos else {}
    loads: list[Load] = []
    with Progress(console=console) as progress:
        for target in targets:
            task = progress.add_task(f"{target.name} ({target.model})", total=sum(len(ask.turns) for ask in asks))
            loads.append(
                asyncio.run(
                    load(target, asks, patience_s=patience, extra=extra, done=lambda t=task: progress.advance(t))  # type: ignore[misc]  # bound now
                )
            )
    summaries = [summary(each, objective) for each in loads]
    kinds = sorted({kind for each in summaries for kind in each["kinds"]})
    for kind in [None, *(kinds if len(kinds) > 1 else ())]:
        console.print(serve_report.table(summaries, kind))
    for each in summaries:
        if why := each["client"]["in_the_way"]:
            console.print(f"[yellow]{each['target']}: {why}.[/]")
        for error, count in each["errors"].items():
            console.print(f"[red]{each['target']}: {count} times: {error}[/]", markup=True)
    if out is not None:
        kept = {"date": datetime.date.today().isoformat(), "hardware": hardware.describe(), "servers": summaries}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
        serve_report.picture(loads, out.with_suffix(".png"))
        console.print(f"Kept in {out}, drawn in {out.with_suffix('.png').name}.")


def _shares(mix: str) -> list[tuple[LoadKind, float]]:
    shares = []
    for part in mix.split(","):
        found = re.fullmatch(r"\s*(\w+)=(\d+(?:\.\d+)?)\s*", part)
        if found is None or found[1] not in KINDS or float(found[2]) <= 0:
            accepted = f"shares above 0 of {', '.join(KINDS)}, such as chat=0.8,long=0.2"
            raise typer.BadParameter(f"--mix has {part!r}; accepted: {accepted}.")
        shares.append((KINDS[found[1]], float(found[2])))
    return shares


def _of_trace(
    path: Path, seconds: float, speed: float, scale: float, longest: int, block_words: int, rng: Random
) -> list[LoadRequest]:
    try:
        if path.suffix == ".csv":
            return azure(path, seconds=seconds, speed=speed, scale=scale, longest=longest, rng=rng)
        return mooncake(
            path, seconds=seconds, speed=speed, block_words=block_words, scale=scale, longest=longest
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--trace: {error}") from None


def _peer(text: str) -> LoadTarget:
    name, mark, url = text.partition("=")
    if not mark or not name:
        raise typer.BadParameter(f"--peer is {text!r}; accepted: NAME=URL.")
    return _target(name, url, "", "")


def _target(name: str, url: str, model: str, key: str) -> LoadTarget:
    """A server that answers, with a model that it has."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.get(url.rstrip("/") + "/models", headers=headers, timeout=10)
        served = [each["id"] for each in reply.raise_for_status().json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise typer.BadParameter(f"{name}: {url} does not list its models ({type(error).__name__}: {error}).") from None
    if model and model not in served:
        raise typer.BadParameter(f"{name} does not serve {model!r}; accepted: {', '.join(served)}.")
    return LoadTarget(name, url, model or served[0], key)
