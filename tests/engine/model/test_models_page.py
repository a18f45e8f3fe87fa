"""The table of docs/models.md: every family, and which of our kernels run it, from the code.

`python -m tests.engine.model.test_models_page` prints it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.families import FAMILIES, family_of
from engine.families.family import Family
from engine.kernels import cpu
from engine.model import gpu_layers, native_layers
from engine.model.model_spec import GatedDelta, ModelSpec, StateSpace
from engine.model.quantization.gguf_config import ARCHITECTURES
from tests.engine.model import tiny

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
_MODELS = {
    "llama4_text": "Llama 4, without vision",
    "llama4": "Llama 4, Scout and Maverick: the text",
    "llama": "Llama 2 and 3, SmolLM, TinyLlama, Yi",
    "mistral": "Mistral 7B, Mistral Small",
    "ministral3": "Ministral 3",
    "mistral3": "Mistral Small 3.1 and Ministral 3, with images",
    "qwen2": "Qwen 2, 2.5",
    "qwen3": "Qwen 3",
    "qwen3_5_text": "Qwen3.5, dense, without vision",
    "qwen3_5": "Qwen3.5, dense, with images",
    "qwen3_5_moe_text": "Qwen3.5 with experts, without vision",
    "qwen3_5_moe": "Qwen3.5 with experts, with images",
    "granitemoehybrid": "Granite 4, hybrid",
    "falcon_h1": "Falcon-H1",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2, Nemotron 3",
    "qwen3_next": "Qwen3-Next-80B-A3B",
    "qwen3_moe": "Qwen3-30B-A3B, Qwen3-Coder",
    "smollm3": "SmolLM 3",
    "phi3": "Phi-3, Phi-3.5 mini, Phi-4 mini",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3, 270M and 1B",
    "gemma3": "Gemma 3, 4B, 12B and 27B, with images",
    "gemma4_text": "Gemma 4, without vision and audio",
    "gemma4": "Gemma 4, E2B, E4B, 26B-A4B and 31B, with images",
    "gpt_oss": "gpt-oss-20b, gpt-oss-120b",
    "granite": "Granite 3",
    "idefics3": "Idefics3, with images",
    "smolvlm": "SmolVLM, SmolVLM2, with images",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "ernie4_5_moe": "ERNIE 4.5, mixtures of text",
    "glm4_moe": "GLM-4.5, 4.6 and 4.7",
    "deepseek_v2": "DeepSeek-V2, DeepSeek-V2-Lite",
    "deepseek_v3": "DeepSeek-V3 and R1, Kimi K2",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "cohere": "Command R and R+, Aya Expanse",
    "cohere2": "Command R7B, Command A",
    "glm": "GLM-4-9B",
    "glm4": "GLM-4-0414",
    "lfm2": "LFM2, dense",
    "lfm2_moe": "LFM2-8B-A1B",
    "mixtral": "Mixtral",
}


TEXT = {
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "idefics3": "LlamaForCausalLM",
    "smolvlm": "LlamaForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}


def specs(family: Family) -> list[ModelSpec]:
    """Of tiny's models of a family, widened to what kernels want; of one with vision, those of its text."""
    found = []
    for config_class, model_class, changed in tiny.MODELS.values():
        text = TEXT.get(family.model_type)
        if model_class in family.architectures or model_class == text:
            made: Any = getattr(transformers, config_class)(**{**tiny.SIZES, **changed})
            config = {**made.to_dict(), "architectures": [model_class]}
            found.append(replace(family_of(config).spec(config), hidden_size=64, head_dim=64, intermediate_size=64))
    return found


def on_cpu(spec: ModelSpec) -> str:
    if spec.experts is not None:
        latent = 64 if spec.experts.latent_size else 0
        widened = replace(spec.experts, intermediate_size=64, shared_size=64, latent_size=latent)
        spec = replace(spec, experts=widened)
    if spec.latent is not None:
        spec = replace(spec, latent=replace(spec.latent, query_rank=64, value_dim=64))
    if spec.global_heads is not None:
        spec = replace(spec, global_heads=replace(spec.global_heads, head_dim=64), mlp_widths=())
    if spec.per_layer_input is not None:
        spec = replace(spec, per_layer_input=replace(spec.per_layer_input, size=64))
    if isinstance(spec.recurrence, GatedDelta):
        spec = replace(spec, recurrence=replace(spec.recurrence, value_dim=64))
    if isinstance(spec.recurrence, StateSpace):
        spec = replace(spec, recurrence=replace(spec.recurrence, head_dim=64))
    if not native_layers.suits(spec, torch.bfloat16, torch.device("cpu")):
        return "torch"
    if spec.torch_layers:
        return "products in C++"
    return "C++"


def on_gpu(spec: ModelSpec) -> str:
    wanting = gpu_layers._wanting(spec, torch.bfloat16, torch.device("cuda"))
    return "Triton" if not wanting or wanting.startswith("Triton cannot launch") else f"torch: {wanting}"


def keeps_its_format(spec: ModelSpec) -> bool:
    return bool(spec.conv_layers or spec.latent or spec.recurrent_layers or spec.uneven_kv)


def table() -> str:
    rows = ["| models | architecture | CPU | GPU | K/V of 8 or 4 bits | GGUF |", "|---|---|---|---|---|---|"]
    for family in FAMILIES:
        made, (architecture, *_) = specs(family), family.architectures
        files = [name for name, each in ARCHITECTURES.items() if each.model_class == architecture]
        cells = [
            _MODELS[family.model_type],
            f"`{architecture}`",
            "; ".join(dict.fromkeys(map(on_cpu, made))),
            "; ".join(dict.fromkeys(map(on_gpu, made))),
            "no" if any(map(keeps_its_format, made)) else "yes",
            ", ".join(f"`{name}`" for name in files) or "no",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def test_the_page_has_every_family_as_the_code_runs_it() -> None:
    pytest.importorskip("triton", reason="Triton is not installed: it says what it runs")
    if cpu.library() is None:
        pytest.skip(f"no kernels in C++ here: {cpu.unavailable()}")
    assert all(specs(family) for family in FAMILIES)
    assert table() in PAGE.read_text("utf-8")


if __name__ == "__main__":
    print(table())
