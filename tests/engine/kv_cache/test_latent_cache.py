"""The cache of latent attention: as many bytes as the papers say, moved through the tiers like any other."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
import torch

from engine import GREEDY, Engine, InvalidParameter, Span
from engine.families import family_of
from engine.model.batch import KVCache
from engine.model.memory import block_bytes, needs_of
from tests.engine.kv_below import Eager
from tests.engine.kv_cache.test_kv_tiers import ask, config, prompt

SHAPES = {
    "DeepSeek-V2": ("DeepseekV2ForCausalLM", 60, 5120, 128, 1536, 128, 64),
    "DeepSeek-V2-Lite": ("DeepseekV2ForCausalLM", 27, 2048, 16, None, 128, 128),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", 61, 7168, 128, 1536, 128, 128),
    "GLM-4.7-Flash": ("Glm4MoeLiteForCausalLM", 47, 2048, 20, 768, 192, 256),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_takes_its_latent_and_its_rotated_key_and_nothing_else(name: str) -> None:
    """DeepSeek-V2, table 1: (d_c + d_h^R) numbers a token and layer, with d_c = 512 and d_h^R = 64."""
    architecture, layers, hidden, heads, query_rank, nope, value = SHAPES[name]
    published = {
        "architectures": [architecture],
        "vocab_size": 1000,
        "hidden_size": hidden,
        "intermediate_size": 1024,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 4096,
        "q_lora_rank": query_rank,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
    }
    spec = family_of(published).spec(published)
    token = (512 + 64) * layers * torch.bfloat16.itemsize
    assert block_bytes(spec, 16, torch.bfloat16) == 16 * token
    assert KVCache.of(spec, 2, 16, torch.bfloat16, "cpu").block_nbytes == 16 * token


async def test_the_log_and_the_estimate_say_the_bytes_of_a_token(
    random_latent: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = (24 + 8) * 3 * torch.float32.itemsize
    assert needs_of(config(random_latent)).block == 4 * token
    with caplog.at_level(logging.INFO):
        async with await Engine.start(config(random_latent, kv_blocks=8)):
            pass
    assert f"8 blocks of K/V, {token} bytes a token" in caplog.text


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4"])
async def test_fewer_bits_are_refused_by_name(random_latent: Path, kv_dtype: str) -> None:
    with pytest.raises(InvalidParameter, match=f"kv_dtype is {kv_dtype}, but the K/V of .*-v3 are latents"):
        await Engine.start(config(random_latent, kv_dtype=kv_dtype))


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["kv_host_bytes", "kv_disk_bytes"])
async def test_offloaded_latents_give_the_same_answers(random_latent: Path, tmp_path: Path, tier: str) -> None:
    prompts = [prompt(text, 55 + text) for text in range(6)]
    async with await Engine.start(config(random_latent, kv_blocks=64, prefix_cache=False)) as fresh:
        answers = [await ask(fresh, tokens) for tokens in prompts]
    below = {tier: 1 << 20, "kv_dir": str(tmp_path)}
    async with await Engine.start(config(random_latent, kv_blocks=24, max_batch_tokens=16, **below)) as engine:
        assert engine._core._tiers is not None
        engine._core._tiers.rates = Eager()
        for _ in range(2):
            assert await asyncio.gather(*(ask(engine, tokens) for tokens in prompts)) == answers
        stats = await engine.stats()
        engine._core.check()
    assert stats.tiers.host_hit_blocks + stats.tiers.disk_hit_blocks > 0


async def test_forks_share_latents_and_a_truncated_sequence_goes_on_alike(random_latent: Path) -> None:
    span = Span(GREEDY, max_tokens=6, ignore_eos=True)
    tokens = prompt(0, 37)
    async with await Engine.start(config(random_latent, kv_blocks=64)) as engine:
        first = await engine.open(tokens)
        expected = (await first.generate_all(span)).token_ids
        first.truncate(len(tokens))
        kids = first.fork(2)
        found = await asyncio.gather(*(seq.generate_all(span) for seq in (first, *kids)))
        stats = await engine.stats()
    assert [each.token_ids for each in found] == [expected] * 3
    assert stats.blocks_used < 2 * -(-(len(tokens) + 6) // 4)
