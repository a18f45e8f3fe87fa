"""Each layer's part of a block: when it is written, copied alone, and named by its header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.request import SequenceState
from engine.core.step import Row, Step
from engine.kv_cache.layer_parts import LayersHeader, layers_header
from engine.kv_cache.quantized_cache import Coding, QuantizedCache
from engine.kv_cache.snapshot import BadImage
from engine.model.batch import KVCache
from engine.model.decoder import Decoder, load_decoder
from engine.model.gpu_runner import GpuRunner
from engine.model.runner import CacheStore, ModelRunner, Runner
from tests.engine.model import tiny

SIZE, TOKENS, BLOCKS = 4, 22, (5, 2, 7, 1, 4)  # five whole blocks, and a part of one
WIDE = {"hidden_size": 96, "head_dim": 32, "intermediate_size": 160}
CASES: dict[str, tuple[str, dict[str, Any], str, Coding | None]] = {  # Any: arguments of untyped classes
    "torch": ("qwen3", {}, "torch", None),
    "int8": ("qwen3", {}, "torch", "int8"),
    "latents": ("deepseek_v3", {}, "torch", None),
    "short convolutions": ("lfm2", {}, "torch", None),
    "heads of two sizes, shared keys": ("gemma4", {}, "torch", None),
    "C++": ("qwen3", WIDE, "auto", None),
    "C++, int4": ("qwen3", WIDE, "auto", "int4"),
    "C++, experts": ("qwen3_moe", {**WIDE, "moe_intermediate_size": 64}, "auto", None),
    "Triton": ("qwen3", WIDE, "triton", None),
}


class Filled:
    """A decoder, its cache, and a step that reads a prompt of `TOKENS` tokens."""

    def __init__(self, path: Path, kernels: Any, coding: Coding | None, *, deterministic: bool = False) -> None:
        dtype = {"auto": torch.bfloat16, "triton": torch.float16}.get(kernels, torch.float32)
        self.decoder: Decoder = load_decoder(path, dtype=dtype, kernels=kernels, deterministic=deterministic)
        spec, device = self.decoder.spec, torch.device("cpu")
        self.kv: KVCache | QuantizedCache = (
            KVCache.of(spec, 9, SIZE, dtype, device)
            if coding is None
            else QuantizedCache(spec.layers, 9, SIZE, spec.kv_heads, spec.head_dim, dtype, device, coding)
        )
        self.store = CacheStore(self.kv, device)
        self.runner: Runner = (
            GpuRunner(self.decoder, self.kv, device, max_rows=1, max_blocks=8, graphs=False)
            if self.decoder.on_gpu
            else ModelRunner(self.decoder, self.kv, device, deterministic=deterministic)
        )

    def step(self) -> Step:
        tokens = [(7 * at * at + at) % 300 + 3 for at in range(TOKENS)]
        return Step([Row(SequenceState(1, tokens, b"", 1, table=[*BLOCKS, 8]), 0, TOKENS, TOKENS - 1)], TOKENS)

    def part(self, layers: range) -> Tensor:
        row = torch.zeros(len(BLOCKS) * self.kv.block_nbytes, dtype=torch.uint8)
        self.store.save_layers(BLOCKS, layers, row)()
        return row[: len(BLOCKS) * sum(self.store.parts.nbytes[at] for at in layers)]


@pytest.fixture
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Filled:
    base, changed, kernels, coding = CASES[request.param]
    if kernels == "triton":
        pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")
    config, model, overrides = tiny.MODELS[base]
    path = tiny.save(tiny.build(config, model, {**overrides, **changed}), tmp_path)
    made = Filled(path, kernels, coding)
    if kernels == "auto" and not made.decoder.native:
        pytest.skip("the C++ kernels do not run on this processor")
    return made


@pytest.mark.parametrize("filled", CASES, indirect=True)
def test_a_layers_part_is_whole_before_the_next_layer_runs(filled: Filled) -> None:
    """Each call of `save_kv_layer` finds that layer's K/V as it stays, and nothing of later layers; the logits are
    those of a step without it, to the bit."""
    nbytes, saved = filled.store.parts.nbytes, list[Tensor]()

    def save(layer: int) -> None:
        assert layer == len(saved), "in order"
        saved.append(filled.part(range(layer, layer + 1)).clone())
        assert not filled.part(range(layer + 1, len(nbytes))).any()

    step = filled.step()
    step.save_kv_layer = save
    with torch.inference_mode():
        logits = filled.runner.run(step).clone()
        assert len(saved) == filled.decoder.spec.layers == filled.store.parts.decoder_layers
        assert all(part.any() for part, count in zip(saved, nbytes, strict=True) if count)
        assert torch.equal(torch.cat(saved), filled.part(range(len(nbytes))))
        assert torch.equal(filled.runner.run(filled.step()), logits)


@pytest.mark.parametrize("filled", CASES, indirect=True)
def test_the_parts_of_all_layers_are_the_block(filled: Filled) -> None:
    with torch.inference_mode():
        filled.runner.run(filled.step())
    parts = filled.store.parts
    assert sum(parts.nbytes) == filled.kv.block_nbytes
    run, others = torch.empty(2 * filled.kv.block_nbytes, dtype=torch.uint8), (3, 6)
    for layers in (range(1), range(1, len(parts.nbytes))):
        used = 2 * sum(parts.nbytes[at] for at in layers)
        parts.read(BLOCKS[:2], layers, run[:used])
        filled.store.load_layers(others, layers, run[:used].numpy().data)
    rows = torch.zeros(4, filled.kv.block_nbytes, dtype=torch.uint8)
    for block, row in zip((*BLOCKS[:2], *others), rows, strict=True):
        filled.kv.read_block(block, row)
    assert torch.equal(rows[:2], rows[2:]) and not torch.equal(rows[0], rows[1])


def test_layers_of_multi_token_prediction_follow_those_of_the_decoder() -> None:
    """Their K/V is written after the decoder's layers have run, and belongs to the same blocks."""
    cpu = torch.device("cpu")
    kv = KVCache(2, 9, SIZE, 2, 8, torch.float32, cpu, mtp=KVCache(1, 12, SIZE, 2, 8, torch.float32, cpu))
    parts, row = kv.layer_parts(), torch.ones(kv.block_nbytes, dtype=torch.uint8)
    assert (parts.decoder_layers, len(parts.nbytes)) == (2, 3) and sum(parts.nbytes) == kv.block_nbytes
    parts.write((4,), range(2, 3), row[: parts.nbytes[2]])
    kv.read_block(4, row)
    assert row[-parts.nbytes[2] :].eq(1).all() and not row[: -parts.nbytes[2]].any()


def test_a_runner_that_goes_tile_by_tile_saves_no_layers(tmp_path: Path) -> None:
    """Its first tile has all layers before the second has any."""
    filled = Filled(tiny.save(tiny.build(*tiny.MODELS["qwen3"]), tmp_path), "torch", None, deterministic=True)
    step, saved = filled.step(), list[int]()
    step.save_kv_layer = saved.append
    with torch.inference_mode():
        filled.runner.run(step)
    assert not saved


@pytest.mark.parametrize("filled", ["C++"], indirect=True)
@pytest.mark.parametrize(("saves", "calls"), [(False, 1), (True, 3)], ids=["without a connector", "layer by layer"])
def test_the_native_layers_are_one_call_unless_each_is_saved(filled: Filled, saves: bool, calls: int) -> None:
    native, ranges = filled.decoder._cpu, list[tuple[int, int]]()
    assert native is not None
    library = native._library

    class Counted:
        def ponder_layers(self, model: Any, step: Any, first: Any, last: Any) -> int:
            ranges.append((first.value, last.value))
            code: int = library.ponder_layers(model, step, first, last)
            return code

    native._library = Counted()  # type: ignore[assignment]  # that counts
    step = filled.step()
    step.save_kv_layer = (lambda layer: None) if saves else None
    with torch.inference_mode():
        filled.runner.run(step)
    assert len(ranges) == calls and ranges[0][0] == 0 and ranges[-1][1] == 3


def test_a_header_names_layers_of_blocks() -> None:
    digests, payload = [b"a" * 16, b"b" * 16], b"keys and values"
    header = LayersHeader.read(layers_header(b"l" * 16, digests, range(2, 5), payload))
    assert (header.layout, header.digest, header.layers) == (b"l" * 16, b"a" * 16, range(2, 5))
    assert (header.blocks, header.nbytes) == (2, len(payload))
    header.check(digests, payload)
    for others, changed in ((digests, b"keys and valuez"), ([b"a" * 16, b"c" * 16], payload)):
        with pytest.raises(BadImage, match="checksum is wrong"):
            header.check(others, changed)
