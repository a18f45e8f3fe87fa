"""Gate of the K/V cache in 4 bits: measures on a short text how far it moves a model's distributions, and refuses it
where that is too far.

The model answers a few questions, and goes on after its answers: a text that is strange to it would make any cache look
bad. What it wrote is read with its own number format and with 4 bits, side by side and each token given, on the kernels
that serve. The result is kept by the model's fingerprint and numerics, so a model is measured once. So few tokens say
nothing of long contexts; bench/kv measures more.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import ChatTemplateError, InvalidParameter
from engine.kv_cache.quantized_cache import Coding, QuantizedCache
from engine.model.batch import Batch, KVCache
from engine.model.decoder import Decoder
from engine.model.numerics import Numerics
from engine.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)

GATE_VERSION = 1  # of the texts, the measure and the number format: records of another one are made again
LENGTH = 96  # tokens of a text, with its question
CHUNK = 32  # tokens of a text in a step
BLOCK = 16
QUESTIONS = (
    "What is 27 + 58?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "How do I reverse a list in Python?",
    "A ferry leaves at 07:40 and takes 2 hours 35 minutes. When does it arrive?",
    "Translate to German: the rain began at noon.",
    "Name three uses of vinegar in a kitchen.",
    "The harbour office is open until six. The pilot came at half past six. Was it open?",
    "Explain why the sky is blue to a child.",
)


@dataclass(frozen=True, slots=True)
class CacheDivergence:
    """Means over `tokens` positions: the KL divergence of the distributions over a quantized cache from those over the
    model's own, in nats, and the share of positions with the same likeliest token."""

    tokens: int
    kl: float
    same_top1: float


def _batch(texts: Tensor, start: int, end: int, wanted: slice) -> Batch:
    """Returns the step of tokens [start, end) of `texts` (rows, length); logits of `wanted` of each row's."""
    rows, length = texts.shape
    blocks = -(-length // BLOCK)
    tables = torch.arange(1, rows * blocks + 1, device=texts.device).view(rows, blocks)
    positions = torch.arange(start, end, device=texts.device)
    slots = tables[:, positions // BLOCK] * BLOCK + positions % BLOCK
    starts = tuple(range(0, rows * (end - start) + 1, end - start))
    logits_at = torch.arange(rows * (end - start), device=texts.device).view(rows, -1)[:, wanted].flatten()
    ids, table = texts[:, start:end].flatten(), tables[:, : -(-end // BLOCK)].contiguous()
    return Batch(ids, positions.repeat(rows), slots.flatten(), starts, (end,) * rows, table, logits_at)


def cache_for(decoder: Decoder, rows: int, length: int, coding: Coding | None = None) -> KVCache | QuantizedCache:
    """Returns a cache of `rows` texts of `length` tokens; without `coding` in the model's number format."""
    spec, blocks = decoder.spec, rows * -(-length // BLOCK) + 1
    if coding is None:
        return KVCache.of(spec, blocks, BLOCK, decoder.dtype, decoder.device)
    shape = (spec.layers, blocks, BLOCK, spec.kv_heads, spec.head_dim)
    return QuantizedCache(*shape, decoder.dtype, decoder.device, coding)


@torch.inference_mode()
def write_texts(decoder: Decoder, prompts: Sequence[Sequence[int]], length: int) -> Tensor:
    """Continues prompts to `length` tokens by the model itself, sampled at temperature 1. Returns (rows, length)."""
    generator = torch.Generator(decoder.device).manual_seed(0)
    texts = torch.full((len(prompts), length), -1, device=decoder.device)
    for row, prompt in zip(texts, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt[:length])
    kv, start = cache_for(decoder, len(prompts), length), 0
    for end in range(min(map(len, prompts)), length):
        logits = decoder.forward(_batch(texts, start, end, slice(-1, None)), kv)
        sampled = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        texts[:, end] = torch.where(texts[:, end] < 0, sampled, texts[:, end])
        start = end
    return texts


def _prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the questions in the model's chat template; as they are where it has none."""
    try:
        return [tokenizer.apply_chat_template([{"role": "user", "content": each}]) for each in QUESTIONS]
    except ChatTemplateError:
        return [tokenizer.encode(each) for each in QUESTIONS]


@torch.inference_mode()
def divergence(decoder: Decoder, texts: Tensor, other: KVCache | QuantizedCache, first: int = 0) -> CacheDivergence:
    """Reads `texts` (rows, length) over the model's own cache and over `other`, which `cache_for` made. Counts
    positions from `first` on."""
    rows, length = texts.shape
    plain, kl, same = cache_for(decoder, rows, length), 0.0, 0
    for start in range(0, length, CHUNK):
        batch = _batch(texts, start, min(start + CHUNK, length), slice(max(0, first - start), None))
        before, after = (decoder.forward(batch, kv).log_softmax(-1) for kv in (plain, other))
        kl += float((before.exp() * (before - after)).sum(dtype=torch.float64))
        same += int((before.argmax(-1) == after.argmax(-1)).sum())
    count = rows * (length - first)
    return CacheDivergence(count, kl / count, same / count)


def check_int4(
    decoder: Decoder, tokenizer: Tokenizer, config: EngineConfig, model: bytes, numerics: Numerics
) -> CacheDivergence:
    """Measures a cache in 4 bits, or finds the measurement of an earlier start in `config.probe_dir`. `model` is the
    fingerprint of the model's files.

    Raises:
        InvalidParameter: the divergence is more than `config.kv_max_kl`.
    """
    path = None if config.probe_dir is None else Path(config.probe_dir) / f"kv-int4-{model.hex()[:16]}.json"
    key = {"version": GATE_VERSION, "model": model.hex(), "numerics": numerics.recorded()}
    found = None if path is None else _kept(path, key)
    if found is None:
        length = min(LENGTH, decoder.spec.max_position_embeddings)
        last = decoder.spec.vocab_size - 1  # a tokenizer may have more ids than the model has embeddings
        prompts = [[min(id, last) for id in prompt[: length // 2]] for prompt in _prompts(tokenizer)]
        texts = write_texts(decoder, prompts, length)
        first = min(map(len, prompts))
        found = divergence(decoder, texts, cache_for(decoder, len(prompts), length, "int4"), first)
        if path is not None:
            keep_record(path, {**key, **asdict(found)}, "K/V in int4 is")
    log.info(
        "K/V in int4: KL %.2g nats a token, %.1f%% the same likeliest token (%d tokens)",
        found.kl, 100 * found.same_top1, found.tokens,
    )  # fmt: skip
    if not found.kl <= config.kv_max_kl:
        raise InvalidParameter(
            "kv_dtype",
            f"kv_dtype is int4, which moves this model's distributions by {found.kl:.2g} nats a token (KL divergence, "
            f"{found.same_top1:.0%} the same likeliest token), and kv_max_kl is {config.kv_max_kl:g}; accepted: int8, "
            "or a larger kv_max_kl.",
        )
    return found


def _kept(path: Path, key: dict[str, object]) -> CacheDivergence | None:
    """Returns the measurement kept with this key; None where there is none that can be read."""
    record = kept_record(path, key) or {}
    try:
        return CacheDivergence(int(record["tokens"]), float(record["kl"]), float(record["same_top1"]))
    except (ValueError, KeyError, TypeError):
        return None


def kept_record(path: Path, key: dict[str, object]) -> dict[str, Any] | None:  # Any: plain JSON
    """Returns the other fields of a record that has this key's; None where there is none that can be read."""
    try:
        record = json.loads(path.read_text("utf-8"))
        if any(record.pop(name) != value for name, value in key.items()):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if isinstance(record, dict) else None


def keep_record(path: Path, record: dict[str, object], subject: str) -> None:
    """Writes a record, whole or not at all. A directory that cannot be written costs the next start a measurement of
    the `subject`, which a warning names."""
    made = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(json.dumps(record), encoding="utf-8")
        os.replace(made, path)
    except OSError as error:
        made.unlink(missing_ok=True)
        log.warning("%s cannot be written, so %s measured again at the next start: %s", path, subject, error)
