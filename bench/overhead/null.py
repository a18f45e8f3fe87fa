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

from engine.builder import EngineParts
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.messages import Loaded
from engine.core.step import Step
from engine.kv_cache.block_pool import BlockPool
from engine.model.batch import Batching
from engine.model.detokenizer import Detokenizer
from engine.model.numerics import Numerics
from engine.model.tokenizer import Tokenizer
from engine.structured_output.bitmask import Constraints, Masks
from engine.structured_output.compiler import default_compiler

MODEL = Path("models/pebble")
PACE = "BENCH_STEP_S"  # a variable: the core may be in another process
VOCAB = 4096
MAX_LENGTH = 4096


class NullRunner:
    """Makes the step's batch, as any runner must, and answers with rows that were sampled once."""

    vocab_size = VOCAB
    queues = False

    def __init__(self, config: EngineConfig, step_s: float, *, paced: bool) -> None:
        """A step takes `step_s`; or `paced`, it ends so long after the one before did, if there is time."""
        self._batching = Batching(config.block_size)
        self._step_s, self._paced = step_s, paced
        self._next = 0.0
        rows = max(config.max_running, config.step_tokens)
        self._logits = 5 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0))

    def run(self, step: Step) -> Tensor:
        batch = self._batching.make(step)
        if self._step_s:
            now = time.monotonic()
            self._next = max(now, self._next + self._step_s) if self._paced else now + self._step_s
            time.sleep(self._next - now)
        return self._logits[: len(batch.logits_at)]


def core_of(config: EngineConfig, step_s: float = 0.0, *, paced: bool = False) -> EngineCore:
    tokenizer = Tokenizer.load(MODEL)
    compiler = default_compiler(tokenizer, VOCAB)
    runner = NullRunner(config, step_s, paced=paced)
    constraints = Constraints(compiler, Masks(VOCAB, torch.device("cpu")))
    return EngineCore(
        config, runner, BlockPool(config.kv_blocks or 1 << 15), lambda: Detokenizer(tokenizer),
        tokenizer.eos_token_ids, b"bench", constraints=constraints,
    )  # fmt: skip


def assemble(config: EngineConfig) -> EngineParts:
    """As `engine.builder.assemble`, with this model."""
    torch.set_num_threads(1)
    core = core_of(config, float(os.environ.get(PACE, "0")), paced=True)
    assert core._constraints is not None
    none = Numerics("float32", "none", "none", "auto", "cpu", "", 0, "", batch_invariant=True)
    loaded = Loaded(str(MODEL), VOCAB, MAX_LENGTH, "cpu", "float32", 1, none)
    return EngineParts(core, core._constraints.compiler, loaded)
