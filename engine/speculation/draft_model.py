"""Proposes what a smaller model of the same vocabulary samples next (Leviathan et al. 2023).

Its K/V are sequences of a second pool, one for each that it drafts for, with prefix caching, so forks share them. It
samples by the target's own requests: seed, place and position key the same random numbers, so where the two
distributions are alike, so are the samples, at any temperature. It has no adapters: what it drafts for one is the
base's, and its K/V of a tenant's text are the same whatever adapter the target runs. Knows nothing of the target's
blocks.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.core.request import SequenceState, SpanJob
from engine.core.sampler import begin_sampling
from engine.core.sampling_types import RowSampling
from engine.core.span_state import row_sampling
from engine.core.step import Row, Step
from engine.errors import InvalidParameter
from engine.kv_cache.allocation import advance_kv, allocate, match_prefix
from engine.kv_cache.block_pool import BlockPool, OutOfBlocks, root_digest
from engine.model.batch import KVCache
from engine.model.decoder import Decoder, load_decoder
from engine.model.gpu_runner import GpuRunner
from engine.model.memory import block_bytes
from engine.model.runner import ModelRunner, Runner
from engine.speculation.proposer import NOTHING, DraftTokens, Proposer

MIN_TEMPERATURE = 0.1  # for probabilities: below it a token's is all or nothing
MIN_SURVIVAL = 0.05  # probability that all of a draft is right, below which no token is added
READ = 512  # tokens that the draft model catches up with in a step; a longer prompt takes several


def request_of(seq: SequenceState, draft: tuple[int, ...]) -> RowSampling | None:
    """Returns the target's own sampling request at the position after a draft."""
    assert isinstance(seq.job, SpanJob)
    return row_sampling(seq, seq.job, 0, draft)


def sampled(logits: Tensor, requests: Sequence[RowSampling | None]) -> list[tuple[int, float]]:
    """Samples a token for each row of `logits` (rows, vocabulary), float32, which are changed. Returns the tokens with
    their probabilities at the rows' temperatures."""
    if not any(requests):
        rows = logits.cpu().numpy()  # torch would wait for its threads
        largest = rows.max(-1)
        return list(zip(rows.argmax(-1).tolist(), (1 / np.exp(rows - largest[:, None]).sum(-1)).tolist(), strict=True))
    temperature = [1.0 if each is None else max(MIN_TEMPERATURE, each.sampling.temperature) for each in requests]
    scaled = logits / torch.tensor(temperature, device=logits.device)[:, None]
    tokens = begin_sampling(logits, requests).fetch().token_ids
    chosen = scaled.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return list(zip(tokens, (chosen - scaled.logsumexp(-1)).exp().tolist(), strict=True))


@dataclass(slots=True, eq=False)
class _Drafting:
    """A sequence that drafts: what the draft model knows of it, and the draft so far."""

    seq: SequenceState
    shadow: SequenceState
    budget: int
    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    alive: float = 1.0


class DraftModel(Proposer):
    """`runner` runs the draft model on `pool`'s blocks of `block_size` tokens; sequences of up to `max_len`."""

    name = "draft"
    model = True

    def __init__(self, runner: Runner, pool: BlockPool, block_size: int, max_len: int) -> None:
        self._runner = runner
        self._pool = pool
        self._size = block_size
        self._max_len = max_len
        self._secret = secrets.token_bytes(16)
        self._shadows: OrderedDict[int, SequenceState] = OrderedDict()  # by the target's sequence, used last at the end

    @classmethod
    def load(cls, path: Path, target: Decoder, config: EngineConfig, blocks: int) -> DraftModel:
        """Loads a draft model beside its target, on its device and in its dtype. It has as many blocks of K/V as the
        target, `blocks`, or half of its memory, if that is less.

        Raises:
            CheckpointError, UnsupportedArchitecture: see `load_decoder`.
            InvalidParameter: it has another vocabulary, or recurrent layers.
        """
        draft = load_decoder(
            path, dtype=target.dtype, device=target.device, kernels=config.kernels, deterministic=config.deterministic
        )
        spec, accepted = draft.spec, f"a model with {target.spec.vocab_size} tokens of the same tokenizer"
        if spec.vocab_size != target.spec.vocab_size:
            message = f"draft_model {path.name} has {spec.vocab_size} tokens; accepted: {accepted}."
            raise InvalidParameter("draft_model", message)
        if spec.recurrent_layers:
            message = f"draft_model {path.name} has recurrent layers, which cannot go back; accepted: {accepted}."
            raise InvalidParameter("draft_model", message)
        memory = blocks * block_bytes(target.spec, config.block_size, target.dtype, config.kv_dtype)
        blocks = max(1, min(blocks, memory // 2 // block_bytes(spec, config.block_size, draft.dtype)))
        kv = KVCache.of(spec, blocks + 1, config.block_size, draft.dtype, draft.device)
        max_len = spec.max_position_embeddings
        runner: Runner = ModelRunner(draft, kv, draft.device, deterministic=config.deterministic)
        if draft.on_gpu:
            per_sequence = -(-max_len // config.block_size)
            # after a draft that was right as a whole, the next one begins with its last token and the one after
            runner = GpuRunner(
                draft, kv, draft.device, max_rows=config.max_running, max_blocks=per_sequence, graphs=config.graphs,
                draft_width=2,
            )  # fmt: skip
        return cls(runner, BlockPool(blocks), config.block_size, max_len)

    @torch.inference_mode()
    def propose_all(self, asked: Sequence[tuple[SequenceState, int]], min_confidence: float) -> list[DraftTokens]:
        drafting = [
            _Drafting(seq, self._caught_up(seq), min(budget, self._max_len - len(seq)))
            for seq, budget in asked
            if len(seq) < self._max_len
        ]
        found = {each.seq.id: each for each in drafting}
        while drafting:
            kept = {each.seq.id for each in drafting}
            rows = [row for each in drafting if (row := self._row(each.shadow, kept)) is not None]
            if not rows:
                break
            self._pool.clear_pending()
            logits = self._runner.run(Step(rows, sum(row.count for row in rows)))
            ready = [each for each in drafting if self._ran(each.shadow, rows)]
            self._sample(ready, logits)
            least = max(MIN_SURVIVAL, min_confidence)
            drafting = [each for each in ready if len(each.tokens) < each.budget and each.alive >= least]
        drafts = {id: DraftTokens(each.tokens, each.confidence) for id, each in found.items()}
        return [drafts.get(seq.id, NOTHING) for seq, _ in asked]

    def forget(self, seq: SequenceState) -> None:
        if (shadow := self._shadows.pop(seq.id, None)) is not None:
            self._pool.release(shadow.drop_kv())

    def check(self) -> None:
        """Raises AssertionError unless the pool agrees with the tables."""
        self._pool.check([shadow.table for shadow in self._shadows.values()])

    def _caught_up(self, seq: SequenceState) -> SequenceState:
        """Returns the draft model's sequence, with the target's tokens: those that it had drafted wrongly are gone."""
        shadow = self._shadows.get(seq.id)
        if shadow is None:
            root = root_digest(self._secret, "", "", seq.tenant)  # not the target's, which its adapter is part of
            shadow = self._shadows[seq.id] = SequenceState(seq.id, [], root, seq.arrival)
            shadow.append(seq.tokens, generated=False)
            match_prefix(shadow, self._size, self._pool)
            shadow.cursor = shadow.kv_len = min(shadow.kv_len, len(shadow) - 1)
        self._shadows.move_to_end(seq.id)
        same = min(len(shadow), len(seq))
        while same and shadow.tokens[same - 1] != seq.tokens[same - 1]:  # of a draft; a cut text seldom
            same -= 1
        if shadow.tokens[:same] != seq.tokens[:same]:
            same = 0
        self._pool.release(shadow.truncate(min(same, len(seq) - 1), self._size))
        shadow.append(seq.tokens[len(shadow) :], generated=False)
        return shadow

    def _row(self, shadow: SequenceState, kept: Set[int]) -> Row | None:
        """Returns the row of a sequence. Those that have drafted longest ago give up their blocks for it, but not the
        ones of this step, `kept`; None where that is not enough."""
        count = min(READ, len(shadow) - shadow.kv_len)
        while True:
            try:
                copies = allocate(shadow, shadow.kv_len + count, self._pool, self._size)
            except OutOfBlocks:
                oldest = next((id for id in self._shadows if id not in kept), None)
                if oldest is None:
                    return None
                self._pool.release(self._shadows.pop(oldest).drop_kv())
                continue
            return Row(shadow, shadow.kv_len, count, len(shadow) - 1, copies)

    def _ran(self, shadow: SequenceState, rows: Sequence[Row]) -> bool:
        """Records a row that ran. Returns whether it has logits."""
        row = next((row for row in rows if row.seq is shadow), None)
        if row is None:
            return False
        advance_kv(shadow, row.end, self._pool, self._size)
        return row.end == len(shadow)

    def _sample(self, drafting: Sequence[_Drafting], logits: Tensor) -> None:
        """Adds a token to each draft, by the target's request at its position."""
        if not drafting:
            return
        requests = [request_of(each.seq, each.tokens) for each in drafting]
        for each, (token, probability) in zip(drafting, sampled(logits, requests), strict=True):
            each.tokens += (token,)
            each.confidence += (probability,)
            each.alive *= probability
            each.shadow.append([token], generated=False)
