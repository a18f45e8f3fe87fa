"""Throughput beside transformers, with and without shared prefixes.

Generated tokens a second are compared on the same checkpoint, in the same process, in turns. Checkpoints are the
bundled one and a random one in SmolLM2-135M's shape, made on the spot. Requests have prompts and answers of mixed
lengths, the same for every contestant of a run.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from engine import GREEDY, Engine, EngineConfig, Span


@dataclass(frozen=True, slots=True)
class TimedRequest:
    prompt: tuple[int, ...]
    new_tokens: int  # generated exactly, end of sequence or not


def mixed(count: int, vocab: int, *, seed: int = 0, longest: int = 512) -> list[TimedRequest]:
    """`count` requests with lengths spread as chat's: log-normal, prompts around 100 tokens, answers around 80.

    `longest` bounds prompt and answer together, for models with a short context.
    """
    rng = random.Random(seed)

    def length(median: float, spread: float, low: int, high: int) -> int:
        return max(low, min(high, round(rng.lognormvariate(0, spread) * median)))

    requests = []
    for _ in range(count):
        new = length(80, 0.7, 8, longest // 2)
        prompt = length(100, 0.8, 4, longest - new)
        requests.append(TimedRequest(tuple(rng.randrange(10, vocab) for _ in range(prompt)), new))
    return requests


async def run_engine(engine: Engine, requests: Items[TimedRequest]) -> float:
    """Seconds until all requests, submitted at once, have generated all their tokens."""
    torch.set_num_threads(engine.threads)  # a contestant in this process may have changed it

    async def one(request: TimedRequest) -> None:
        async with await engine.open(request.prompt) as seq:
            result = await seq.generate_all(Span(GREEDY, max_tokens=request.new_tokens, ignore_eos=True))
            assert len(result.token_ids) == request.new_tokens

    start = time.perf_counter()
    await asyncio.gather(*(one(r) for r in requests))
    return time.perf_counter() - start


class Transformers:
    """The reference implementation, with its own cache and default attention. Any: its classes are untyped."""

    def __init__(self, path: Path, dtype: str) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        self._model.generation_config = transformers.GenerationConfig(pad_token_id=0, do_sample=False)
        self._threads = os.cpu_count() or 1

    def choose_threads(self, requests: Items[TimedRequest]) -> int:
        """Take one thread or all of them from here on, whichever serves these requests faster."""
        times = {}
        for count in {1, self._threads}:
            self._threads = count
            self.one_at_a_time(requests)  # the first time warms up
            times[count] = self.one_at_a_time(requests)
        self._threads = min(times, key=lambda count: times[count])
        return self._threads

    def batched(self, requests: Items[TimedRequest]) -> float:
        """One left-padded batch until the longest request is done, as static batching does. Seconds."""
        width = max(len(r.prompt) for r in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        return self._generate(ids, mask, max(r.new_tokens for r in requests))

    def one_at_a_time(self, requests: Items[TimedRequest]) -> float:
        """One request after the other. Seconds."""
        return sum(
            self._generate(torch.tensor([r.prompt]), torch.ones(1, len(r.prompt), dtype=torch.long), r.new_tokens)
            for r in requests
        )

    def _generate(self, ids: torch.Tensor, mask: torch.Tensor, new: int) -> float:
        torch.set_num_threads(self._threads)  # the engine has a choice of its own
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, min_new_tokens=new, max_new_tokens=new)
        assert out.shape[1] == ids.shape[1] + new
        return time.perf_counter() - start


# Llama-shaped, 134.5M parameters: the published sizes of SmolLM2-135M.
SMOLLM2_135M: dict[str, Any] = {  # Any: arguments of an untyped configuration class
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "rope_theta": 100000.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def random_checkpoint(path: Path, tokenizer: Path) -> Path:
    """A random checkpoint of SmolLM2-135M's shape in `path`, made unless it is there; its tokenizer is borrowed."""
    if not (path / "model.safetensors").exists():
        import transformers  # a development dependency: only the benchmark against it needs it

        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SMOLLM2_135M)
        model: Any = transformers.LlamaForCausalLM(config)
        model.to(torch.bfloat16).save_pretrained(path)
        (path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    return path


def weight_bytes(path: Path, itemsize: int) -> int:
    """Bytes of weights that a decode step reads, `itemsize` a number; an untied embedding is only looked up."""
    import json

    from safetensors import safe_open

    config = json.loads((path / "config.json").read_text())
    total = 0
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a dict
                if "embed_tokens" in name and not config.get("tie_word_embeddings"):
                    continue
                size = 1
                for extent in tensors.get_slice(name).get_shape():
                    size *= extent
                total += size * itemsize
    return total


async def throughput(
    model: Path,
    concurrency: list[int],
    *,
    longest: int,
    dtype: str,
    repeats: int,
    bandwidth: float,
    progress: Progress,
) -> dict[str, Any]:  # Any: plain JSON
    """Median tokens a second of each contestant, and ratios of the medians of each turn.

    One at a time is measured on the first few requests of the same workload: its rate does not depend on their number.
    """
    peer = Transformers(model, dtype)
    rows = []
    async with await Engine.start(EngineConfig(str(model), dtype=dtype, prefix_cache=False)) as engine:  # type: ignore[arg-type]  # a dtype's name
        await run_engine(engine, mixed(2, engine.vocab_size))
        peer_threads = peer.choose_threads(mixed(1, engine.vocab_size))
        task = progress.add_task(f"{model.name}: throughput", total=len(concurrency) * repeats)
        for count in concurrency:
            requests = mixed(count, engine.vocab_size, seed=count, longest=longest)
            tokens = sum(r.new_tokens for r in requests)
            few = requests[:4]
            few_tokens = sum(r.new_tokens for r in few)
            ours, batched, single = [], [], []
            for _ in range(repeats):
                ours.append(tokens / await run_engine(engine, requests))
                batched.append(tokens / peer.batched(requests))
                single.append(few_tokens / peer.one_at_a_time(few))
                progress.advance(task)
            rows.append(
                {
                    "concurrency": count,
                    "generated_tokens": tokens,
                    "engine_tokens_per_s": statistics.median(ours),
                    "transformers_batched_tokens_per_s": statistics.median(batched),
                    "transformers_one_at_a_time_tokens_per_s": statistics.median(single),
                    "ratio_to_batched": _ratio(ours, batched),
                    "ratio_to_one_at_a_time": _ratio(ours, single),
                }
            )
        floor = weight_bytes(model, 2 if dtype == "bfloat16" else 4) / bandwidth
        step = await _decode_step(engine)
    return {
        "model": model.name,
        "dtype": dtype,
        "longest_request": longest,
        "engine_threads": engine.threads,
        "transformers_threads": peer_threads,
        "rows": rows,
        "decode_step_ms": step * 1e3,
        "floor_ms": floor * 1e3,
        "step_over_floor": step / floor,
    }


async def _decode_step(engine: Engine) -> float:
    """Seconds for a decode step of one sequence with a short context, all of Python included: the best of five."""
    best = float("inf")
    for seed in range(5):
        (request,) = mixed(1, engine.vocab_size, seed=seed, longest=64)
        before = await engine.stats()
        seconds = await run_engine(engine, [request])
        after = await engine.stats()
        best = min(best, seconds / (after.steps - before.steps))
    return best


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


PROMPT_TOKENS = 1000


async def prefix(model: Path, *, dtype: str, repeats: int, progress: Progress) -> dict[str, Any]:  # Any: plain JSON
    """Cost as a ratio of times with the cache on and off, taken in turns; time to first token, repeated over cold."""
    rng = random.Random(3)
    task = progress.add_task(f"{model.name}: prefix cache", total=2 * repeats)
    on = await Engine.start(EngineConfig(str(model), dtype=dtype))  # type: ignore[arg-type]  # a dtype's name
    off = await Engine.start(EngineConfig(str(model), dtype=dtype, prefix_cache=False))  # type: ignore[arg-type]
    async with on, off:
        costs = []
        for turn in range(repeats + 1):
            requests = [
                TimedRequest(tuple(rng.randrange(10, on.vocab_size) for _ in range(200)), 16) for _ in range(16)
            ]
            pair = [(on, requests), (off, requests)]
            times = {id(engine): await run_engine(engine, work) for engine, work in (pair if turn % 2 else pair[::-1])}
            if turn:  # the first warms both
                costs.append(times[id(on)] / times[id(off)])
                progress.advance(task)
        stats = await on.stats()
        cold, warm = [], []
        for _ in range(repeats):
            prompt = tuple(rng.randrange(10, on.vocab_size) for _ in range(PROMPT_TOKENS))
            cold.append(await _first_token(on, prompt))
            warm.append(await _first_token(on, prompt))
            progress.advance(task)
    return {
        "model": model.name,
        "cost_at_no_hits": {"median": statistics.median(costs), "min": min(costs), "max": max(costs)},
        "hits_while_measuring_cost": stats.prefix_hit_tokens,
        "prompt_tokens": PROMPT_TOKENS,
        "ttft_cold_ms": statistics.median(cold) * 1e3,
        "ttft_repeated_ms": statistics.median(warm) * 1e3,
        "ttft_ratio": statistics.median(w / c for w, c in zip(warm, cold, strict=True)),
    }


async def _first_token(engine: Engine, prompt: tuple[int, ...]) -> float:
    start = time.perf_counter()
    async with await engine.open(prompt) as seq:
        await seq.generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True))
        return time.perf_counter() - start
