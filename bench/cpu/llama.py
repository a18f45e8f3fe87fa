"""llama.cpp's side, run by an interpreter that has `llama_cpp`: `python llama.py MODEL THREADS PLAN`; prints JSON.

PLAN is JSON: {"batches": [...], "prompt": tokens, "steps": steps, "prefill": tokens, "clock": a function of the module
time, "widths": [...]}, the last of one sequence's steps of so many tokens, as a draft's are. Imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import llama_cpp as c


def main() -> None:
    path, threads, plan = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    clock = getattr(time, plan["clock"])
    c.llama_backend_init()
    model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
    options = c.llama_context_default_params()
    most = max((*plan["batches"], *plan.get("widths", ())))
    options.n_ctx = most * (plan["prompt"] + plan["steps"] + 8) + plan["prefill"]
    options.n_batch = options.n_ubatch = 512
    options.n_seq_max = max(plan["batches"])
    options.n_threads = options.n_threads_batch = threads
    options.kv_unified = True
    context = c.llama_init_from_model(model, options)
    memory = c.llama_get_memory(context)
    batch = c.llama_batch_init(512, 0, 1)

    def decode(entries: list[tuple[int, int]], logits: bool) -> None:
        """(sequence, position) of each token."""
        for first in range(0, len(entries), 512):
            part = entries[first : first + 512]
            batch.n_tokens = len(part)
            for i, (sequence, position) in enumerate(part):
                batch.token[i] = (position * 7919 + sequence) % 150_000
                batch.pos[i] = position
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = logits
            if not logits:
                batch.logits[len(part) - 1] = True
            assert c.llama_decode(context, batch) == 0
        c.llama_synchronize(context)
        pointer = c.llama_get_logits(context)
        assert ctypes.cast(pointer, ctypes.c_void_p).value

    found = {}
    for n in plan["batches"]:
        c.llama_memory_clear(memory, True)
        decode([(s, p) for s in range(n) for p in range(plan["prompt"])], False)
        decode([(s, plan["prompt"]) for s in range(n)], True)  # warms up
        start = clock()
        for step in range(plan["steps"]):
            decode([(s, plan["prompt"] + 1 + step) for s in range(n)], True)
        found[n] = n * plan["steps"] / (clock() - start)
    best = 0.0
    for _ in range(2):
        c.llama_memory_clear(memory, True)
        start = clock()
        decode([(0, p) for p in range(plan["prefill"])], False)
        best = max(best, plan["prefill"] / (clock() - start))
    widths = {}
    for n in plan.get("widths", ()):
        c.llama_memory_clear(memory, True)
        decode([(0, p) for p in range(plan["prompt"])], False)
        times = []
        for step in range(plan["steps"]):
            start = clock()
            decode([(0, plan["prompt"] + step * n + at) for at in range(n)], True)
            times.append(clock() - start)
        widths[n] = sorted(times)[len(times) // 2]
    print(json.dumps({"decode": found, "prefill": best, "widths": widths}))


main()
