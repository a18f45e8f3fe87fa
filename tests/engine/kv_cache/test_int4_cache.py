"""The cache in 4 bits: its codes, the kernels that write and read them, and the gate before it."""

from __future__ import annotations

import asyncio
import json
import platform
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import GREEDY, Engine, EngineConfig, InvalidParameter, Sequence, Span
from engine.kernels import cpu
from engine.kernels.cpu.compiling import MACHINES
from engine.kv_cache.quality_gate import cache_for, divergence, write_texts
from engine.kv_cache.quantized_cache import QuantizedCache, decode_int4, encode_int4, rotate_head
from engine.model.batch import KVCache
from engine.model.decoder import Decoder, load_decoder
from engine.model.memory import needs_of
from tests.engine.kv_cache.test_kv_tiers import prompt
from tests.engine.kv_cache.test_quantized_cache import INT4
from tests.engine.model import tiny
from tests.engine.model.instruction_sets import kernels_for
from tests.engine.model.stepping import Stepper
from tests.tiny import flat_draft

WIDE = {"hidden_size": 96, "head_dim": 32, "intermediate_size": 160, "num_hidden_layers": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # Any: arguments of untyped configuration classes
    "heads_of_64": ("qwen3", {"head_dim": 64}),
    "heads_of_96": ("llama", {"head_dim": 96}),  # rotated in three parts
    "windows": ("mistral", {"sliding_window": 70}),
    "many_heads_on_one": ("llama", {"num_attention_heads": 20, "num_key_value_heads": 1, "hidden_size": 160}),
}
needs_kernels = pytest.mark.skipif(cpu.library() is None, reason=f"no kernels in C++ here: {cpu.unavailable()}")


def test_codes_are_within_half_a_step_of_what_was_written() -> None:
    values = torch.randn(50, 3, 96, generator=torch.Generator().manual_seed(1)) * 10 + 3
    codes, parameters = encode_int4(values)
    assert codes.shape == (50, 3, 48) and parameters.shape == (50, 3, 6)
    groups = values.unflatten(-1, (-1, 32))
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    error = (decode_int4(codes, parameters) - values).unflatten(-1, (-1, 32)).abs().amax(-1)
    rounding = groups.abs().amax(-1) / 128  # of the minimum and the last code's scale to bfloat16
    assert (error <= step / 2 + rounding).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-30, 1e30])
def test_numbers_that_are_all_the_same_stay_so(value: float) -> None:
    values = torch.full((2, 32), value)
    torch.testing.assert_close(decode_int4(*encode_int4(values)), values, rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("width", [32, 64, 96, 128, 256])
def test_the_rotation_is_orthogonal_and_undoes_itself(width: int) -> None:
    q, k = torch.randn(2, 7, width, generator=torch.Generator().manual_seed(width))
    torch.testing.assert_close(rotate_head(rotate_head(q)), q)
    torch.testing.assert_close(rotate_head(q) @ rotate_head(k).T, q @ k.T, rtol=1e-4, atol=1e-4)


def test_rotated_keys_stand_a_channel_of_large_numbers() -> None:
    q, k = torch.randn(2, 200, 64, generator=torch.Generator().manual_seed(2))
    k[:, 5] *= 16
    q[:, 5] /= 16
    plain = decode_int4(*encode_int4(k))
    rotated = rotate_head(decode_int4(*encode_int4(rotate_head(k))))
    errors = [float((q @ (found - k).T).square().mean()) for found in (plain, rotated)]
    assert errors[1] < errors[0] / 3


# -- the kernels


@pytest.fixture(scope="module", params=MACHINES.get(platform.machine(), ()))
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_for(request.param) as name:
        yield name


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, model, overrides = tiny.MODELS[FAMILIES[request.param][0]]
    sizes = {**overrides, **WIDE, **FAMILIES[request.param][1]}
    return tiny.save(tiny.build(config, model, sizes).to(torch.bfloat16), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def decoder(checkpoint: Path, kernels: str) -> Decoder:
    made = load_decoder(checkpoint, dtype=torch.bfloat16)
    assert made.native
    return made


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, 380) for _ in range(length)] for length in (1, 7, 16, 33, 140, 300)]


@needs_kernels
def test_the_kernels_write_the_codes_that_torch_writes(decoder: Decoder) -> None:
    plain, coded = Stepper(decoder, prompts()), Stepper(decoder, prompts(), coding="int4")
    plain.run(300)
    coded.run(300)
    assert isinstance(plain._kv, KVCache) and isinstance(coded._kv, QuantizedCache)
    keys, values = plain._kv.data[0].float()[:, 1:]
    codes, parameters = (part[0][:, 1:] for part in coded._kv.tensors)
    written = parameters[1, ..., 0] != 0  # of the slots that a token has
    assert written.sum() == sum(map(len, prompts())) * written.shape[-1]
    for found, expected in zip((codes[1], parameters[1]), encode_int4(values), strict=True):
        assert torch.equal(found[written], expected[written])
    # keys are rounded to bfloat16 in the other cache alone, so a code may be its neighbour
    rotated, decoded = rotate_head(keys)[written], decode_int4(codes[0], parameters[0])[written]
    step = parameters[0][written].float().unflatten(-1, (-1, 2))[..., :1]
    error = (decoded - rotated).unflatten(-1, (-1, 32)).abs()
    assert (error <= 0.55 * step + rotated.abs().max() / 128).all()


@needs_kernels
def test_logits_are_those_of_torch_over_the_same_codes(checkpoint: Path, decoder: Decoder) -> None:
    exact = load_decoder(checkpoint, dtype=torch.float32)
    rounded = load_decoder(checkpoint, dtype=torch.bfloat16, kernels="torch")
    found, plain, expected = (
        Stepper(each, prompts(), seed=1, coding="int4").run(300) for each in (decoder, rounded, exact)
    )
    ours, torchs, truth = (torch.cat(each) for each in (found, plain, expected))
    # of all logits: a code that is its neighbour moves a few of them far
    assert float((ours - truth).norm()) < max(1.5 * float((torchs - truth).norm()), 0.01 * float(truth.norm()))


@needs_kernels
@pytest.mark.parametrize(("chunk", "block_size"), [(1, 16), (13, 16), (64, 8), (100, 48), (300, 5)])
def test_bits_do_not_depend_on_the_batch_or_the_cut(decoder: Decoder, chunk: int, block_size: int) -> None:
    alone = [Stepper(decoder, [prompt], coding="int4").run(300)[0] for prompt in prompts()]
    together = Stepper(decoder, prompts(), block_size=block_size, seed=chunk, coding="int4").run(chunk)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


async def test_forks_cuts_prefix_hits_and_a_restart_change_no_bit(wide_model: Path, tmp_path: Path) -> None:
    config = replace(EngineConfig(str(wide_model), block_size=4, kv_blocks=128, kv_dtype="int4"), **INT4)
    span = Span(GREEDY, max_tokens=14, logprobs=3, ignore_eos=True)

    async def said(seq: Sequence, span: Span) -> tuple[object, ...]:
        result = await seq.generate_all(span)
        return tuple(zip(result.token_ids, result.logprobs or (), strict=True))

    alone = replace(config, prefix_cache=False, max_running=1)
    async with await Engine.start(alone) as fresh, await fresh.open(prompt(0, 45)) as seq:
        expected = await said(seq, span)
    kept = replace(config, kv_disk_bytes=1 << 20, kv_dir=str(tmp_path), max_batch_tokens=16)
    async with await Engine.start(kept) as engine:
        seq = await engine.open(prompt(0, 45))
        begun = await said(seq, replace(span, max_tokens=5))
        snapshot = await seq.snapshot()
        rest = replace(span, max_tokens=9)
        kids = await asyncio.gather(*(said(kid, rest) for kid in (seq, *seq.fork(3))))
        assert [begun + kid for kid in kids] == [expected] * 4
        seq.truncate(47)  # within a block, whose codes after it stay
        assert expected[:2] + await said(seq, replace(span, max_tokens=12)) == expected
        async with await engine.open(prompt(0, 45)) as again:
            assert await said(again, span) == expected
    async with await Engine.start(kept) as engine:
        seq = await engine.resume(snapshot)
        assert begun + await said(seq, rest) == expected
        assert (await engine.stats()).tiers.disk_hit_blocks == 13  # the last one in part


# -- the gate


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """The bundled draft with flatter attention, and records in a folder of the tests'."""
    folder, model = tmp_path_factory.mktemp("records"), flat_draft(tmp_path_factory.mktemp("models"))
    return EngineConfig(str(model), kv_dtype="int4", kv_blocks=8, kv_max_kl=1.0, probe_dir=str(folder))


async def refused(config: EngineConfig) -> str:
    with pytest.raises(InvalidParameter, match="kv_dtype is int4") as caught:
        async with await Engine.start(config):
            pass
    return str(caught.value)


async def test_a_model_is_measured_once_and_refused_by_its_figure(gated: EngineConfig) -> None:
    async with await Engine.start(gated) as engine:
        assert engine.numerics.kv_dtype == "int4"
    assert gated.probe_dir is not None
    (path,) = Path(gated.probe_dir).iterdir()
    record = json.loads(path.read_text("utf-8"))
    assert 1e-4 < record["kl"] < 0.02 and record["same_top1"] > 0.9
    message = await refused(replace(gated, kv_max_kl=1e-4))
    assert f"{record['kl']:.2g} nats" in message and "kv_max_kl is 0.0001; accepted: int8, or a larger" in message
    path.write_text(json.dumps({**record, "kl": 3.0}), encoding="utf-8")
    assert "3 nats" in await refused(gated), "the record was not read"
    for damaged in ("{", "[]", json.dumps({**record, "kl": 3.0, "version": 0}), json.dumps({**record, "kl": None})):
        path.write_text(damaged, encoding="utf-8")
        async with await Engine.start(gated):
            assert json.loads(path.read_text("utf-8")) == record


def test_the_gate_sees_a_channel_of_large_keys() -> None:
    decoder = load_decoder(Path("models/pebble-draft"), dtype=torch.bfloat16)
    texts = write_texts(decoder, [[5, 60, 700], [5, 80, 900, 1000]], 32)
    assert texts[:, :3].tolist() == [[5, 60, 700], [5, 80, 900]] and texts[1, 3] == 1000 and (texts >= 0).all()
    heads, found = decoder.spec.heads, [divergence(decoder, texts, cache_for(decoder, 2, 32, "int4")).kl]
    for layer in decoder._layers:
        assert layer.qk_norm is not None
        for weight in (layer.qk_norm.weight, layer.qk_norm._scaled):
            weight[:heads, 6:8] /= 256  # of queries: the scores, and so the model, stay as they are
            weight[heads:, 6:8] *= 256
    found.append(divergence(decoder, texts, cache_for(decoder, 2, 32, "int4")).kl)
    assert found[1] > 5 * found[0]


async def test_heads_and_layers_that_it_cannot_be_are_refused_by_name(random_model: Path, random_hybrid: Path) -> None:
    config = EngineConfig(str(random_model), kv_dtype="int4", dtype="float32", kv_blocks=8)
    assert "heads of random-qwen3 have 16 components, and multiples of 32 up to 512" in await refused(config)
    assert "random-lfm2 has short convolutions" in await refused(replace(config, model=str(random_hybrid)))


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_other_limits_are_refused(limit: float) -> None:
    with pytest.raises(InvalidParameter, match="kv_max_kl is .*accepted: more than 0"):
        EngineConfig("none", kv_max_kl=limit)


def test_a_block_takes_five_bits_a_number() -> None:
    config = EngineConfig("models/pebble-draft", dtype="bfloat16")
    blocks = {kind: needs_of(replace(config, kv_dtype=kind)).block for kind in ("auto", "int8", "int4")}
    assert blocks["int4"] == blocks["auto"] * 5 // 16 < blocks["int8"]
    spec = load_decoder(Path("models/pebble-draft"), dtype=torch.bfloat16).spec
    cache = QuantizedCache(spec.layers, 3, 16, spec.kv_heads, spec.head_dim, torch.bfloat16, "cpu", "int4")
    assert cache.block_nbytes == blocks["int4"]
