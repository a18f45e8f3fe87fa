"""Adapters on the kernels in C++ and in Triton against torch's layers, and the bits of rows beside each other."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.config import KernelName, QuantizationName
from engine.kernels import cpu
from engine.model.decoder import Decoder, load_decoder
from tests.engine.model import tiny
from tests.engine.model.stepping import Stepper, apart
from tests.lora import ALL, write_adapter

VISIBLE = 1e-2
LENGTHS = (3, 40, 64, 17, 1, 90)
WIDE = {"hidden_size": 96, "head_dim": 32, "intermediate_size": 160}
native = pytest.mark.skipif(cpu.library() is None, reason="the kernels in C++ are not built here")


@pytest.fixture(scope="module", params=["qwen3", "llama_biased", "gemma3", "lfm2", "cohere2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, model, overrides = tiny.MODELS[request.param]
    sizes = {**WIDE, "num_attention_heads": 3, "num_key_value_heads": 1} if request.param == "cohere2" else WIDE
    if request.param == "lfm2":
        sizes = {"hidden_size": 192, "intermediate_size": 160, "block_auto_adjust_ff_dim": False}
    return tiny.save(tiny.build(config, model, {**overrides, **sizes}), tmp_path_factory.mktemp("wide"))


def prompts() -> list[list[int]]:
    draw = random.Random(4)
    return [[draw.randrange(3, 384) for _ in range(length)] for length in LENGTHS]


def loaded(model: Path, path: Path, count: int = 3, **options: str | bool) -> Decoder:
    """Returns a decoder in bfloat16 with adapters of several ranks."""
    decoder = load_decoder(model, dtype=torch.bfloat16, **options)  # type: ignore[arg-type]  # names of options
    targets = (*ALL, "in_proj", "out_proj", "w1", "w2", "w3")
    made = [
        write_adapter(path / str(i), model, rank=1 + 5 * i, seed=i, targets=targets, spread=0.1) for i in range(count)
    ]
    decoder.use_adapters(decoder.with_adapters({i: decoder.read_adapter(str(each)) for i, each in enumerate(made)}))
    return decoder


@native
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_kernels_in_cpp_add_what_torch_adds(model: Path, tmp_path: Path, quantization: QuantizationName) -> None:
    which = [0, -1, 2, 1, 1, 2]
    fast = loaded(model, tmp_path, quantization=quantization)
    exact = load_decoder(model, dtype=torch.float32)
    read = {i: exact.read_adapter(str(tmp_path / str(i))) for i in range(3)}
    exact.use_adapters(exact.with_adapters(read))
    assert fast.native
    wanted = Stepper(exact, prompts(), adapters=which).run(100)
    plain = Stepper(exact, prompts()).run(100)
    base = Stepper(fast, prompts()).run(100)
    found = Stepper(fast, prompts(), adapters=which).run(100)
    for adapter, each, expected, without, rounded in zip(which, found, wanted, plain, base, strict=True):
        if adapter == -1:
            assert torch.equal(each, rounded)  # to the bit
        else:  # as near as the model alone is, in its number format
            assert apart(expected, without) > VISIBLE
            assert apart(each, expected) < max(0.05, 3 * apart(rounded, without))


@native
def test_a_row_has_the_same_bits_beside_any_others(model: Path, tmp_path: Path) -> None:
    which = [0, -1, 2, 1, 1, 2]
    decoder = loaded(model, tmp_path)
    alone = [
        Stepper(decoder, [prompt], adapters=[adapter]).run(1000)[0]
        for prompt, adapter in zip(prompts(), which, strict=True)
    ]
    for chunk in (7, 100):
        together = Stepper(decoder, prompts(), adapters=which).run(chunk)
        assert all(torch.equal(*each) for each in zip(alone, together, strict=True))


@native
def test_sets_share_what_is_packed_and_slots_may_be_empty(model: Path, tmp_path: Path) -> None:
    decoder = loaded(model, tmp_path)
    before = Stepper(decoder, prompts()[:2], adapters=[2, -1]).run(100)
    decoder.use_adapters(decoder.with_adapters({2: decoder.read_adapter(str(tmp_path / "2"))}))
    after = Stepper(decoder, prompts()[:2], adapters=[2, 0]).run(100)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])  # slot 0 is empty, and changes nothing


@pytest.mark.parametrize("model", ["qwen3", "gemma3"], indirect=True)
def test_triton_layers_add_what_torch_adds(model: Path, tmp_path: Path) -> None:
    """On a GPU by the Triton kernels, interpreted by the torch reference of those: the layers are Triton's in both."""
    pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")
    device, which = "cuda" if torch.cuda.is_available() else "cpu", [0, -1, 2]
    some = [prompts()[0], prompts()[3], prompts()[4]]
    found: dict[str, list[torch.Tensor]] = {}
    for kernels, dtype in (("triton", torch.float16), ("torch", torch.float16), ("exact", torch.float32)):
        name: KernelName = "triton" if kernels == "triton" else "torch"
        decoder = load_decoder(model, dtype=dtype, device=device, kernels=name)
        adapters = [
            decoder.read_adapter(str(write_adapter(tmp_path / str(i), model, rank=2 + 15 * i, seed=i, spread=0.1)))
            for i in range(3)
        ]
        decoder.use_adapters(decoder.with_adapters(dict(enumerate(adapters))))
        assert decoder.on_gpu == (kernels == "triton")
        found[kernels] = Stepper(decoder, some, adapters=which).run(10)
        if kernels == "exact":
            found["none"] = Stepper(decoder, some).run(10)
    for adapter, ours, plain, expected, without in zip(which, *found.values(), strict=True):
        assert apart(ours, expected) < max(2 * apart(plain, expected), 2 * torch.finfo(torch.float16).eps)
        assert (adapter == -1) == (apart(expected, without) < VISIBLE)
