"""`transformers` on the same shapes: its static cache, its continuous batching, and a long prompt.

`python -m bench.gpu.peers FILE MODEL ...` measures and keeps each figure in FILE at once; the part runs it as a process
that is ended when the time is over, since what it compiles may take longer than all else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu import models
from bench.gpu.decoding import label
from bench.gpu.rows import Figure, Json, rate_of, time_of, times_faster
from bench.gpu.setting import Setting

FEW, MANY = 8, 40  # new tokens; the difference is decoding alone
Model = Any  # transformers' classes are untyped


def peers(setting: Setting) -> Iterator[Figure]:
    """Beside what the parts decode and prefill found for the same; all in one process, smallest model first."""
    sizes = setting.sizes
    setting.tidy()
    names = sorted(sizes.models, key=lambda name: models.weight_bytes(models.spec_of(name)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "peers.json"
        job = json.dumps(
            {"models": names, "batches": [rows for rows in sizes.batches if rows <= 64][::2] or [1],
             "ways": list(WAYS), "context": sizes.context, "prompt": sizes.prompt, "device": str(setting.device)}
        )  # fmt: skip
        command = [sys.executable, "-m", "bench.gpu.peers", str(file), job]
        with subprocess.Popen(command, env=os.environ | {"TOKENIZERS_PARALLELISM": "false"}) as process:
            try:
                process.wait(None if setting.left_s == float("inf") else max(5.0, setting.left_s))
            except subprocess.TimeoutExpired:
                process.kill()
        found: Json = json.loads(file.read_text()) if file.exists() else {}
    for what, told in found.items():
        yield beside(setting, what.removesuffix(f" ({told['way']})"), told)


def beside(setting: Setting, what: str, told: Json) -> Figure:
    """A peer's seconds beside ours of the same, where there are both: the share is how many times as fast ours is."""
    if "error" in told:
        return Figure(f"{what}, transformers {told['way']}", 0.0, "ms", 0.0, 0.0, more=told)
    name = f"{what}, transformers {told['way']}"
    ours = setting.value(told["part"], what)
    if ours is None:
        return time_of(name, told["seconds"])
    if told["part"] == "prefill":
        flops = models.prefill_flops(models.spec_of(told["model"]), told["tokens"]) / 1e12
        theirs = rate_of(name, flops, told["seconds"], "TFLOP/s")
        return Figure(name, theirs.value, theirs.unit, theirs.least, theirs.largest, ours, ours / theirs.value)
    found = times_faster(name, told["seconds"], [ours / 1e3])
    theirs_ms = [1e3 * each for each in told["seconds"]]
    return Figure(name, found.floor or 0.0, "ms", min(theirs_ms), max(theirs_ms), ours, found.share)


def measure(file: Path, job: Json) -> None:
    """What the process does."""
    import transformers

    kept: Json = {}
    device = torch.device(job["device"])

    def keep(what: str, way: str, part: str, run: Callable[[], list[float]], **more: object) -> None:
        told: Json = {"way": way, "part": part, "version": transformers.__version__, **more}
        try:
            told["seconds"] = run()
        except Exception as error:  # whatever its API has become
            told["error"] = repr(error)[:400]
        kept[what if way == "static cache" or part == "prefill" else f"{what} ({way})"] = told
        file.write_text(json.dumps(kept))

    for name in job["models"]:
        vocabulary, tokens = models.SHAPES[name]["vocab_size"], job["prompt"]
        try:
            model = made(name, device)
        except Exception as error:  # the next may fit
            print(f"{name}: {error!r}", file=sys.stderr)
            continue
        ids = torch.randint(vocabulary, (1, tokens), device=device)
        keep(f"{name}, {tokens} tokens", "SDPA", "prefill", partial(_prompt, model, ids), model=name, tokens=tokens)
        for rows in job["batches"]:
            ids = torch.randint(vocabulary, (rows, job["context"] - MANY), device=device)
            for way in job["ways"]:
                keep(label(name, rows), way, "decode", partial(WAYS[way], model, ids))
        del model


def made(name: str, device: torch.device) -> Model:
    """Of random weights, on the device at once."""
    import transformers

    config = transformers.AutoConfig.for_model(**models.SHAPES[name])
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=models.dtype_for(device), attn_implementation="sdpa"
        )
    model.generation_config.pad_token_id = 0
    return model.eval()


def _timed(run: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.inference_mode()
def _prompt(model: Model, ids: torch.Tensor) -> list[float]:
    def run() -> object:
        return model(ids, use_cache=True, logits_to_keep=1)

    run()
    return [_timed(run) for _ in range(3)]


@torch.inference_mode()
def _static(model: Model, ids: torch.Tensor) -> list[float]:
    def run(new: int) -> float:
        options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new}
        return _timed(lambda: model.generate(ids, cache_implementation="static", **options))

    run(MANY)
    return [(run(MANY) - run(FEW)) / (MANY - FEW) for _ in range(3)]


@torch.no_grad()  # its own thread writes to what it made: those must be no tensors of inference
def _continuous(model: Model, ids: torch.Tensor) -> list[float]:
    import transformers

    def run(new: int) -> float:
        config = transformers.GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)
        made: list[Model] = []
        took = _timed(lambda: made.append(model.generate_batch(inputs=ids.tolist(), generation_config=config)))
        if [len(each.generated_tokens) for each in made[0].values()] != [new] * len(ids):
            raise RuntimeError(f"generate_batch gave other than {new} tokens to each of {len(ids)} requests")
        return took

    run(FEW)
    return [(run(MANY) - run(FEW)) / (MANY - FEW) for _ in range(2)]


WAYS: dict[str, Callable[[Model, torch.Tensor], list[float]]] = {"static cache": _static, "continuous": _continuous}


if __name__ == "__main__":
    measure(Path(sys.argv[1]), json.loads(sys.argv[2]))
