"""Contexts, each with a part of every sequence's K/V, compute together what one device does, by either kind of ring."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from engine import Engine, EngineConfig
from engine.model.batch import Batch
from engine.parallel.context_shards import ContextDivision, HeadShape, RingKind, passes_queries
from engine.parallel.ring_attention import merged, partial_attention
from tests.engine.model import tiny
from tests.engine.parallel.engines import checkpoint
from tests.engine.parallel.ranks import furthest, ranks_of, stepper_of, written

KINDS: tuple[RingKind, ...] = ("pass-kv", "pass-q")
SHAPE = HeadShape(heads=32, kv_heads=8, width=128, itemsize=2)
LAYERS, HIDDEN, WIDTH = tiny.SIZES["num_hidden_layers"], tiny.SIZES["hidden_size"], 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    ["llama_biased", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2",
     *(pytest.param(each, marks=pytest.mark.slow) for each in ("mistral", "cohere2", "phi3", "granite", "smollm3"))],
)  # fmt: skip
def test_two_contexts_compute_what_one_device_does(name: str, kind: RingKind, tmp_path: Path) -> None:
    assert furthest(written(name, tmp_path), contexts=2, kind=kind) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_sixteen_bits_are_as_near_as_their_rounding(name: str, kind: RingKind, tmp_path: Path) -> None:
    path = written(name, tmp_path)
    alone = furthest(path, dtype=torch.bfloat16)
    assert furthest(path, contexts=2, kind=kind, dtype=torch.bfloat16) < 2 * alone < 0.1


@pytest.mark.parametrize("chunk", [1, 30, 70])
def test_four_contexts_choose_a_kind_for_each_row(chunk: int, tmp_path: Path) -> None:
    """Chunks of one token leave three of the ranks without any."""
    assert furthest(written("qwen2", tmp_path), chunk, contexts=4) < 1e-5


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("qwen3", {"shards": 2, "contexts": 2}),
        ("gemma2", {"stages": 2, "contexts": 2}),
        ("llama_tied", {"shards": 2, "stages": 2, "contexts": 2}),
        ("qwen3_moe", {"contexts": 2}),
        ("mixtral", {"shards": 2, "contexts": 2, "expert_parallel": True}),
    ],
    ids=str,
)
def test_contexts_go_with_every_other_division(name: str, ranks: Mapping[str, int], tmp_path: Path) -> None:
    assert furthest(written(name, tmp_path), **ranks) < 1e-5


def test_a_rank_has_its_part_of_every_block(tmp_path: Path) -> None:
    with ranks_of(written("qwen2", tmp_path), contexts=4) as decoders:
        stepper = stepper_of(decoders, [[5] * 40])
        assert stepper._kv.block_size == 16
        alone = 2 * LAYERS * 16 * tiny.SIZES["num_key_value_heads"] * _width() * WIDTH
        assert stepper._kv.block_nbytes == alone // 4


async def test_the_bytes_of_all_ranks_hold_as_many_blocks_as_on_one_device(tmp_path: Path) -> None:
    config = EngineConfig(str(checkpoint(tmp_path, "qwen2")), dtype="float32", device="cpu", block_size=16)
    token = 2 * LAYERS * tiny.SIZES["num_key_value_heads"] * _width() * 4
    contexts = replace(config, kv_bytes=20 * 16 * token, prefill_context_parallel_size=2)
    async with await Engine.start(contexts) as engine:
        assert (await engine.stats()).blocks_total == 20


def _width() -> int:
    return HIDDEN // tiny.SIZES["num_attention_heads"]


# -- bytes


def carried(path: Path, contexts: int, kind: RingKind, lengths: tuple[int, ...]) -> list[Mapping[str, int]]:
    """The bytes that each rank sends to others of its ring in the last of these steps of a sequence, of so many
    tokens each."""
    with ranks_of(path, contexts=contexts, kind=kind) as decoders:
        stepper = stepper_of(decoders, [[5] * sum(lengths)])
        for length in lengths[:-1]:
            stepper.step([length])
        rings = [each.ring.ring for each in decoders if each.ring is not None]
        before = [each.nbytes.copy() for each in rings]
        stepper.step([lengths[-1]])
        return [each.nbytes - was for each, was in zip(rings, before, strict=True)]


@pytest.mark.parametrize("contexts", [2, 4])
def test_bytes_of_pass_kv_are_those_of_the_formula(contexts: int, tmp_path: Path) -> None:
    path, own = written("qwen2", tmp_path), 32 // contexts
    sent = carried(path, contexts, "pass-kv", (100, 32))
    part = 144 // contexts  # of nine blocks
    kv = LAYERS * part * 2 * tiny.SIZES["num_key_value_heads"] * _width() * WIDTH
    states = own * HIDDEN * WIDTH  # whose logits the first rank makes
    first, *others = [(each["send"], each["all_to_all"]) for each in sent]
    assert first == ((contexts - 1) * kv, 0)
    assert others == [((contexts - 1) * kv, states)] * (contexts - 1)


@pytest.mark.parametrize("contexts", [2, 4])
def test_bytes_of_pass_q_are_those_of_the_formula(contexts: int, tmp_path: Path) -> None:
    path, own = written("qwen2", tmp_path), 32 // contexts
    sent = carried(path, contexts, "pass-q", (100, 32))
    heads = tiny.SIZES["num_attention_heads"]
    # its queries go to all others; so do the partial results of theirs, with a sum for each head
    layer = (contexts - 1) * own * heads * (_width() * WIDTH + (_width() + 1) * 4)
    first, *others = [(each["send"], each["all_to_all"]) for each in sent]
    assert first == (0, LAYERS * layer)
    assert others == [(0, LAYERS * layer + own * HIDDEN * WIDTH)] * (contexts - 1)


@pytest.mark.parametrize(("lengths", "kind"), [((96,), "pass-kv"), ((96, 1), "pass-q"), ((96, 4), "pass-q")])
def test_the_kind_of_fewer_bytes_is_chosen(lengths: tuple[int, ...], kind: RingKind, tmp_path: Path) -> None:
    path = written("qwen2", tmp_path)
    chosen, kv, queries = (
        sum(sum(each.values()) for each in carried(path, 2, each_kind, lengths))
        for each_kind in ("auto", "pass-kv", "pass-q")
    )
    assert chosen == min(kv, queries) == (kv if kind == "pass-kv" else queries)


def test_pass_kv_is_for_long_chunks_and_pass_q_for_short_ones() -> None:
    assert SHAPE.kv_bytes == 2 * 8 * 128 * 2 and SHAPE.query_bytes == 32 * (128 * 2 + 129 * 4)
    assert not passes_queries(512, 512, SHAPE)
    assert not passes_queries(512, 512 + 2048, SHAPE)
    assert passes_queries(512, 512 + 8192, SHAPE)
    assert passes_queries(1, 16, SHAPE)


def test_a_decode_passes_its_query_whatever_the_heads_are() -> None:
    multi_query = HeadShape(heads=64, kv_heads=1, width=64, itemsize=2)
    assert passes_queries(1, 16, multi_query) and not passes_queries(2, 16, multi_query)


# -- parts


@given(st.integers(1, 3), st.integers(1, 40), st.integers(0, 3), st.data())
def test_a_token_is_of_one_rank_and_chunks_are_balanced(part: int, tokens: int, log: int, data: st.DataObject) -> None:
    ranks = 1 << log
    first = data.draw(st.integers(0, 50))
    positions = torch.arange(first, first + tokens)
    table = torch.arange(1, 2 + (first + tokens) // (part * ranks))[None]
    slots = table[0, positions // (part * ranks)] * part * ranks + positions % (part * ranks)
    batch = Batch(positions, positions, slots, (0, tokens), (first + tokens,), table, torch.arange(tokens))
    shards = [ContextDivision(batch, part, rank, ranks).shard() for rank in range(ranks)]
    divisions = [ContextDivision(batch, part, rank, ranks) for rank in range(ranks)]
    assert sorted(torch.cat([each.own for each in divisions]).tolist()) == list(range(tokens))
    counts = [len(each.own) for each in divisions]
    assert max(counts) - min(counts) <= part
    for each, division in zip(shards, divisions, strict=True):
        own = division.own
        assert len(each.token_ids) == max(1, len(own))
        if len(own):
            assert (each.slots // part).tolist() == (slots[own] // (part * ranks)).tolist()
            assert (each.slots % part).tolist() == (positions[own] % part).tolist()
        else:
            assert each.slots.tolist() == [0]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_are_merged_to_attention_over_all_keys(parts: int, softcap: float | None) -> None:
    torch.manual_seed(parts)
    q, k, v = torch.randn(2, 3, 7, 8), torch.randn(2, 1, 20, 8), torch.randn(2, 1, 20, 8)
    k, v = k.expand(-1, 3, -1, -1), v.expand(-1, 3, -1, -1)
    hidden = torch.arange(20) > torch.arange(7)[:, None]  # later parts have no key that the first queries see
    mask = torch.zeros(7, 20).masked_fill(hidden, torch.finfo(torch.float32).min / 2)
    bounds = [20 * at // parts for at in range(parts + 1)]
    found = merged(
        [
            partial_attention(
                q, k[:, :, first:end], v[:, :, first:end], mask[:, first:end].contiguous(), scale=0.3, softcap=softcap
            )
            for first, end in itertools.pairwise(bounds)
        ]
    )
    scores = 0.3 * q @ k.transpose(-1, -2)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    expected = F.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v
    assert torch.allclose(found, expected, atol=1e-6)
