"""Gate of reused chunks: measures how far they move a model's distributions, and refuses them where that is too far.

The model reads passages, each under a label of its own and computed once in another order, with reused and with exact
K/V, and answers a question on one of them: both read the answer that it gives greedily with exact K/V, token by token,
on the kernels that serve. The result is kept by the model's fingerprint and numerics. So few texts say nothing of a
corpus; `bench.kv` measures more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import ChatTemplateError, InvalidParameter
from engine.kv_cache.chunk_reuse.find_chunks import find_chunks
from engine.kv_cache.chunk_reuse.gate_texts import INSTRUCTION, PASSAGES, QUESTIONS, SHOWN
from engine.kv_cache.chunk_reuse.kv_moves import KVMover, why_not
from engine.kv_cache.quality_gate import BLOCK, keep_record, kept_record
from engine.model.batch import Batch, KVCache
from engine.model.decoder import Decoder
from engine.model.numerics import Numerics
from engine.model.tokenizer import Tokenizer
from engine.params import ChunkSpans

log = logging.getLogger(__name__)

GATE_VERSION = 1  # of the texts and the measure: records of another one are made again
STEP = 512  # tokens
ANSWER = 24  # tokens, unless the answer ends before


@dataclass(frozen=True, slots=True)
class ChunkedPrompt:
    """A prompt with the spans of its chunks; `source` has the same chunks, in another order."""

    tokens: Sequence[int]
    chunks: ChunkSpans
    source: Sequence[int]
    source_chunks: ChunkSpans


@dataclass(frozen=True, slots=True)
class ChunkAnswer:
    """One answer, `tokens` long: the sum of the KL divergences, in nats, and the tokens of which the likeliest is the
    same."""

    tokens: int
    kl: float
    same: int


@dataclass(frozen=True, slots=True)
class ChunkDivergence:
    """Means over `tokens` positions of `answers` answers: the KL divergence in nats, the share of positions with the
    same likeliest token, and that of answers that are the same to their end."""

    tokens: int
    kl: float
    same_top1: float
    answers: int
    same_answers: float


class _Reader:
    """Reads single sequences, each in blocks of its own."""

    def __init__(self, decoder: Decoder, sequences: int, length: int) -> None:
        self._decoder, self._blocks = decoder, -(-length // BLOCK)
        self.kv = KVCache.of(decoder.spec, sequences * self._blocks + 1, BLOCK, decoder.dtype, decoder.device)

    def table(self, sequence: int) -> list[int]:
        return list(range(1 + sequence * self._blocks, 1 + (sequence + 1) * self._blocks))

    def read(self, sequence: int, tokens: Sequence[int], start: int, end: int) -> Tensor:
        """Runs tokens [start, end); returns the logits after each, (end - start, vocabulary) in float32."""
        found = []
        for first in range(start, end, STEP):
            last = min(end, first + STEP)
            positions = torch.arange(first, last, device=self._decoder.device)
            table = torch.tensor(self.table(sequence)[: -(-last // BLOCK)], device=self._decoder.device)
            slots = table[positions // BLOCK] * BLOCK + positions % BLOCK
            ids = torch.tensor(tokens[first:last], device=self._decoder.device)
            order = torch.arange(last - first, device=self._decoder.device)
            batch = Batch(ids, positions, slots, (0, last - first), (last,), table[None], order[-1:])
            found.append(self._decoder.forward(batch, self.kv).clone())
        return found[-1][-1]


@torch.inference_mode()
def measure_prompt(decoder: Decoder, prompt: ChunkedPrompt, head: int, ends: Sequence[int]) -> ChunkAnswer:
    """Measures one prompt, of which `head` tokens of each chunk are computed. The answer ends with one of `ends`."""
    tokens, length = list(prompt.tokens), len(prompt.tokens)
    reader = _Reader(decoder, 3, max(length + ANSWER, len(prompt.source)))
    mover = KVMover(decoder.spec, reader.kv, decoder.rotations)
    reader.read(0, prompt.source, 0, len(prompt.source))
    source, table, cursor = reader.table(0), reader.table(1), 0
    places = {tuple(prompt.source[start:end]): start for start, end in prompt.source_chunks}
    for start, end in prompt.chunks:
        at = places.get(tuple(tokens[start:end]))
        if at is None or end - start <= head:
            continue
        reader.read(1, tokens, cursor, start + head)
        moved = range(start + head, end)
        delta = start - at
        pairs = [
            (source[(to - delta) // BLOCK] * BLOCK + (to - delta) % BLOCK, table[to // BLOCK] * BLOCK + to % BLOCK)
            for to in moved
        ]
        mover.move(pairs, delta)
        cursor = end
    exact, reused = reader.read(2, tokens, 0, length), reader.read(1, tokens, cursor, length)
    kl, same = 0.0, 0
    for count in range(1, ANSWER + 1):
        before, after = exact.log_softmax(-1), reused.log_softmax(-1)
        kl += float((before.exp() * (before - after)).sum(dtype=torch.float64))
        token = int(before.argmax())
        same += token == int(after.argmax())
        if token in ends or count == ANSWER:
            break
        tokens.append(token)
        exact, reused = (reader.read(each, tokens, len(tokens) - 1, len(tokens)) for each in (2, 1))
    return ChunkAnswer(count, kl, same)


def _prompts(tokenizer: Tokenizer, most: int) -> Iterator[ChunkedPrompt]:
    """Yields prompts of passages and a question, of `most` tokens at most."""
    labelled = [f"[S{number}] {text}" for number, text in enumerate(PASSAGES, 1)]

    def encoded(numbers: Sequence[int], question: str) -> list[int]:
        system = "\n".join([INSTRUCTION, "", *(labelled[number] for number in numbers)])
        try:
            return tokenizer.apply_chat_template(
                [{"role": "system", "content": system}, {"role": "user", "content": question}]
            )
        except ChatTemplateError:
            return tokenizer.encode(f"{system}\n\n{question}\n")

    for number, questions in enumerate(QUESTIONS):
        others = [(number + step) % len(PASSAGES) for step in range(1, SHOWN)]
        for at, question in enumerate(questions):
            place = (number + at) % SHOWN
            shown = [*others[:place], number, *others[place:]]
            source = [*reversed(shown[1:]), shown[0]]
            texts = [labelled[each] for each in shown]
            prompts = [encoded(each, question) for each in (shown, source)]
            if max(map(len, prompts)) + ANSWER <= most:
                spans = [find_chunks(each, texts, tokenizer.encode) for each in prompts]
                yield ChunkedPrompt(prompts[0], spans[0], prompts[1], spans[1])


def measured(answers: Sequence[ChunkAnswer]) -> ChunkDivergence:
    """Returns the means over all answers."""
    tokens, n = sum(each.tokens for each in answers), len(answers)
    kl, same = sum(each.kl for each in answers), sum(each.same for each in answers)
    return ChunkDivergence(tokens, kl / tokens, same / tokens, n, sum(e.same == e.tokens for e in answers) / n)


def _kept(path: Path, key: dict[str, object]) -> ChunkDivergence | None:
    record = kept_record(path, key) or {}
    try:
        tokens, answers = int(record["tokens"]), int(record["answers"])
        kl, same_top1, same_answers = (float(record[name]) for name in ("kl", "same_top1", "same_answers"))
    except (ValueError, KeyError, TypeError):
        return None
    return ChunkDivergence(tokens, kl, same_top1, answers, same_answers)


def check_chunk_reuse(
    decoder: Decoder, tokenizer: Tokenizer, config: EngineConfig, model: bytes, numerics: Numerics
) -> ChunkDivergence:
    """Measures reused chunks, or finds the measurement of an earlier start in `config.probe_dir`. `model` is the
    fingerprint of the model's files.

    Raises:
        InvalidParameter: the model's K/V cannot be moved, its context is too short to measure, it moves too far, or
            too few answers stay the same.
    """
    chosen = config.chunk_reuse
    assert chosen is not None, "the engine reuses no chunks"
    why = "the Triton kernels run the model" if decoder.on_gpu else why_not(decoder.spec)
    if why is not None:
        raise InvalidParameter("chunk_reuse", f"chunk_reuse is set, but {why}; accepted: None.")
    head = chosen.recompute_tokens
    key = {"version": GATE_VERSION, "model": model.hex(), "numerics": numerics.recorded(), "recompute_tokens": head}
    path = None if config.probe_dir is None else Path(config.probe_dir) / f"kv-chunks-{model.hex()[:16]}.json"
    found = None if path is None else _kept(path, key)
    if found is None:
        prompts = list(_prompts(tokenizer, decoder.spec.max_position_embeddings))
        if not any(prompt.chunks for prompt in prompts):
            most = decoder.spec.max_position_embeddings
            message = f"chunk_reuse is set, and the model's {most} positions are too few to measure it; accepted: None."
            raise InvalidParameter("chunk_reuse", message)
        found = measured([measure_prompt(decoder, each, head, tokenizer.eos_token_ids) for each in prompts])
        if path is not None:
            keep_record(path, {**key, **asdict(found)}, "reused chunks are")
    log.info(
        "reused chunks: KL %.2g nats a token, %.1f%% of %d likeliest tokens and %.0f%% of %d answers the same",
        found.kl, 100 * found.same_top1, found.tokens, 100 * found.same_answers, found.answers,
    )  # fmt: skip
    if not (found.kl <= chosen.max_kl and found.same_answers >= chosen.min_agreement):
        raise InvalidParameter(
            "chunk_reuse",
            f"chunk_reuse is set, which moves this model's distributions by {found.kl:.2g} nats a token (KL "
            f"divergence) and leaves {found.same_answers:.0%} of {found.answers} answers the same; max_kl is "
            f"{chosen.max_kl:g} and min_agreement {chosen.min_agreement:g}; accepted: None, more recompute_tokens than "
            f"{head}, a larger max_kl or a smaller min_agreement.",
        )
    return found
