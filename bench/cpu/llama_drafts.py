"""llama.cpp's side of `bench.speculation peers`, run by an interpreter that has `llama_cpp`:
`python llama_drafts.py MODEL THREADS PLAN`; prints JSON.

PLAN is JSON: {"prompts": [[token, ...], ...], "steps": tokens, "share": of planted tokens that are right, "predicted":
[tokens of a draft, ...]}. The modes are those of llama-cpp-python: `LlamaPromptLookupDecoding` with its own defaults,
and its interface of draft models, `LlamaDraftModel`, with one that costs nothing: it proposes what was written without
drafts. One sequence at a time, as drafts have no batch there. Imports nothing of
ours.
"""

from __future__ import annotations

import json
import random
import sys
import time
from itertools import count
from typing import Any  # Any: llama_cpp has no types

import numpy as np
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


class PlantedLlamaDrafts:
    """A draft model (`LlamaDraftModel`): proposes `known` texts, each token right with probability `share`."""

    def __init__(self, known: dict[tuple[int, ...], list[int]], share: float, count: int) -> None:
        self._known, self._share, self._count = known, share, count
        self._draw = random.Random(1)

    def __call__(self, input_ids: Any, /, **more: Any) -> Any:
        text = [int(token) for token in input_ids]
        for prompt, known in self._known.items():
            written = text[len(prompt) :]
            if tuple(text[: len(prompt)]) == prompt and known[: len(written)] == written:
                following = known[len(written) :][: self._count]
                right = [token if self._draw.random() < self._share else (token + 1) % 1000 for token in following]
                return np.array(right, dtype=np.intc)
        return np.array([], dtype=np.intc)


def main() -> None:
    path, threads, plan = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    prompts = [tuple(prompt) for prompt in plan["prompts"]]
    known: dict[tuple[int, ...], list[int]] = {}
    room = max(map(len, prompts)) + plan["steps"] + 2 * max((10, *plan["predicted"]))
    modes: dict[str, Any] = {"off": None, "lookup": LlamaPromptLookupDecoding()}
    for most in plan["predicted"]:
        modes[f"planted {most}"] = PlantedLlamaDrafts(known, plan["share"], most)
    found = {}
    for name, drafts in modes.items():
        model = Llama(
            path, n_ctx=room, n_batch=room, n_threads=threads, n_threads_batch=threads, draft_model=drafts,
            verbose=False,
        )  # fmt: skip
        step, steps = model.eval, count()

        def counted(tokens: Any, step: Any = step, steps: Any = steps) -> None:
            next(steps)
            step(tokens)

        model.eval = counted
        texts, seconds, warm = list[list[int]](), 0.0, 0
        for nth, prompt in enumerate((prompts[0], *prompts)):
            if nth == 1:  # the first one warms up
                texts, seconds, warm = [], 0.0, next(steps) + 1
            model.reset()
            began, text = time.perf_counter(), list[int]()
            for token in model.generate(list(prompt), temp=0.0):
                text.append(int(token))
                if len(text) == plan["steps"]:
                    break
            seconds += time.perf_counter() - began
            texts.append(text)
        if drafts is None:
            known.update(zip(prompts, texts, strict=True))
        same = [text == known[prompt] for prompt, text in zip(prompts, texts, strict=True)]
        tokens = sum(map(len, texts))
        found[name] = {
            "tokens_per_s": tokens / seconds,
            "tokens_per_step": tokens / (next(steps) - warm),
            "same_texts": same,
        }
        model.close()
    print(json.dumps(found))


main()
