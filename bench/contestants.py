"""Who runs a workload: this engine, and `transformers` one request at a time or as one padded batch."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch

from bench.workload import Request
from engine import GREEDY, Engine, Span


async def run_engine(engine: Engine, requests: Items[Request]) -> float:
    """Seconds until all requests, submitted at once, have generated all their tokens."""
    torch.set_num_threads(engine.threads)  # a contestant in this process may have changed it

    async def one(request: Request) -> None:
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

    def choose_threads(self, requests: Items[Request]) -> int:
        """Take one thread or all of them for what follows, whichever serves these requests faster."""
        times = {}
        for count in {1, self._threads}:
            self._threads = count
            self.one_at_a_time(requests)  # the first time warms up
            times[count] = self.one_at_a_time(requests)
        self._threads = min(times, key=lambda count: times[count])
        return self._threads

    def batched(self, requests: Items[Request]) -> float:
        """One left-padded batch until the longest request is done, as static batching does. Seconds."""
        width = max(len(r.prompt) for r in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        return self._generate(ids, mask, max(r.new_tokens for r in requests))

    def one_at_a_time(self, requests: Items[Request]) -> float:
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
