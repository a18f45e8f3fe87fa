"""Decoders of published shapes with random weights made on the device, and the bytes and operations of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bench.gpu.rows import Json, Missing
from engine.families import family_of
from engine.model.decoder import Decoder
from engine.model.loader import Weights
from engine.model.model_spec import ModelSpec

Quantization = Literal["none", "int8", "int4"]


def _llama(**sizes: Any) -> Json:  # Any: plain JSON
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0, "max_position_embeddings": 131_072, "tie_word_embeddings": False, **sizes,
    }  # fmt: skip


def _qwen3(**sizes: Any) -> Json:  # Any: plain JSON
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "max_position_embeddings": 40_960, "tie_word_embeddings": True,
        "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, **sizes,
    }  # fmt: skip


SHAPES: dict[str, Json] = {
    "llama-3-8b": _llama(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128,
    ),
    "qwen3-0.6b": _qwen3(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "qwen3-4b": _qwen3(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "toy": _llama(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    ),
}  # fmt: skip


def spec_of(name: str, layers: int | None = None) -> ModelSpec:
    """Of a shape above, with fewer layers if that is asked for."""
    spec = family_of(SHAPES[name]).spec(SHAPES[name])
    if layers is None or layers >= spec.layers:
        return spec
    return replace(spec, layers=layers, windows=spec.windows[:layers], ropes=spec.ropes[:layers])


class RandomWeights(Weights):
    """Random weights for any request: matrices that keep the size of their input, norms around 1."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(Path("random"))
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(1)

    def names(self) -> Iterable[str]:
        return ()

    def parameters(self) -> int:
        return 0

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        made = torch.empty(shape, device=self._device, dtype=self._dtype)
        if len(shape) == 1:
            return made.normal_(1.0, 0.1, generator=self._generator)
        return made.normal_(0.0, shape[-1] ** -0.5, generator=self._generator)


def random_decoder(
    name: str,
    device: torch.device,
    *,
    quantization: Quantization = "none",
    deterministic: bool = False,
    layers: int | None = None,
) -> Decoder:
    """On the Triton kernels.

    Raises:
        Missing: there are no kernels for `quantization`.
    """
    spec, dtype = spec_of(name, layers), dtype_for(device)
    names = family_of(SHAPES[name]).names(SHAPES[name])
    options: dict[str, Any] = {}  # Any: arguments of Decoder
    if quantization != "none":
        try:
            from engine.kernels import quantized

            options["packing"] = quantized.packing(quantization)
        except ImportError as error:
            raise Missing(f"weights of 8 and 4 bits: {error}") from None
    decoder = Decoder(
        spec, names, RandomWeights(device, dtype), dtype=dtype, device=device, kernels="triton",
        deterministic=deterministic, **options,
    )  # fmt: skip
    assert decoder.on_gpu
    return decoder


def dtype_for(device: torch.device) -> torch.dtype:
    """Triton's interpreter, which runs where there is no GPU, cuts off where it should round to bfloat16."""
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_available() else torch.float16


def matrices(spec: ModelSpec) -> dict[str, tuple[int, int, int]]:
    """Every kind of matrix that a token goes through: how many there are, and their (out, in)."""
    heads = spec.heads * spec.head_dim
    return {
        "qkv": (spec.layers, heads + 2 * spec.kv_heads * spec.head_dim, spec.hidden_size),
        "o": (spec.layers, spec.hidden_size, heads),
        "gate and up": (spec.layers, 2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.layers, spec.hidden_size, spec.intermediate_size),
        "logits": (1, spec.vocab_size, spec.hidden_size),
    }


def weight_bytes(spec: ModelSpec, itemsize: int = 2) -> int:
    """Of the matrices, which a decode reads once: looked-up embeddings and norms are left out."""
    return itemsize * sum(count * out * width for count, out, width in matrices(spec).values())


def kv_bytes(spec: ModelSpec, tokens: int, itemsize: int = 2) -> int:
    """Of so many tokens' keys and values in all layers."""
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * tokens * itemsize


def prefill_flops(spec: ModelSpec, tokens: int) -> int:
    """Of reading a prompt, with the logits of its last token: two for each weight and token, and four for each pair of
    a query and a key that it sees, component and head."""
    layers = sum(count * out * width for kind, (count, out, width) in matrices(spec).items() if kind != "logits")
    pairs = tokens * (tokens + 1) // 2
    attention = 4 * spec.layers * spec.heads * spec.head_dim * pairs
    return 2 * layers * tokens + attention + 2 * spec.vocab_size * spec.hidden_size
