"""`python -m bench.cpu ours|transformers|llama|weights|quality|quantize|qat|bits|steps|mixture|report`: a part a call,
then the report of those that are kept under build/.

Decoding is measured as all requests' tokens a second once all prompts are read, prefill as one prompt of 512 tokens.
Ours goes through the whole engine, greedy sampling included; the peers are spared sampling.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import time
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer

from bench import hardware, report
from bench.cpu import checkpoint, mixture, quality, quantization_aware, quantized
from bench.cpu import steps as step_by_step
from bench.cpu.bits import compared
from bench.cpu.contestants import PEERS, PREFILL, PROMPT, in_turns, measured, run_llama
from engine.config import QuantizationName
from training.quantized import qat

WORK = Path("build/cpu")
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128]
app = typer.Typer(add_completion=False)
Part = dict[str, Any]  # Any: plain JSON


def _model(shape: str = "0.6b") -> Path:
    folder = WORK / ("model" if shape == "0.6b" else f"model-{shape}")
    return checkpoint.write(folder, Path("models/pebble"), checkpoint.SHAPES[shape])


def gguf_of(python: Path, shape: str, kind: str) -> Path:
    """llama.cpp's file of a shape: bf16, q8_0 or q4_0."""
    import sys

    sys.path += map(str, python.parent.parent.glob("lib/python*/site-packages"))
    model = _model(shape)
    whole = checkpoint.write_gguf(model, model.with_suffix(".gguf"), checkpoint.SHAPES[shape])
    return whole if kind == "bf16" else checkpoint.quantize_gguf(python, whole, kind)


def _keep(name: str, made: Part) -> None:
    made |= {"date": datetime.date.today().isoformat(), "read_gb_per_s": hardware.read_bandwidth(1.0) / 1e9}
    WORK.mkdir(parents=True, exist_ok=True)
    (WORK / f"{name}.json").write_text(json.dumps(made))
    print(json.dumps(made))


@app.command()
def ours(
    kernels: Annotated[str, typer.Option(help="auto or torch.")] = "auto",
    quantization: Annotated[str, typer.Option(help="none, int8 or int4.")] = "none",
    steps: Annotated[int, typer.Option(help="Tokens of each request.")] = 16,
    only: Annotated[list[int] | None, typer.Option(help="Only so many at once.")] = None,
) -> None:
    """This engine."""
    name = f"ours-{kernels}" + ("" if quantization == "none" else f"-{quantization}")
    options = {"kernels": kernels, "quantization": quantization}
    kept = WORK / f"{name}.json"
    found = asyncio.run(measured(_model(), options, steps, only or BATCHES))
    earlier = json.loads(kept.read_text())["decode"] if kept.exists() else {}
    _keep(name, found | {"decode": earlier | found["decode"], "options": options})


@app.command()
def transformers(
    steps: int = 4,
    shape: Annotated[str, typer.Option(help="0.6b or 4b.")] = "0.6b",
    only: Annotated[list[int] | None, typer.Option(help="Only so many at once.")] = None,
) -> None:
    """The peer in Python: one padded batch, its own cache."""
    import transformers as peer

    model: Any = peer.AutoModelForCausalLM.from_pretrained(_model(shape), dtype=torch.bfloat16).eval()
    found: Part = {"decode": {}, "version": peer.__version__}
    with torch.inference_mode():
        for n in only or BATCHES:
            ids = (torch.arange(n * PROMPT).view(n, PROMPT) * 7919) % 150_000
            made = model(ids, use_cache=True, logits_to_keep=1)
            made = model(ids[:, :1], past_key_values=made.past_key_values, use_cache=True)
            start = time.perf_counter()
            for _ in range(steps):
                made = model(ids[:, :1], past_key_values=made.past_key_values, use_cache=True)
            found["decode"][n] = n * steps / (time.perf_counter() - start)
        ids = (torch.arange(PREFILL).view(1, -1) * 7919) % 150_000
        times = []
        for _ in range(3):
            start = time.perf_counter()
            model(ids, use_cache=True, logits_to_keep=1)
            times.append(time.perf_counter() - start)
        found["prefill"] = PREFILL / min(times)
    _keep("transformers" if shape == "0.6b" else f"transformers-{shape}", found)


@app.command()
def llama(
    python: Annotated[Path, typer.Option(help="An interpreter that has llama_cpp and gguf.")],
    steps: int = 4,
) -> None:
    """llama.cpp, as llama-cpp-python's source package builds it."""
    found = run_llama(python, gguf_of(python, "0.6b", "bf16"), BATCHES, steps)
    _keep("llama", found)


@app.command("weights")
def weights_of_few_bits(
    python: Annotated[Path, typer.Option(help="An interpreter that has llama_cpp and gguf.")],
    shape: Annotated[str, typer.Option(help="0.6b or 4b.")] = "0.6b",
    only: Annotated[list[str] | None, typer.Option(help="Only none, int8 or int4.")] = None,
    rounds: int = 3,
    one_thread: Annotated[bool, typer.Option(help="Count processor time, for a machine that is shared.")] = False,
) -> None:
    """Ours beside llama.cpp in bfloat16, 8 and 4 bits, in turns: kept under bench/results/."""
    files = {name: gguf_of(python, shape, kind) for name, kind in PEERS.items() if not only or name in only}
    parts = in_turns(_model(shape), python, files, rounds, one_thread=one_thread)
    results = {
        "date": datetime.date.today().isoformat(),
        "slug": f"weights-{shape}-{'one-thread-' if one_thread else ''}{hardware.slug()}",
        "command": f"python -m bench.cpu weights --shape {shape} --rounds {rounds}" + " --one-thread" * one_thread,
        "hardware": hardware.describe(),
        "shape": checkpoint.SHAPES[shape].config,
        "prompt_tokens": PROMPT,
        "prefill_tokens": PREFILL,
        "parts": parts,
    }
    print(report.save(results))


@app.command("quality")
def quality_of_weights(model: Path = Path("models/pebble")) -> None:
    """Prints the cost of rounding the weights, beside float32, as JSON."""
    date = datetime.date.today().isoformat()
    print(json.dumps({"date": date, "model": model.name, **quality.measure(model)}, indent=1))


@app.command("quantize")
def quantize_model(
    model: Path = Path("models/pebble"),
    questions: Annotated[int, typer.Option(help="Of each ability.")] = 60,
) -> None:
    """Every method of `ponder quantize` on the bundled model: kept under bench/results/."""
    date = datetime.date.today().isoformat()
    results = {
        "date": date,
        "slug": f"quantize-{hardware.slug()}",
        "command": "python -m bench.cpu quantize",
        "hardware": hardware.describe(),
        "model": model.name,
        "parts": quantized.run(model, WORK / f"quantized-{date}", questions),
    }
    print(report.save(results))


@app.command("qat")
def quantization_aware_training(
    model: Path = Path("models/pebble"),
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="Of a run each; 1 and 2 if none.")] = None,
    steps: Annotated[int, typer.Option(help="Of each run.")] = qat.PLAN.steps,
    questions: Annotated[int, typer.Option(help="Of each ability.")] = 100,
    asked: Annotated[list[str] | None, typer.Option("--ability", help="A part of its name; three if none.")] = None,
) -> None:
    """Fine-tuning of the bundled model at 4 bits, beside GPTQ: kept under bench/results/."""
    parts = quantization_aware.run(
        model, WORK / "quantization-aware", seeds or [1, 2], steps, questions, asked or quantized.ABILITIES
    )
    results = {
        "date": datetime.date.today().isoformat(),
        "slug": f"quantization-aware-{hardware.slug()}",
        "command": f"python -m bench.cpu qat --steps {steps} --questions {questions}",
        "hardware": hardware.describe(),
        "model": model.name,
        "parts": parts,
    }
    print(report.save(results))


@app.command("bits")
def same_bits(requests: int = 1000) -> None:
    """Returns whether requests get the same bits alone and in mixes: on our kernels, on int8 weights, and on torch."""
    kinds: dict[str, dict[str, Any]] = {
        "bfloat16": {"dtype": "bfloat16"},
        "bfloat16, int8 weights": {"dtype": "bfloat16", "quantization": "int8"},
        "bfloat16, int4 weights": {"dtype": "bfloat16", "quantization": "int4"},
        "bfloat16, torch": {"dtype": "bfloat16", "kernels": "torch"},
        "float32, torch": {"dtype": "float32"},
    }
    made: Part = {}
    for name, options in kinds.items():
        made[name] = asyncio.run(compared("models/pebble", requests, kv_blocks=2000, **options))
        print(name, made[name])
    WORK.mkdir(parents=True, exist_ok=True)
    (WORK / "same_bits.txt").write_text(json.dumps(made))


@app.command("steps")
def single_steps(
    model: Annotated[Path | None, typer.Option(help="A checkpoint; else Qwen3-0.6B's shape.")] = None,
    threads: int = 2,
    turns: int = 9,
    tiles: Annotated[bool, typer.Option(help="Measure torch's deterministic way, too.")] = False,
) -> None:
    """Our own kernels beside torch, step by step in one run: printed as JSON."""
    made = {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware.describe(),
        "read_gb_per_s": hardware.read_bandwidth(0.5) / 1e9,
        "threads": threads,
        "steps": step_by_step.compared(model or _model(), threads, turns=turns, tiles=tiles),
    }
    print(json.dumps(made, indent=1))


@app.command("mixture")
def mixture_floor(
    layers: int = 3,
    threads: int = 2,
    turns: int = 12,
    only: Annotated[list[str] | None, typer.Option(help="Only none, int8 or int4.")] = None,
) -> None:
    """One row through layers of Qwen3-30B-A3B's shape, over the floor of the bytes it reads: printed as JSON."""
    kinds: tuple[QuantizationName, ...] = get_args(QuantizationName)
    made: Part = {"date": datetime.date.today().isoformat(), "hardware": hardware.describe(), "load": os.getloadavg()}
    for each in kinds:
        if not only or each in only:
            made[each] = mixture.measured(each, layers, threads, turns)
    print(json.dumps(made, indent=1))


@app.command("report")
def write_report() -> None:
    """Everything that was kept, as JSON under bench/results/ and as a picture."""
    parts = {path.stem: json.loads(path.read_text()) for path in sorted(WORK.glob("*.json"))}
    bits = WORK / "same_bits.txt"
    results = {
        "same_bits": json.loads(bits.read_text()) if bits.exists() else None,
        "date": datetime.date.today().isoformat(),
        "slug": f"cpu-speed-{hardware.slug()}",
        "command": "python -m bench.cpu ours|transformers|llama|report",
        "hardware": hardware.describe(),
        "shape": checkpoint.SHAPES["0.6b"].config,
        "prompt_tokens": PROMPT,
        "prefill_tokens": PREFILL,
        "parts": parts,
    }
    print(report.save(results))
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 4))
    for name, part in parts.items():
        shown = {int(n): rate for n, rate in part["decode"].items() if rate > 0}
        axis.plot(list(shown), list(shown.values()), "o-", label=name)
    axis.set(xscale="log", yscale="log", xticks=BATCHES, xticklabels=BATCHES)
    axis.set(xlabel="requests at once", ylabel="tokens/s, decoding", title="Qwen3-0.6B's shape, bfloat16, 2 cores")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(report.ROOT / "docs/img/cpu-speed.png", dpi=110)


if __name__ == "__main__":
    app()
