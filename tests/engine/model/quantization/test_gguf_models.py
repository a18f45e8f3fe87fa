"""GGUF files made from checkpoints give the checkpoints' logits, and a real one its known text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import CheckpointError, UnsupportedArchitecture
from engine.kernels import cpu as native
from engine.kernels.cpu.binding import GroupedWeight
from engine.kernels.quantized import linear
from engine.kv_cache.snapshot import fingerprint
from engine.model.decoder import load_decoder
from engine.model.loader import resolve
from engine.model.quantization.checkpoint import open_weights, read_config
from engine.model.tokenizer import Tokenizer
from tests.engine.model import tiny
from tests.engine.model.stepping import Stepper
from tests.known_answers import shared

gguf = pytest.importorskip("gguf", reason="the gguf package writes the files")
from tests.engine.model.quantization.gguf_files import add_config, add_weights, converted, written  # noqa: E402

PROMPT = [(7 * i * i + 3 * i) % 380 + 3 for i in range(200)]
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 24}  # GGUF has no other scale
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # name: (the architecture in GGUF, changes of the model)
    "llama": ("llama", {}),
    "llama_biased": ("llama", {}),
    "llama_tied": ("llama", {}),
    "llama3": ("llama", {}),
    "llama_linear": ("llama", {}),
    "llama_yarn": ("llama", {}),
    "mistral": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {}),
    "phi3": ("phi3", {}),
    "phi3_partial": ("phi3", {}),
    "phi3_longrope": ("phi3", {}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3", GEMMA),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
}


def llama3_factors(config: Mapping[str, Any]) -> torch.Tensor:
    """Divisors of the frequencies, as llama.cpp's converter computes them from Llama 3.1's parameters."""
    rope = config["rope_parameters"]
    dim = config["hidden_size"] // config["num_attention_heads"]
    low, high, context = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors)


def extras(name: str, config: Mapping[str, Any]) -> Callable[[Any], None]:
    """Keys and tensors of one architecture."""
    heads = config["num_attention_heads"]

    def add(writer: Any) -> None:
        if name in ("mistral", "phi3", "gemma2", "gemma3"):
            writer.add_sliding_window(config["sliding_window"])
        if name == "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_factors(config).numpy())
        if name.startswith("phi3"):
            share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
            writer.add_rope_dimension_count(int(config["hidden_size"] // heads * share))
        if name == "phi3_longrope":
            rope, original = config["rope_parameters"], config["original_max_position_embeddings"]
            writer.add_rope_scaling_orig_ctx_len(original)
            factor = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
            for ours, theirs in (("long", "rope_factors_long"), ("short", "rope_factors_short")):
                writer.add_tensor(f"{theirs}.weight", torch.tensor(rope[f"{ours}_factor"]).numpy())
        if name == "gemma2":
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        if name == "granite":
            writer.add_attention_scale(config["attention_multiplier"])
            writer.add_embedding_scale(config["embedding_multiplier"])
            writer.add_residual_scale(config["residual_multiplier"])
            writer.add_logit_scale(config["logits_scaling"])

    return add


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_checkpoint_it_was_made_from(tmp_path: Path, name: str) -> None:
    architecture, changes = CASES[name]
    config_class, model_class, overrides = {**tiny.MODELS, "phi3_longrope": tiny.LONGROPE_PHI3}[name]
    model = tiny.build(config_class, model_class, {**overrides, **changes})
    checkpoint = tiny.save(model, tmp_path / "hf")
    config = json.loads((checkpoint / "config.json").read_text())
    file = converted(checkpoint, tmp_path / "model.gguf", architecture, extras(name, config))
    prompt = PROMPT[:150]  # within the context that phi3_longrope was trained on
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    (found,) = Stepper(load_decoder(file, dtype=torch.float32), [prompt]).step([len(prompt)])
    (same,) = Stepper(load_decoder(checkpoint, dtype=torch.float32), [prompt]).step([len(prompt)])
    assert (found - same).abs().max() <= 1e-5 * max(1.0, float(same.abs().max()))
    assert (found - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(("name", "characters"), [("f32", None), ("q8_0", 295)])
def test_stories260k_greedy_text_is_the_known_one(name: str, characters: int | None) -> None:
    root = shared("models/stories260K")
    place = resolve(str(root / f"stories260K-{name}.gguf"))
    decoder, tokenizer = load_decoder(place, dtype=torch.float32), Tokenizer.load(place)
    stepper = Stepper(decoder, [[*tokenizer.encode("", bos=True), *[0] * 200]])
    for i in range(200):
        (logits,) = stepper.step([1])
        stepper.prompts[0][i + 1] = int(logits[-1].argmax())
    known = (root / "expected_greedy_200tok.txt").read_text()
    assert tokenizer.decode(stepper.prompts[0])[:characters] == known[:characters]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose rows have whole blocks of 32."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = tiny.build("LlamaConfig", "LlamaForCausalLM", sizes)
    return tiny.save(model, tmp_path_factory.mktemp("llama"))


def quantized(checkpoint: Path, path: Path, kind: str) -> Path:
    """Write all matrices in blocks of `kind`, by the package's own rounding."""
    config = json.loads((checkpoint / "config.json").read_text())

    class Rounding:
        """Hands on tensors to a writer, matrices quantised."""

        def __init__(self, writer: Any) -> None:
            self._writer = writer

        def add_tensor(self, name: str, values: Any) -> None:
            number = gguf.GGMLQuantizationType[kind]
            if values.ndim == 2:
                self._writer.add_tensor(name, gguf.quants.quantize(values, number), raw_dtype=number)
            else:
                self._writer.add_tensor(name, values)

    def fill(writer: Any) -> None:
        from safetensors.torch import load_file

        add_config(writer, config)
        add_weights(Rounding(writer), config, load_file(checkpoint / "model.safetensors"), "llama")

    return written(path, fill)


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q4_0", "BF16"])
def test_a_quantised_tensor_is_the_packages_in_the_order_of_the_checkpoint(
    tmp_path: Path, llama: Path, kind: str
) -> None:
    file = quantized(llama, tmp_path / "model.gguf", kind)
    weights, name = open_weights(file), "model.layers.0.self_attn.q_proj.weight"
    found = weights.take(name, (64, 64)).float()
    number = gguf.GGMLQuantizationType[kind]
    exact = open_weights(llama).take(name, (64, 64)).numpy()
    assert (found.numpy() == gguf.quants.dequantize(gguf.quants.quantize(exact, number), number)).all()
    codes = weights.take_quantized(name, (64, 64))
    assert codes is None if kind == "BF16" else codes is not None and torch.equal(codes.dequantize(), found)


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path, llama: Path) -> None:
    file = converted(llama, tmp_path / "model.gguf", "llama")
    assert resolve(str(tmp_path)) == file


def test_of_two_gguf_files_one_has_to_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(a.gguf, b.gguf"):
        resolve(str(tmp_path))


def test_fingerprints_tell_metadata_apart(tmp_path: Path, llama: Path) -> None:
    plain = converted(llama, tmp_path / "a.gguf", "llama")
    scaled = converted(llama, tmp_path / "b.gguf", "llama", lambda w: w.add_string("llama.rope.scaling.type", "none"))
    assert fingerprint(plain) == fingerprint(plain) != fingerprint(scaled)


REFUSED: Mapping[str, tuple[str, Callable[[Any], object], str]] = {
    "architecture": ("mamba", lambda w: None, "mamba"),
    "experts": ("llama", lambda w: w.add_expert_count(8), "llama.expert_count is 8"),
    "a window where there is none": ("qwen2", lambda w: w.add_sliding_window(64), "sliding_window is 64.*no window"),
    "a part of a file": ("llama", lambda w: w.add_uint16("split.count", 3), "split.count is 3.*llama-gguf-split"),
    "rope scaling": ("llama", lambda w: w.add_string("llama.rope.scaling.type", "su"), "scaling.type is 'su'"),
    "heads by layer": ("llama", lambda w: w.add_array("llama.attention.head_count_kv", [2, 4]), "head_count_kv is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_run_exactly_is_refused(tmp_path: Path, llama: Path, name: str) -> None:
    architecture, change, message = REFUSED[name]
    config = json.loads((llama / "config.json").read_text())

    def fill(writer: Any) -> None:
        add_config(writer, config)
        for keys in writer.kv_data:
            if name == "heads by layer":
                keys.pop("llama.attention.head_count_kv", None)
        writer.add_tensor("token_embd.weight", torch.zeros(384, 64).numpy())
        change(writer)

    file = written(tmp_path / "model.gguf", fill, architecture)
    with pytest.raises((CheckpointError, UnsupportedArchitecture), match=message):
        read_config(file)


def wide(folder: Path) -> Path:
    """A checkpoint whose widths are multiples of 32, as kernels want them."""
    sizes = {
        "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "num_hidden_layers": 2,
    }  # fmt: skip
    model = tiny.redraw(tiny.build("LlamaConfig", "LlamaForCausalLM", sizes), 3)
    return tiny.save(model, folder / "checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_gpu_multiplies_quantised_weights_as_they_are_stored(tmp_path: Path, kind: str) -> None:
    """Its kernels, interpreted where there is none: nearer than 16 bits are to the dequantised weights."""
    pytest.importorskip("triton", reason="Triton is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = quantized(wide(tmp_path), tmp_path / "model.gguf", kind)
    decoder = load_decoder(path, dtype=torch.float16, device=device, kernels="triton")
    assert all(getattr(layer.qkv, "func", None) is linear for layer in decoder._layers)
    with torch.no_grad():
        (found,) = Stepper(decoder, [PROMPT[:20]]).step([20])
        (expected,) = Stepper(load_decoder(path, dtype=torch.float32, kernels="torch"), [PROMPT[:20]]).step([20])
    error = (found.float().cpu() - expected).norm() / expected.norm()
    assert 0 < error < 2e-3


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q4_0", "Q4_1"])
def test_quantised_weights_are_multiplied_as_they_are_stored(tmp_path: Path, kind: str) -> None:
    """On the CPU kernels: as near to the dequantised weights as activations of 8 bits are."""
    if native.library() is None:
        pytest.skip(f"no kernels: {native.unavailable()}")
    path = quantized(wide(tmp_path), tmp_path / "model.gguf", kind)
    native_decoder = load_decoder(path, dtype=torch.bfloat16)
    assert all(isinstance(layer.qkv, GroupedWeight) for layer in native_decoder._layers)
    assert isinstance(native_decoder.lm_head, GroupedWeight)
    prompt = PROMPT[:60]
    with torch.no_grad():
        (found,) = Stepper(native_decoder, [prompt]).step([len(prompt)])
        (expected,) = Stepper(load_decoder(path, dtype=torch.float32, kernels="torch"), [prompt]).step([len(prompt)])
    error = (found.float() - expected).norm() / expected.norm()
    assert 0 < error < 0.05
