"""A model that costs nothing: its logits are there before it is asked. Beside it the engine is the real one.

It can keep time, so that each step takes as long as a model's would. Its tokens are Pebble's, so that they are real
text to detokenise; which ones it likes best depends on the row alone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor

from engine.assemble import Parts
from engine.config import EngineConfig
from engine.constrain.compiler import default_compiler
from engine.constrain.masks import Constraints, Masks
from engine.core import EngineCore
from engine.detokenizer import Detokenizer
from engine.kv.blocks import BlockPool
from engine.messages import Loaded
from engine.runner import make_batch
from engine.scheduler import Step
from engine.tokenizer import Tokenizer

MODEL = Path("models/pebble")
PACE = "BENCH_STEP_S"  # a variable: the core may be in another process
VOCAB = 4096
LONGEST = 4096


class NullRunner:
    """Makes the step's batch, as any runner must, and answers with rows that were drawn once."""

    vocab_size = VOCAB

    def __init__(self, config: EngineConfig, step_s: float) -> None:
        self._block_size = config.block_size
        self._step_s = step_s
        self._next = 0.0
        rows = max(config.max_running, config.max_batch_tokens)
        self._logits = 5 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0))

    def run(self, step: Step) -> Tensor:
        batch = make_batch(step, self._block_size)
        if self._step_s:
            now = time.monotonic()
            self._next = max(now, self._next + self._step_s)
            time.sleep(max(0.0, self._next - now))
        return self._logits[: len(batch.logits_at)]


def core_of(config: EngineConfig, step_s: float = 0.0) -> tuple[EngineCore, Tokenizer, BlockPool]:
    tokenizer = Tokenizer.load(MODEL)
    pool = BlockPool(config.kv_blocks or 1 << 15)
    compiler = default_compiler(tokenizer, VOCAB)
    core = EngineCore(
        config, NullRunner(config, step_s), pool, lambda: Detokenizer(tokenizer), tokenizer.eos_token_ids, b"bench",
        constraints=Constraints(compiler, Masks(VOCAB, torch.device("cpu"))),
    )  # fmt: skip
    return core, tokenizer, pool


def assemble(config: EngineConfig) -> Parts:
    """As `engine.assemble.assemble`, with this model."""
    torch.set_num_threads(1)
    core, _, _ = core_of(config, float(os.environ.get(PACE, "0")))
    assert core._constraints is not None
    loaded = Loaded(str(MODEL), VOCAB, LONGEST, LONGEST, "cpu", "float32", 1)
    return Parts(core, core._constraints.compiler, loaded)
