"""`transformers` on the same shapes: a long prompt, its static cache, and its continuous batching.

`python -m bench.gpu.gpu_peers FILE JOB` measures and keeps each figure in FILE at once; the part runs it as a process
that is ended when the time is over, since its compiling may take longer than all else. A step of theirs is all that
lies between two tokens, and stands beside a whole step of ours. Their continuous batching compiles nothing and records
no graph unless flash attention is installed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.gpu import gpu_models
from bench.gpu.decoding import label
from bench.gpu.rows import Figure, Json, Missing, rate_of, time_of, times_faster, write
from bench.gpu.setting import Setting

NEW = 40  # tokens; the later half of their steps counts, when all is compiled and recorded
PAGE = 256  # tokens of K/V in a block of continuous batching
PROMPT, STATIC = "SDPA", "static cache, compiled"
CONTINUOUS = "continuous batching (paged SDPA, no CUDA graphs)"
Model = Any  # transformers' classes are untyped


def peers(setting: Setting) -> Iterator[Figure]:
    """Beside the figures of the parts `whole` and `prefill` for the same; each figure as soon as it is there."""
    if importlib.util.find_spec("transformers") is None:
        raise Missing("the package transformers")
    sizes = setting.sizes
    setting.tidy()
    job = {"models": sizes.models, "batches": sizes.compared, "context": sizes.context, "prompt": sizes.prompt,
           "device": str(setting.device)}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "peers.json"
        command = [sys.executable, "-m", "bench.gpu.gpu_peers", str(file), json.dumps(job)]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        seen, status, until = 0, None, setting.timer.now() + setting.sizes.peers_s
        try:
            while status is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
                status = process.poll()  # asked before the file is read, which is whole if it has ended
                found = json.loads(file.read_text()) if file.exists() else []
                for measured in found[seen:]:
                    yield beside(setting, measured)
                seen = len(found)
                if status is None and (setting.left_s <= 0 or setting.timer.now() > until):
                    raise Missing("time, transformers was not done")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that compile for it
            process.wait()
    if status:
        raise RuntimeError(f"the process of transformers ended with {status}")


def beside(setting: Setting, measured: Json) -> Figure:
    """A peer's seconds beside ours of the same, where there are both: the share is how many times as fast ours is."""
    what = measured["what"]
    name = f"{what}, transformers {measured['way']}"
    if "error" in measured:
        return Figure(name, 0.0, "ms", 0.0, 0.0, more=measured)
    if measured["way"] == PROMPT:
        ours = setting.value("prefill", what)
        flops = gpu_models.prefill_flops(gpu_models.spec_of(measured["model"]), measured["tokens"]) / 1e12
        theirs = rate_of(name, flops, measured["seconds"], "TFLOP/s", limit=ours)
        share = None if ours is None else ours / theirs.value
        return Figure(name, theirs.value, theirs.unit, theirs.least, theirs.largest, ours, share)
    ours = setting.value("whole", what)
    if ours is None:
        return time_of(name, measured["seconds"])
    found = times_faster(name, measured["seconds"], [ours / 1e3])
    theirs_ms = [1e3 * each for each in measured["seconds"]]
    return Figure(name, found.floor or 0.0, "ms", min(theirs_ms), max(theirs_ms), ours, found.share)


def measure(file: Path, job: Json) -> None:
    """The process's work: the most important figures first."""
    import transformers

    kept: list[Json] = []

    def keep(measured: Json) -> None:
        kept.append(measured | {"version": transformers.__version__})
        write(file, kept)

    for way in (STATIC, CONTINUOUS):
        for name in job["models"]:
            _of_model(name, way, job, keep)
            _forget()


def _of_model(name: str, way: str, job: Json, keep: Callable[[Json], None]) -> None:
    device, context, tokens = torch.device(job["device"]), job["context"], job["prompt"]
    try:
        model = made(name, device)
    except Exception as error:  # the next may fit
        keep({"what": name, "way": way, "error": repr(error)[:400]})
        return
    if way == STATIC:
        measured = {"what": f"{name}, {tokens} tokens", "way": PROMPT, "model": name, "tokens": tokens}
        keep(measured | _outcome(partial(_prompt, model, tokens)))
    run = _static if way == STATIC else _continuous
    for rows in job["batches"]:
        keep({"what": label(name, rows), "way": way} | _outcome(partial(run, model, rows, context)))
        if hasattr(model, "_compiled_call"):  # which for a second shape would be compiled again, for any
            del model._compiled_call
        _forget()


def _outcome(run: Callable[[], list[float]]) -> Json:
    try:
        return {"seconds": run()}
    except Exception as error:  # its API may have changed
        return {"error": repr(error)[:400]}


def _forget() -> None:
    """Free the memory of dropped objects, which compiled calls refer to in circles."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def made(name: str, device: torch.device) -> Model:
    """Of random weights, on the device at once."""
    import transformers

    config = transformers.AutoConfig.for_model(**gpu_models.SHAPES[name])
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=gpu_models.dtype_for(device), attn_implementation="sdpa"
        )
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None  # no token ends a row
    return model.eval()


def _random(model: Model, rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (rows, tokens), device=model.device)


@torch.no_grad()
def _prompt(model: Model, tokens: int) -> list[float]:
    ids = _random(model, 1, tokens)

    def run() -> float:
        start = _Moment(model.device)
        model(ids, use_cache=True, logits_to_keep=1)
        return start.until(_Moment(model.device))

    run()
    return [run() for _ in range(3)]


@torch.no_grad()
def _static(model: Model, rows: int, context: int) -> list[float]:
    """One call, since the next would be no different: the first steps compile and record."""
    import transformers

    moments: list[_Moment] = []

    class Watch(transformers.StoppingCriteria):
        """Asked after every step; it never stops one, nor waits for the device, which their loop need not do."""

        def __call__(self, ids: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
            moments.append(_Moment(ids.device))
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    model.generate(
        _random(model, rows, context - NEW), do_sample=False, max_new_tokens=NEW, cache_implementation="static",
        stopping_criteria=transformers.StoppingCriteriaList([Watch()]),
    )  # fmt: skip
    return [one.until(two) for one, two in pairwise(moments[NEW // 2 : NEW])]


@torch.no_grad()  # its own thread writes to its tensors: those must be no tensors of inference
def _continuous(model: Model, rows: int, context: int) -> list[float]:
    """Between the tokens of one row, while all rows decode. About one prompt is read in a step, so that by the end of
    the last one the first row has `rows` tokens."""
    import transformers

    new = NEW + rows
    config = transformers.ContinuousBatchingConfig(
        num_blocks=rows * (-(-context // PAGE) + 1), max_batch_tokens=context + rows, safety_margin=0.0,
        allow_block_sharing=False,
    )  # fmt: skip
    greedy = transformers.GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)
    made = model.generate_batch(
        inputs=_random(model, rows, context - new).tolist(), generation_config=greedy,
        continuous_batching_config=config, record_timestamps=True,
    )  # fmt: skip
    times = [each.timestamps for each in made.values()]
    if [len(each) for each in times] != [new] * rows:
        raise RuntimeError(f"generate_batch gave other than {new} tokens to each of {rows} requests")
    began, ended = max(each[0] for each in times), min(each[-1] for each in times)
    return [two - one for one, two in pairwise(time for time in times[0] if began <= time <= ended)]


class _Moment:
    """The moment when the device has done all that was queued; elsewhere, now."""

    def __init__(self, device: torch.device) -> None:
        self._at = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def until(self, later: _Moment) -> float:
        """Seconds."""
        if self._event is None or later._event is None:
            return later._at - self._at
        later._event.synchronize()
        return self._event.elapsed_time(later._event) / 1e3


if __name__ == "__main__":
    measure(Path(sys.argv[1]), json.loads(sys.argv[2]))
