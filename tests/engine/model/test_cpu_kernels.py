"""The kernels in C++ compute the same as torch, and a token's bits depend on its own sequence alone."""

from __future__ import annotations

import platform
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig
from engine.config import QuantizationName
from engine.kernels import cpu
from engine.kernels.cpu import build
from engine.kernels.cpu.binding import NativeLinear, TiledWeight
from engine.kernels.cpu.compiling import MACHINES, file_name
from engine.kv_cache.quantized_cache import Coding
from engine.model.batch import KVCache
from engine.model.decoder import Decoder, load_decoder
from engine.model.memory import needs_of
from engine.model.mlp.experts import run_experts
from tests.engine.model import tiny
from tests.engine.model.instruction_sets import assert_int8_product, kernels_for
from tests.engine.model.stepping import Stepper, apart
from tests.engine.speculation.token_trees import TreeSteps, assert_paths_alike

pytestmark = pytest.mark.skipif(cpu.library() is None, reason=f"no kernels in C++ here: {cpu.unavailable()}")

WIDE = {"hidden_size": 96, "head_dim": 32, "intermediate_size": 160, "vocab_size": 389}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # Any: arguments of untyped configuration classes
    "qwen3": ("qwen3", {}),
    "llama_biased": ("llama_biased", {}),
    "one_kv_head_each": ("llama_tied", {}),
    "many_heads_on_one": ("llama", {"num_attention_heads": 20, "num_key_value_heads": 1, "hidden_size": 160}),
    "windows": ("mistral", {"sliding_window": 70}),
    "partial_rotation": ("phi3_partial", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": None}),
    "post_norms": ("gemma3", {"sliding_window": 24}),
    "projection_norms": ("olmo2", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None}),
    "convolutions": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "convolutions_four_taps": ("lfm2_four_taps", {"num_hidden_layers": 3}),
    "growing_queries": (
        "ministral3",
        {"rope_parameters": {**tiny.PLAIN, "llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 80}},
    ),
    "pairs_of_neighbours": ("glm4", {"head_dim": 64}),
    "parallel_layers": ("cohere2", {"sliding_window": 70, "hidden_size": 192}),
    "centred_head_norms": ("cohere", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": None}),
    "multipliers": ("granite", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": None}),
}
LENGTHS = (1, 7, 15, 16, 33, 140, 300)


@pytest.fixture(scope="module", params=MACHINES.get(platform.machine(), ()))
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels as they are built for an instruction set: a processor with AMX runs all of them."""
    with kernels_for(request.param) as name:
        yield name


SLOW = (
    "pairs_of_neighbours",
    "convolutions_four_taps",
    "multipliers",
    "centred_head_norms",
    "partial_rotation",
)  # near to others, which always run


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FAMILIES],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base, changed = FAMILIES[request.param]
    config, model, overrides = tiny.MODELS[base]
    sizes = {key: value for key, value in {**overrides, **WIDE, **changed}.items() if value is not None}
    made = tiny.build(config, model, sizes)
    return tiny.save(made.to(torch.bfloat16), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def decoder(checkpoint: Path, kernels: str) -> Decoder:
    made = load_decoder(checkpoint, dtype=torch.bfloat16)
    assert made.native
    return made


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, 380) for _ in range(length)] for length in LENGTHS]


def test_logits_are_those_of_torch(checkpoint: Path, decoder: Decoder) -> None:
    exact = Stepper(load_decoder(checkpoint, dtype=torch.float32), prompts(), seed=1).run(300)
    rounded = Stepper(load_decoder(checkpoint, dtype=torch.bfloat16, kernels="torch"), prompts(), seed=1).run(300)
    found = Stepper(decoder, prompts(), seed=1).run(300)
    for ours, plain, expected in zip(found, rounded, exact, strict=True):
        assert apart(ours, expected) < max(1.5 * apart(plain, expected), 0.02)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gates_far_from_zero_are_those_of_torch(activation: str, tmp_path: Path) -> None:
    """Below -88 the exponential within SiLU is above what float32 holds; the one within GELU's tanh below -10."""
    made = tiny.build("LlamaConfig", "LlamaForCausalLM", {**WIDE, "hidden_act": activation})
    for name, weight in made.named_parameters():
        if "gate_proj" in name:
            torch.nn.init.normal_(weight, std=6.0)
    path = tiny.save(made.to(torch.bfloat16), tmp_path)
    few = [prompt for prompt in prompts() if len(prompt) < 34]
    exact = torch.cat(Stepper(load_decoder(path, dtype=torch.float32), few).run(300))
    rounded = torch.cat(Stepper(load_decoder(path, dtype=torch.bfloat16, kernels="torch"), few).run(300))
    decoder = load_decoder(path, dtype=torch.bfloat16)
    assert decoder.native
    assert apart(torch.cat(Stepper(decoder, few).run(300)), exact) < 2 * apart(rounded, exact) < 0.1


@pytest.mark.parametrize(("chunk", "block_size"), [(1, 16), (13, 16), (64, 8), (100, 48), (300, 5)])
def test_bits_do_not_depend_on_the_batch_or_the_cut(decoder: Decoder, chunk: int, block_size: int) -> None:
    alone = [Stepper(decoder, [prompt]).run(300)[0] for prompt in prompts()]
    together = Stepper(decoder, prompts(), block_size=block_size, seed=chunk).run(chunk)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize(("length", "block_size"), [(1, 16), (61, 16), (140, 5)])
@pytest.mark.parametrize("coding", [None, "int4"])
def test_a_tree_has_the_bits_of_its_paths(
    decoder: Decoder, length: int, block_size: int, coding: Coding | None
) -> None:
    """Across the border of two chunks of keys, in blocks that fit one and in others."""
    if coding is not None and decoder.spec.conv_layers:
        pytest.skip("short convolutions have no quantized cache")
    assert_paths_alike(TreeSteps(decoder, length, block_size, coding=coding))


def test_bits_do_not_depend_on_the_number_of_threads(decoder: Decoder) -> None:
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made.append(torch.cat(Stepper(decoder, prompts()).run(300)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 100])
@pytest.mark.parametrize(("out", "width"), [(31, 32), (200, 96), (96, 4096)])
@pytest.mark.usefixtures("kernels")
def test_a_linear_layer_of_any_shape(rows: int, out: int, width: int) -> None:
    library = cpu.library()
    assert library is not None
    torch.manual_seed(0)
    weight, x = torch.randn(out, width).bfloat16(), torch.randn(rows, width).bfloat16()
    bias = torch.randn(out)
    expected = x.float() @ weight.float().T + bias
    found = TiledWeight(library, weight, bias)(x)
    assert apart(found.float(), expected) < 5e-3


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("out", "width"), [(40, 64), (200, 96), (320, 1024)])
def test_a_rows_product_has_the_same_bits_among_any_number_of_rows(out: int, width: int) -> None:
    library = cpu.library()
    assert library is not None
    torch.manual_seed(1)
    layer = TiledWeight(library, torch.randn(out, width).bfloat16())
    x = torch.randn(70, width).bfloat16()
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in (*range(2, 35), 70):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows


@pytest.mark.usefixtures("kernels")
def test_a_rows_product_has_the_same_bits_past_what_the_cache_holds() -> None:
    """A thread's share of the columns goes over from one part of the rows to the next."""
    library = cpu.library()
    assert library is not None
    torch.manual_seed(2)
    layer, x = TiledWeight(library, torch.randn(1056, 4096).bfloat16()), torch.randn(400, 4096).bfloat16()
    found = layer(x)
    for at in (*range(0, 400, 9), 191, 192, 399):
        assert torch.equal(found[at], layer(x[at : at + 1])[0]), at


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
LATENT = {
    **tiny.LATENT,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 64,
    "q_lora_rank": 32,
    "v_head_dim": 16,
    "num_attention_heads": 6,
    "n_group": 4,
    "topk_group": 2,
}


@pytest.mark.parametrize(
    ("config", "model", "sizes"),
    [
        ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**EXPERTS, "mlp_only_layers": [1]}),
        ("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": 6, "num_experts_per_tok": 4}),
        ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**EXPERTS, "head_dim": 32, "shared_expert_intermediate_size": 96}),
        ("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT),
        ("Lfm2MoeConfig", "Lfm2MoeForCausalLM", {**tiny.MODELS["lfm2_moe"][2], **EXPERTS, "num_dense_layers": 1}),
        ("Glm4MoeConfig", "Glm4MoeForCausalLM", {**tiny.MODELS["glm4_moe"][2], "moe_intermediate_size": 64}),
    ],
    ids=["qwen3_moe", "gpt_oss", "qwen2_moe", "deepseek_v3", "lfm2_moe", "glm4_moe"],
)
def test_experts_are_products_of_the_kernels(config: str, model: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """Some tokens are near enough to a tie for another expert, so the median token is judged."""
    made = tiny.build(config, model, {**WIDE, **sizes})
    path = tiny.save(made.to(torch.bfloat16), tmp_path)
    few = [prompt for prompt in prompts() if len(prompt) < 34]
    exact = Stepper(load_decoder(path, dtype=torch.float32), few, seed=1).run(300)
    rounded = Stepper(load_decoder(path, dtype=torch.bfloat16, kernels="torch"), few, seed=1).run(300)
    decoder = load_decoder(path, dtype=torch.bfloat16)
    mixtures = [layer.mixture for layer in decoder._layers]
    opened = [each.gate_up for mixture in mixtures if mixture is not None for each in mixture.experts]
    assert opened and all(isinstance(each, TiledWeight) for each in opened)
    assert decoder.native == (config not in ("GptOssConfig", "DeepseekV3Config"))
    assert (mixtures[1] is not None) == ("mlp_only_layers" not in sizes)
    assert typical(Stepper(decoder, few, seed=1).run(300), exact) < 1.5 * typical(rounded, exact) < 0.03
    assert_routed_as_by_torch(decoder)
    if config == "Qwen2MoeConfig":
        of_few_bits = load_decoder(path, dtype=torch.bfloat16, quantization="int8")
        mixture = of_few_bits._layers[0].mixture
        assert mixture is not None and all(isinstance(each.down, NativeLinear) for each in mixture.experts)
        assert typical(Stepper(of_few_bits, few, seed=1).run(300), exact) < 0.05


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("granite_hybrid", {"shared_intermediate_size": 160, "mamba_d_head": 16}),
        ("falcon_h1", {"mamba_d_ssm": 192}),
        ("nemotron_h", {"mamba_head_dim": 16}),
        (
            "nemotron_h_moe",
            {"mamba_head_dim": 16, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96},
        ),
    ],
)
def test_linears_beside_mamba2_are_products_of_the_kernels(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    config, model, overrides = tiny.MODELS[name]
    path = tiny.save(tiny.build(config, model, {**overrides, **WIDE, **sizes}).to(torch.bfloat16), tmp_path)
    few = [prompt for prompt in prompts() if len(prompt) < 34]
    exact = Stepper(load_decoder(path, dtype=torch.float32), few, seed=1).run(300)
    rounded = Stepper(load_decoder(path, dtype=torch.bfloat16, kernels="torch"), few, seed=1).run(300)
    decoder = load_decoder(path, dtype=torch.bfloat16)
    assert all(isinstance(layer.qkv, TiledWeight) for layer in decoder._layers if layer.attends)
    assert not decoder.native
    assert typical(Stepper(decoder, few, seed=1).run(300), exact) < 1.5 * typical(rounded, exact) < 0.03


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_bits_of_mixtures_do_not_depend_on_the_batch(
    quantization: QuantizationName, kernels: str, tmp_path: Path
) -> None:
    config, model, overrides = tiny.MODELS["glm4_moe"]
    made = tiny.build(config, model, {**WIDE, **overrides, "moe_intermediate_size": 64})
    path = tiny.save(made.to(torch.bfloat16), tmp_path)
    decoder = load_decoder(path, dtype=torch.bfloat16, quantization=quantization)
    few = [prompt for prompt in prompts() if len(prompt) < 34]
    alone = [Stepper(decoder, [prompt]).run(300)[0] for prompt in few]
    together = Stepper(decoder, few, seed=2).run(13)
    assert decoder.native and all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert_routed_as_by_torch(decoder)


def assert_routed_as_by_torch(decoder: Decoder) -> None:
    """Of random rows, by routers whose scores and biases are far apart, so that no rounding chooses another expert."""
    experts, generator = decoder.spec.experts, torch.Generator().manual_seed(7)
    assert experts is not None
    for layer in decoder._layers:
        mixture = layer.mixture
        if mixture is None or mixture.mix is None:
            assert mixture is None or experts.gate is not None
            continue
        mixture.router.normal_(generator=generator)
        if mixture.selection_bias is not None:
            mixture.selection_bias.normal_(std=0.3, generator=generator)
        for tokens in (1, 2, 7, 40):
            x = torch.randn(tokens, decoder.spec.hidden_size, generator=generator).bfloat16()
            expected = run_experts(experts, replace(mixture, mix=None), x, x, decoder._gated, by_row=False)
            found = run_experts(experts, mixture, x, x, decoder._gated, by_row=False)
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6 * float(expected.abs().max()))


def typical(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Returns the largest relative difference of the median token's logits."""
    pairs = zip(found, expected, strict=True)
    return float(torch.cat([(a - b).abs().amax(1) / b.abs().max() for a, b in pairs]).median())


def test_torch_runs_the_model_where_the_processor_has_no_vectors(tmp_path: Path) -> None:
    config, model, overrides = tiny.MODELS["qwen3"]
    path = tiny.save(tiny.build(config, model, {**overrides, **WIDE}).to(torch.bfloat16), tmp_path)
    with kernels_for(""):
        decoder = load_decoder(path, dtype=torch.bfloat16)
        assert not decoder.native and cpu.unavailable() == "the processor has no AVX2"
        assert torch.cat(Stepper(decoder, prompts()).run(300)).isfinite().all()


def test_a_wheels_kernels_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brought = tmp_path / file_name(cpu.name())
    library = cpu.library()
    assert library is not None
    brought.write_bytes(Path(library._name).read_bytes())
    monkeypatch.setattr(build, "compiler", lambda: None)
    monkeypatch.setattr(build, "BUILT", tmp_path)
    with kernels_for(cpu.name()):
        found = cpu.library()
        assert found is not None and Path(found._name) == brought
        brought.rename(tmp_path / "of another version")
    with kernels_for(cpu.name()):
        assert cpu.unavailable() == "there is no C++ compiler (c++, g++ or clang++)"


needs_tiles = pytest.mark.skipif(not cpu.has_tiles(), reason="the processor has no AMX")
INT8 = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 192, "vocab_size": 389}


@pytest.fixture(scope="module")
def for_int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, model, overrides = tiny.MODELS["qwen3"]
    made = tiny.build(config, model, {**overrides, **INT8})
    return tiny.save(made.to(torch.bfloat16), tmp_path_factory.mktemp("int8"))


@needs_tiles
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 64, 65, 100])
@pytest.mark.parametrize(("out", "width"), [(31, 64), (200, 128), (96, 4096)])
def test_an_int8_layer_multiplies_what_it_was_rounded_to(rows: int, out: int, width: int) -> None:
    library = cpu.library()
    assert library is not None
    assert_int8_product(library, rows, out, width)


@needs_tiles
def test_int8_stays_near_the_model_and_few_tokens_nearer(for_int8: Path) -> None:
    exact = torch.cat(Stepper(load_decoder(for_int8, dtype=torch.float32), prompts()).run(300))
    found = {}
    for deterministic in (False, True):
        decoder = load_decoder(for_int8, dtype=torch.bfloat16, quantization="int8", deterministic=deterministic)
        found[deterministic] = apart(torch.cat(Stepper(decoder, prompts()).run(300)), exact)
    assert found[True] < 0.06
    assert found[True] < found[False] < 0.2


@needs_tiles
def test_a_deterministic_int8_model_does_not_look_at_the_batch(for_int8: Path) -> None:
    decoder = load_decoder(for_int8, dtype=torch.bfloat16, quantization="int8", deterministic=True)
    alone = [Stepper(decoder, [prompt]).run(300)[0] for prompt in prompts()]
    together = Stepper(decoder, prompts(), seed=2).run(13)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@needs_tiles
def test_memory_is_told_for_int8(for_int8: Path) -> None:
    weights = {
        quantization: needs_of(EngineConfig(str(for_int8), dtype="bfloat16", quantization=quantization)).weights
        for quantization in ("none", "int8")
    }
    decoder = load_decoder(for_int8, dtype=torch.bfloat16, quantization="int8")
    held = decoder._embedding.nbytes + sum(
        weight.tiles.nbytes
        for layer in decoder._layers
        for weight in (layer.qkv, layer.o, layer.gate_up, layer.down)
        if isinstance(weight, TiledWeight)
    )
    assert isinstance(decoder.lm_head, TiledWeight)
    held += decoder.lm_head.tiles.nbytes
    assert weights["int8"] < weights["none"]
    assert weights["int8"] == pytest.approx(held, rel=0.08)


def test_what_lay_in_the_cache_before_does_not_matter(decoder: Decoder) -> None:
    clean, dirty = Stepper(decoder, prompts()), Stepper(decoder, prompts())
    assert isinstance(dirty._kv, KVCache)
    dirty._kv.data.fill_(float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(clean.run(50), dirty.run(50), strict=True))
