"""`python -m bench.speculation bundled|planted|widths|peers|lookup|report`: measures what speculation gains and costs.

`bundled` asks the bundled model its evaluation's questions, alone, with drafts and without in turns. `planted` runs a
model of Qwen3-0.6B's shape with drafts of which a known share is right, so that gain and cost are those of the engine,
by number of streams; `widths` times its steps beside llama.cpp's, and `peers` the gains of drafts beside those of
llama-cpp-python. `lookup` times the suffix proposer on long contexts.
Each part is kept under build/.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench import hardware, report
from bench.cpu import checkpoint
from bench.cpu.__main__ import gguf_of
from bench.cpu.contestants import PEERS
from bench.cpu.steps import laid_step
from bench.report import interval
from engine import GREEDY, Engine, EngineConfig, Sampling, Span
from engine.builder import build
from engine.core.request import SequenceState, SpanJob
from engine.model.decoder import Decoder, load_decoder
from engine.params import Speculation
from engine.speculation import speculator
from engine.speculation.proposer import NOTHING, DraftTokens, Proposer
from engine.speculation.suffix import FEED, SuffixProposer
from training.abilities import ABILITIES, Ability, xquad
from training.conversation import Case
from training.evaluate import SEED, held

WORK = Path("build/speculation")
WIDTHS = [1, 2, 3, 4, 6, 8, 12, 16]  # tokens of a sequence in one step
SHARED = Path(os.environ.get("PONDER_SHARED", "../shared"))
QUOTING = ("1 to 6 passages, made-up facts", "1 to 6 passages, real prose", "XQuAD, right paragraph among 3")
OTHERS = (
    "arithmetic through the calculator",
    "one of 1 to 8 unseen tools",
    "Countdown with 4 numbers",
    "chat: memory",
    "thinks, calls a tool, answers",
    "questions about tables, in SQL",
)
app = typer.Typer(add_completion=False)
Part = dict[str, Any]  # Any: plain JSON


@dataclass(frozen=True, slots=True)
class DraftedAnswer:
    """One answer: its tokens, the steps that sampled them, and the seconds after its first token."""

    tokens: tuple[int, ...]
    steps: int
    seconds: float


async def answered(engine: Engine, prompt: Sequence[int], span: Span, tenant: str = "") -> DraftedAnswer:
    tokens: list[int] = []
    steps, first, last = 0, 0.0, 0.0
    async with await engine.open(prompt, tenant=tenant) as seq:
        async for out in seq.generate(span):
            last = time.perf_counter()
            first = first or last
            tokens += out.token_ids
            steps += bool(out.token_ids) and not out.drafted
    return DraftedAnswer(tuple(tokens), steps, last - first)


@app.command()
def bundled(
    proposers: Annotated[list[str] | None, typer.Option("--proposer", help="One or more; auto if none.")] = None,
    n: Annotated[int, typer.Option("-n", help="Questions of each kind.")] = 20,
    temperature: float = 0.0,
    model: Path = Path("models/pebble"),
    draft_model: Annotated[Path | None, typer.Option(help="Of draft or medusa.")] = None,
    tokens: Annotated[int, typer.Option(help="Of a draft at most.")] = 16,
    whole: Annotated[bool, typer.Option(help="Verify all that is drafted: tokens a step depend on no time.")] = False,
) -> None:
    """The bundled model on its evaluation, alone: tokens a step, and the time with drafts beside without."""
    if whole:
        speculator.chosen_lengths = _whole  # type: ignore[attr-defined]  # imported there, and called by its name
        speculator.Speculator._worth = lambda self, name, tokens: 0.0  # type: ignore[method-assign]  # models are asked
    found = asyncio.run(_bundled(model, draft_model, proposers or ["auto"], n, temperature, tokens))
    name = "bundled" + (f"-{temperature}" if temperature else "") + (f"-whole-{tokens}" if whole else "")
    _keep(name, {**found, "n": n, "temperature": temperature, "tokens": tokens, "whole": whole})


def _whole(survival: Mapping[int, Sequence[float]], rows: int, times: object) -> dict[int, int]:
    return {id: len(each) for id, each in survival.items()}


async def _bundled(
    model: Path, draft: Path | None, proposers: Sequence[str], n: int, temperature: float, tokens: int
) -> Part:
    abilities = {each.name: each for each in (*ABILITIES, *xquad(SHARED))}
    rows: Part = {}
    path = None if draft is None else str(draft)
    config = EngineConfig(str(model), speculation="auto", draft_model=path, speculation_tokens=tokens)
    async with await Engine.start(config) as engine:
        for name in (*QUOTING, *OTHERS):
            if name in abilities:
                cases = abilities[name].cases(random.Random(SEED), n)
                rows[name] = await _of_ability(engine, abilities[name], cases, proposers, temperature)
                print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
        stats = (await engine.stats()).speculation
    whole = {
        kind: {who: _over(rows, names, who) for who in proposers}
        for kind, names in (("quoting", QUOTING), ("all", (*QUOTING, *OTHERS)))
    }
    return {"rows": rows, "over": whole, "drafted_at": stats.drafted_at, "accepted_at": stats.accepted_at}


async def _of_ability(
    engine: Engine, ability: Ability, cases: Sequence[Case], proposers: Sequence[str], temperature: float
) -> Part:
    """Each case without drafts, then with each proposer's, in an order that turns; the tokens must be the same."""
    turns = ["off", *proposers]
    made: dict[str, list[DraftedAnswer]] = {who: [] for who in turns}
    for at, case in enumerate(cases):
        prompt = engine.tokenizer.apply_chat_template(
            case.prompt.as_json(), tools=list(case.prompt.tools) or None, enable_thinking=case.prompt.enable_thinking
        )
        sampling = GREEDY if temperature == 0 else Sampling(temperature=temperature, seed=at)
        for who in turns[at % len(turns) :] + turns[: at % len(turns)]:
            span = Span(sampling, max_tokens=400, constraint=held(engine, case), speculation=Speculation(who))
            made[who].append(await answered(engine, prompt, span, who))  # a tenant each: answers are looked up, too
        assert len({each[at].tokens for each in made.values()}) == 1, f"{ability.name}: drafts changed the tokens"
    return {
        who: {
            "tokens": sum(len(each.tokens) for each in made[who]),
            "steps": sum(each.steps for each in made[who]),
            "seconds": sum(each.seconds for each in made[who]),
            "speedups": [
                off.seconds / each.seconds for off, each in zip(made["off"], made[who], strict=True) if each.seconds
            ],
        }
        for who in turns
    }


def _over(rows: Part, names: Sequence[str], who: str) -> Part:
    these = [rows[name] for name in names if name in rows]
    speedups = [each for row in these for each in row[who]["speedups"]]
    low, high = interval(speedups)
    return {
        "tokens_per_step": sum(row[who]["tokens"] for row in these) / sum(row[who]["steps"] for row in these),
        "time_ratio": sum(row["off"]["seconds"] for row in these) / sum(row[who]["seconds"] for row in these),
        "speedup_mean": statistics.fmean(speedups), "speedup_low": low, "speedup_high": high,
    }  # fmt: skip


class Planted(Proposer):
    """Proposes what the model wrote without drafts, each token right with probability `share`."""

    name = "planted"

    def __init__(self) -> None:
        self.share = 1.0
        self.known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._draw = random.Random(1)

    def propose(self, seq: SequenceState, budget: int) -> DraftTokens:
        assert isinstance(seq.job, SpanJob)
        start = seq.job.prompt_tokens
        text = self.known.get(tuple(seq.tokens[:start]))
        if text is None:
            return NOTHING
        following = text[len(seq) - start :][:budget]
        tokens = tuple(token if self._draw.random() < self.share else (token + 1) % 1000 for token in following)
        return DraftTokens(tokens, (0.8,) * len(tokens))


@app.command()
def planted(
    streams: Annotated[list[int] | None, typer.Option("--streams", help="So many at once.")] = None,
    steps: Annotated[int, typer.Option(help="Tokens of each stream.")] = 64,
    rounds: int = 3,
    shape: Annotated[str, typer.Option(help="0.6b or 4b.")] = "0.6b",
    quantization: Annotated[str, typer.Option(help="none, int8 or int4.")] = "none",
) -> None:
    """Qwen3-0.6B's shape, random weights, drafts of which 70% or none of the tokens are right, beside no drafts."""
    model = checkpoint.write(
        Path("build/cpu") / ("model" if shape == "0.6b" else f"model-{shape}"),
        Path("models/pebble"),
        checkpoint.SHAPES[shape],
    )
    found = asyncio.run(_planted(model, streams or [1, 4, 16, 64], steps, rounds, quantization))
    name = f"planted-{shape}-{quantization}"
    kept = WORK / f"{name}.json"
    earlier = json.loads(kept.read_text())["streams"] if kept.exists() else {}
    _keep(name, {"streams": earlier | found})


async def _planted(model: Path, streams: Sequence[int], steps: int, rounds: int, quantization: str) -> Part:
    proposer = Planted()
    weights: Any = {"dtype": "bfloat16", "quantization": quantization}  # Any: their names are literal types
    config = EngineConfig(str(model), speculation="planted", kv_blocks=64 * 16, max_running=64, **weights)
    curve: Part = {}
    async with await Engine.start(config, partial(build, proposers=(proposer,))) as engine:

        async def rate(count: int, span: Span) -> float:
            prompts = [_prompt(seed) for seed in range(count)]
            began = time.perf_counter()
            made = await asyncio.gather(*(answered(engine, prompt, span) for prompt in prompts))
            seconds = time.perf_counter() - began
            proposer.known |= {prompt: each.tokens for prompt, each in zip(prompts, made, strict=True)}
            return sum(len(each.tokens) for each in made) / seconds

        off = Span(GREEDY, max_tokens=steps, ignore_eos=True, speculation=Speculation("off"))
        on = Span(GREEDY, max_tokens=steps, ignore_eos=True)
        for count in streams:
            await rate(count, off)  # records what is written
            ratios: dict[str, list[float]] = {"0.7": [], "0.0": []}
            rates: dict[str, list[float]] = {"off": [], "0.7": [], "0.0": []}
            for _ in range(rounds):
                for share in ratios:
                    alone = await rate(count, off)
                    proposer.share = float(share)
                    drafted = await rate(count, on)
                    ratios[share].append(drafted / alone)
                    rates["off"].append(alone)
                    rates[share].append(drafted)
            curve[str(count)] = {
                "steps": steps,
                "ratios": ratios,
                "tokens_per_s": {who: statistics.median(each) for who, each in rates.items()},
            }
            print(count, json.dumps(curve[str(count)]), file=sys.stderr, flush=True)
    return curve


@app.command()
def widths(
    python: Annotated[Path | None, typer.Option(help="An interpreter that has llama_cpp and gguf.")] = None,
    quantization: Annotated[str, typer.Option(help="none, int8 or int4.")] = "none",
    steps: int = 12,
    rounds: int = 3,
) -> None:
    """Seconds of one sequence's step of so many tokens, ours and llama.cpp's in turns, on Qwen3-0.6B's shape; and the
    most that drafts of which 70% of the tokens are right could gain with each, were they free."""
    model = checkpoint.write(Path("build/cpu/model"), Path("models/pebble"), checkpoint.SHAPES["0.6b"])
    decoder = load_decoder(model, dtype=torch.bfloat16, quantization=quantization)  # type: ignore[arg-type]  # a name
    turns: dict[str, list[dict[int, float]]] = {"ours": [], "llama.cpp": []}
    for _ in range(rounds):
        turns["ours"].append({n: _step_seconds(decoder, n, steps) for n in WIDTHS})
        if python is not None:
            plan = {
                "batches": [1],
                "prompt": 64,
                "steps": steps,
                "prefill": 64,
                "clock": "perf_counter",
                "widths": WIDTHS,
            }
            file = gguf_of(python, "0.6b", PEERS[quantization])
            command = [str(python), "bench/cpu/llama.py", str(file), str(os.cpu_count()), json.dumps(plan)]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
            turns["llama.cpp"].append({int(n): seconds for n, seconds in json.loads(said)["widths"].items()})
    found: Part = {}
    for who, each in turns.items():
        if each:
            times = {n: statistics.median(turn[n] for turn in each) for n in WIDTHS}
            expected = {n: sum(0.7**at for at in range(n)) for n in WIDTHS}
            gains = {n: expected[n] * times[1] / times[n] for n in WIDTHS}
            found[who] = {"ms": {n: t * 1e3 for n, t in times.items()}, "gain_at_70_percent": max(gains.values())}
    _keep(f"widths-{quantization}", found)


PEER_PROMPTS = 4  # that are answered one after the other where one stream is measured


@app.command()
def peers(
    python: Annotated[Path, typer.Option(help="An interpreter that has llama_cpp and gguf.")],
    streams: Annotated[list[int] | None, typer.Option("--streams", help="So many at once, of ours.")] = None,
    steps: Annotated[int, typer.Option(help="Tokens of each stream.")] = 64,
    rounds: int = 3,
    quantization: Annotated[str, typer.Option(help="none, int8 or int4.")] = "none",
    threads: Annotated[int, typer.Option(help="0: a thread for each processor.")] = 0,
) -> None:
    """Gains by drafts, ours by number of streams and llama-cpp-python's own modes, which have one, in turns: a look-up
    in the text, and drafts of which 70% of the tokens are right. Qwen3-0.6B's shape, random weights."""
    model = checkpoint.write(Path("build/cpu/model"), Path("models/pebble"), checkpoint.SHAPES["0.6b"])
    file = gguf_of(python, "0.6b", PEERS[quantization])
    prompts = [_prompt(seed) for seed in range(PEER_PROMPTS)]
    plan = json.dumps({"prompts": prompts, "steps": steps, "share": 0.7, "predicted": [2, 4, 8]})
    threads = threads or os.cpu_count() or 1
    command = [str(python), "bench/cpu/llama_drafts.py", str(file), str(threads), plan]
    turns: dict[str, list[Part]] = {"ours": [], "llama.cpp": []}
    for _ in range(rounds):
        turns["ours"].append(asyncio.run(_gains(model, streams or [1, 4, 16], steps, quantization, threads)))
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        turns["llama.cpp"].append({"1": json.loads(done.stdout.splitlines()[-1])})
        print(json.dumps({who: each[-1] for who, each in turns.items()}), file=sys.stderr, flush=True)
    curve = {
        who: {
            count: {
                mode: sorted(turn[count][mode]["tokens_per_s"] / turn[count]["off"]["tokens_per_s"] for turn in each)
                for mode in each[0][count]
            }
            for count in each[0]
        }
        for who, each in turns.items()
    }
    _keep(f"peers-{quantization}", {"steps": steps, "threads": threads, "gains": curve, "turns": turns})


async def _gains(model: Path, streams: Sequence[int], steps: int, quantization: str, threads: int) -> Part:
    """Returns tokens a second and a step by number of streams: without drafts, by look-up and by planted ones."""
    proposer, found = Planted(), dict[str, Part]()
    proposer.share = 0.7
    weights: Any = {"dtype": "bfloat16", "quantization": quantization}  # Any: their names are literal types
    sizes: Any = {"kv_blocks": 64 * 16, "max_running": 64, "prefix_cache": False}  # each mode reads the prompts again
    config = EngineConfig(str(model), speculation="off", threads=threads, **sizes, **weights)
    async with await Engine.start(config, partial(build, proposers=(proposer,))) as engine:
        for count in streams:
            prompts = [_prompt(seed) for seed in range(max(count, PEER_PROMPTS))]
            found[str(count)] = {}
            for mode in ("off", "off", "ngram", "planted"):  # the first one warms up
                span = Span(GREEDY, max_tokens=steps, ignore_eos=True, speculation=Speculation(mode))
                made, began = list[DraftedAnswer](), time.perf_counter()
                for first in range(0, len(prompts), count):
                    these = prompts[first : first + count]
                    made += await asyncio.gather(*(answered(engine, prompt, span) for prompt in these))
                seconds = time.perf_counter() - began
                if mode == "off":
                    proposer.known |= {prompt: each.tokens for prompt, each in zip(prompts, made, strict=True)}
                same = [proposer.known[prompt] == each.tokens for prompt, each in zip(prompts, made, strict=True)]
                assert all(same), f"{mode} changed the tokens"
                tokens = sum(len(each.tokens) for each in made)
                found[str(count)][mode] = {
                    "tokens_per_s": tokens / seconds, "tokens_per_step": tokens / sum(each.steps for each in made),
                }  # fmt: skip
    return found


def _prompt(seed: int) -> tuple[int, ...]:
    return tuple((seed * 31 + i * 7919) % 150_000 for i in range(32))


def _step_seconds(decoder: Decoder, tokens: int, steps: int) -> float:
    batch, kv = laid_step(decoder, 1, 64 + tokens, tokens)
    decoder.forward(batch, kv)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        decoder.forward(batch, kv)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@app.command()
def lookup(lengths: Annotated[list[int] | None, typer.Option("--length")] = None) -> None:
    """Microseconds of a look-up, and the index's memory, by length of the context."""
    found: Part = {}
    draw = random.Random(3)
    words = [[draw.randrange(6000) for _ in range(draw.randint(3, 12))] for _ in range(2000)]
    for length in lengths or [1024, 8192, 32_768]:
        text: list[int] = []
        while len(text) < length:
            text += draw.choice(words)
        seq = SequenceState(1, [], b"tenant", 1)
        seq.append(text[:length], generated=False)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        proposer = SuffixProposer()
        for _ in range(-(-length // FEED)):
            proposer.propose(seq, 8)
        memory = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        times, found_any, fresh = [], 0, SuffixProposer()
        began = time.perf_counter()
        for _ in range(-(-length // FEED)):
            fresh.propose(seq, 8)
        built = time.perf_counter() - began
        for _ in range(2000):
            seq.push(text[draw.randrange(length)] if draw.random() < 0.2 else draw.choice(words)[0])
            began = time.perf_counter()
            found_any += bool(fresh.propose(seq, 8).tokens)
            times.append(time.perf_counter() - began)
        times.sort()
        found[str(length)] = {
            "p50_us": times[1000] * 1e6, "p99_us": times[1980] * 1e6, "index_bytes": memory, "built_ms": built * 1e3,
        }  # fmt: skip
    _keep("lookup", found)


@app.command(name="report")
def kept() -> None:
    """Joins the parts under bench/results/."""
    parts = {path.stem: json.loads(path.read_text()) for path in sorted(WORK.glob("*.json"))}
    results = {
        "date": datetime.date.today().isoformat(), "slug": f"speculation-{hardware.slug()}",
        "command": "python -m bench.speculation bundled|planted|widths|peers|lookup|report", **parts,
        "hardware": hardware.describe(),
    }  # fmt: skip
    print(report.save(results))


def _keep(name: str, made: Part) -> None:
    made |= {"date": datetime.date.today().isoformat(), "load": os.getloadavg()}
    WORK.mkdir(parents=True, exist_ok=True)
    (WORK / f"{name}.json").write_text(json.dumps(made))
    print(json.dumps(made))


if __name__ == "__main__":
    app()
