"""Small random checkpoints that we make ourselves, one for each family and option, for `transformers` to run too.

Every parameter is drawn anew after initialisation: with norms at one and biases at zero, a forgotten norm or bias
would not show. The sizes are such that a window, a rope scale or a cap bites within a few dozen tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: Mapping[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100_000.0,
    "factor": 6.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 80}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 160,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.5, 2.5, 4.0, 7.0],
}
LFM2_LAYERS = ["conv", "conv", "full_attention", "conv", "full_attention"]
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 24}

DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SPACE = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "intermediate_size": 32,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 12,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}
BESIDE = {
    "mamba_d_ssm": 72,
    "mamba_n_heads": 12,
    "mamba_d_head": "auto",
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.7,
    "mlp_multipliers": [0.7, 1.6],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.5, 1.4, 0.6, 1.5, 0.7],
}
ALONE = {
    "head_dim": 12,
    "mamba_num_heads": 12,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "time_step_limit": [0.004, 0.03],
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}

ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
LATENT = {
    **ROUTED,
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "head_dim": 12,
    "global_head_dim": 20,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "final_logit_softcapping": 15.0,
}

# name -> (configuration class, model class, differences from SIZES)
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama_biased": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama3": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama_linear": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LINEAR}),
    "llama_yarn": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": YARN}),
    "llama_yarn_mscale": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.5, "beta_fast": 16.0, "truncate": False}},
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"head_dim": 12, "sliding_window": 24}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen2_windows": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"num_hidden_layers": 4}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": 40}),
    "phi3_partial": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
    ),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 15.0},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**GEMMA, "num_hidden_layers": 6}),
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 400,
        },
    ),
    "gemma4_moe": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "attention_chunk_size": 24,
            "floor_scale": 40,
            "attn_scale": 0.4,
            "intermediate_size": 32,
            "intermediate_size_mlp": 112,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "rope_parameters": LLAMA3,
        },
    ),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 5.0},
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "olmo3": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
        },
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 12}),
    "glm": ("GlmConfig", "GlmForCausalLM", {"head_dim": 12}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"head_dim": 16}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {"use_qk_norm": True}),
    "cohere2": (
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 24, "attention_bias": True},
    ),
    "ministral3": (
        "Ministral3Config",
        "Ministral3ForCausalLM",
        {"head_dim": 12, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.4}},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**EXPERTS, "mlp_only_layers": [1]}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 6, "num_experts_per_tok": 3}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 24,
            "swiglu_limit": 1.5,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            **{name: EXPERTS[name] for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")},
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [0],
            "sliding_window": 24,
            "use_sliding_window": True,
            "max_window_layers": 2,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**ROUTED, "n_group": 2, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.7},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    "deepseek_v2_greedy": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**LATENT, "q_lora_rank": None, "attention_bias": True, "rms_norm_eps": 1e-2},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        {**LATENT, "rope_interleave": False, "qk_nope_head_dim": 10, "v_head_dim": 20, "norm_topk_prob": False},
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"num_hidden_layers": 5, "block_multiple_of": 16, "layer_types": LFM2_LAYERS},
    ),
    "lfm2_four_taps": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"block_auto_adjust_ff_dim": False, "full_attn_idxs": [1], "conv_L_cache": 4, "rope_parameters": LLAMA3},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {
            **{name: EXPERTS[name] for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")},
            "num_hidden_layers": 5,
            "layer_types": LFM2_LAYERS,
            "routed_scaling_factor": 1.7,
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DELTA),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 24},
    ),
    "granite_hybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", {**SPACE, "num_local_experts": 0}),
    "granite_hybrid_moe": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**SPACE, "num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
    ),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", {**BESIDE, "mamba_rms_norm": True}),
    "falcon_h1_plain": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {**BESIDE, "mamba_d_ssm": None, "num_key_value_heads": 6, "projectors_bias": True, "mlp_bias": True},
    ),
    "falcon_h1_gated_norm": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **BESIDE,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_bias": True,
            "attention_in_multiplier": 1.0,
            "mamba_proj_bias": True,
            "ssm_in_multiplier": 1.0,
        },
    ),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", {**ALONE, "hybrid_override_pattern": "M-*MM-"}),
    "nemotron_h_moe": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **ALONE,
            "hybrid_override_pattern": "ME*E-M",
            "time_step_limit": [0.0, float("inf")],
            "n_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "nemotron_h_latent": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **ALONE,
            "hybrid_override_pattern": "ME*E",
            "time_step_limit": [0.0, float("inf")],
            "moe_latent_size": 20,
            "n_group": 2,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
}
LONGROPE_PHI3 = (
    "Phi3Config",
    "Phi3ForCausalLM",
    {"rope_parameters": LONGROPE, "original_max_position_embeddings": 160},
)


def build(config_class: str, model_class: str, overrides: Mapping[str, Any], seed: int = 7) -> Any:
    """A float32 model with eager attention and every parameter drawn anew. Any: transformers' classes are untyped."""
    config = getattr(transformers, config_class)(**{**SIZES, **overrides})
    config._attn_implementation = "eager"
    model = getattr(transformers, model_class)(config).eval().float()
    for module in model.modules():
        if hasattr(module, "time_step_limit"):  # transformers 5.23 has another one in Nemotron-H: see `nemotron_h`
            module.time_step_limit = tuple(config.time_step_limit)
    return redraw(model, seed)


@torch.no_grad()
def redraw(model: Any, seed: int) -> Any:
    """Draw every parameter anew: matrices of gain 1.4, vectors around the value that they were initialised to, and the
    decays of recurrent states so that a state keeps some dozen tokens."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.empty_like(parameter).normal_(generator=generator)
        if name.endswith("A_log"):  # drawn at random there, and mostly so large that a state would forget at once
            parameter.copy_(drawn * 0.5 - 2.5)
        elif parameter.dim() < 2:
            parameter.add_(drawn, alpha=0.35)
        elif "embed" in name:
            parameter.copy_(drawn * 0.6)
        else:
            parameter.copy_(drawn * (1.4 / parameter.shape[-1] ** 0.5))
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.normal_(std=0.2, generator=generator)
        elif name.endswith("layer_scalar"):
            buffer.uniform_(0.6, 1.4, generator=generator)
    return model


def save(model: Any, path: Path, **options: Any) -> Path:
    """Save in Hugging Face format and return the directory. Any: options of save_pretrained."""
    model.save_pretrained(path, **options)
    return path
