"""Recurrent layers: chunks against single tokens, and random configurations against `transformers`, cut at random."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import CheckpointError
from engine.families import family_of
from engine.model.decoder import load_decoder
from engine.model.recurrent import mamba2
from engine.model.recurrent.gated_delta_net import by_chunks, token_by_token
from engine.model.recurrent.states import CHUNK
from tests.engine.model import tiny
from tests.engine.model.stepping import Stepper, apart

CONFIGURATIONS = 30
MIXED = {"hybrid_override_pattern": "M*E"}


@pytest.mark.parametrize(("position", "count"), [(0, 1), (0, CHUNK), (1, 2 * CHUNK), (CHUNK - 1, 3), (70, 200)])
def test_chunks_of_the_delta_rule_equal_single_tokens(position: int, count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    heads, key_dim, value_dim = 3, 8, 5

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    q, k = (torch.nn.functional.normalize(drawn(count, heads, key_dim), dim=-1) for _ in range(2))
    v, rates, decays = drawn(count, heads, value_dim), drawn(count, heads).sigmoid(), -drawn(count, heads).exp() / 9
    state = drawn(heads, key_dim, value_dim)
    found, expected = (run(state, q, k, v, rates, decays, position) for run in (by_chunks, token_by_token))
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, atol=2e-5)


@pytest.mark.parametrize(("position", "count"), [(0, CHUNK), (1, 2 * CHUNK), (CHUNK - 1, 3), (70, 200)])
def test_chunks_of_mamba2_equal_single_tokens(position: int, count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    heads, head_dim, state_dim = 3, 5, 8
    x, b, c = (torch.randn(count, heads, width, generator=draw) for width in (head_dim, state_dim, state_dim))
    decays = -torch.randn(count, heads, generator=draw).exp() / 9
    state = torch.randn(heads, head_dim, state_dim, generator=draw)
    runs = (mamba2.by_chunks, mamba2.token_by_token)
    found, expected = (run(state, x, b, c, decays, position) for run in runs)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, atol=1e-4)


def configuration(seed: int) -> tuple[str, str, dict[str, Any]]:
    """Draws a configuration. Any: its values."""
    draw = random.Random(seed)
    layers = draw.randint(2, 5)
    kinds = [draw.choice(["linear_attention", "linear_attention", "full_attention"]) for _ in range(layers)]
    first, second = draw.sample(range(layers), 2)
    kinds[first], kinds[second] = "linear_attention", "full_attention"
    key_heads = draw.randint(1, 3)
    changed = {
        **tiny.EXPERTS,
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "head_dim": draw.choice([8, 16, 32]),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.choice([1, 2, 3]),
        "linear_key_head_dim": draw.choice([8, 12, 16]),
        "linear_value_head_dim": draw.choice([8, 12, 20]),
        "linear_conv_kernel_dim": draw.randint(2, 5),
        "shared_expert_intermediate_size": draw.choice([16, 40]),
        "attention_bias": draw.random() < 0.3,
        "tie_word_embeddings": draw.random() < 0.3,
    }
    name, *classes = draw.choice(
        [
            ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
            ("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
            ("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM"),
        ]
    )
    if name == "qwen3_next":
        changed["mlp_only_layers"] = [draw.randrange(layers)]
    return classes[0], classes[1], changed


def granite_configuration(seed: int) -> tuple[str, str, dict[str, Any]]:
    """Draws a configuration of Granite 4. Any: its values."""
    draw = random.Random(seed)
    layers = draw.randint(2, 4)
    kinds = [draw.choice(["linear_attention", "full_attention"]) for _ in range(layers)]
    first, second = draw.sample(range(layers), 2)
    kinds[first], kinds[second] = "linear_attention", "full_attention"
    heads, experts = draw.choice([4, 6, 12]), draw.choice([0, 4])
    changed = {
        **tiny.SPACE,
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "mamba_n_heads": heads,
        "mamba_d_head": 96 // heads,
        "mamba_n_groups": draw.choice([1, 2]),
        "mamba_d_state": draw.choice([8, 16, 24]),
        "mamba_d_conv": draw.randint(2, 5),
        "mamba_conv_bias": draw.random() < 0.7,
        "mamba_proj_bias": draw.random() < 0.3,
        "num_local_experts": experts,
        "num_experts_per_tok": min(2, experts),
        "position_embedding_type": draw.choice([None, "rope"]),
        "tie_word_embeddings": draw.random() < 0.5,
    }
    return "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", changed


def falcon_configuration(seed: int) -> tuple[str, str, dict[str, Any]]:
    """Draws a configuration of Falcon-H1. Any: its values."""
    draw = random.Random(seed)
    heads = draw.choice([4, 6, 12])
    changed: dict[str, Any] = {
        **tiny.BESIDE,
        "num_hidden_layers": draw.randint(1, 3),
        "head_dim": draw.choice([8, 12]),
        "mamba_d_ssm": heads * draw.choice([2, 5, 8]),
        "mamba_n_heads": heads,
        "mamba_n_groups": draw.choice([1, 2]),
        "mamba_d_state": draw.choice([8, 16, 24]),
        "mamba_d_conv": draw.randint(2, 5),
        "mamba_conv_bias": draw.random() < 0.7,
        "mamba_rms_norm": draw.random() < 0.6,
        "mamba_norm_before_gate": draw.random() < 0.5,
        "projectors_bias": draw.random() < 0.3,
        "mlp_bias": draw.random() < 0.3,
        "tie_word_embeddings": draw.random() < 0.5,
    }
    if draw.random() < 0.3:
        changed |= {"attention_bias": True, "attention_in_multiplier": 1.0}
    if draw.random() < 0.3:
        changed |= {"mamba_proj_bias": True, "ssm_in_multiplier": 1.0}
    for field, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        changed[field] = [draw.uniform(0.3, 1.7) for _ in range(count)]
    return "FalconH1Config", "FalconH1ForCausalLM", changed


def nemotron_configuration(seed: int) -> tuple[str, str, dict[str, Any]]:
    """Draws a configuration of Nemotron-H. Any: its values."""
    draw = random.Random(seed)
    pattern = ["M", "*", *draw.choices("M*-E", k=draw.randint(0, 4))]
    draw.shuffle(pattern)
    groups, mixed = draw.choice([1, 2, 4]), "E" in pattern
    changed: dict[str, Any] = {
        **tiny.ALONE,
        "hybrid_override_pattern": "".join(pattern),
        "head_dim": draw.choice([8, 12, 16]),
        "mamba_num_heads": 4 * draw.randint(1, 3),
        "mamba_head_dim": draw.choice([2, 5, 8]),
        "ssm_state_size": draw.choice([8, 16, 24]),
        "n_groups": draw.choice([1, 2, 4]),
        "conv_kernel": draw.randint(2, 5),
        "use_conv_bias": draw.random() < 0.7,
        "use_bias": draw.random() < 0.3,
        "mlp_bias": draw.random() < 0.3 and not mixed,
        "time_step_limit": draw.choice([[0.0, float("inf")], [0.01, float("inf")], [0.0, 0.05], [0.005, 0.05]]),
        "n_routed_experts": 8,
        "n_group": groups,
        "topk_group": draw.randint(1, groups),
        "num_experts_per_tok": draw.choice([1, 2]),
        "norm_topk_prob": draw.random() < 0.7,
        "routed_scaling_factor": draw.uniform(0.5, 2.5),
    }
    return "NemotronHConfig", "NemotronHForCausalLM", changed


@pytest.mark.slow
@pytest.mark.parametrize("draws", [configuration, granite_configuration, falcon_configuration, nemotron_configuration])
@pytest.mark.parametrize("seed", range(CONFIGURATIONS))
def test_a_random_configuration_equals_transformers(tmp_path: Path, seed: int, draws: Any) -> None:
    config_class, model_class, changed = draws(seed)
    model = tiny.build(config_class, model_class, changed, seed=seed)
    tiny.save(model, tmp_path)
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, 384) for _ in range(length)] for length in (5, 90, 170)]
    with torch.no_grad():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    stepper = Stepper(load_decoder(tmp_path, dtype=torch.float32), prompts, seed=seed)
    parts: list[list[torch.Tensor]] = [[], [], []]
    while any(done < len(prompt) for done, prompt in zip(stepper.done, prompts, strict=True)):
        left = [len(prompt) - done for done, prompt in zip(stepper.done, prompts, strict=True)]
        chunks = [min(each, draw.choice([0, 1, 1, 7, 40])) for each in left]
        if any(chunks):
            for part, logits in zip(parts, stepper.step(chunks), strict=True):
                part.append(logits)
    assert max(apart(torch.cat(part), each) for part, each in zip(parts, expected, strict=True)) < 1e-4


@pytest.mark.parametrize(
    ("architecture", "changed", "words"),
    [
        ("FalconH1ForCausalLM", {"ssm_multipliers": [1.0]}, "ssm_multipliers is .*; supported: a list of 5 numbers"),
        ("FalconH1ForCausalLM", {"mlp_multipliers": [1.0, None]}, "mlp_multipliers is .*; supported: a list of 2 num"),
        ("FalconH1ForCausalLM", {"lm_head_multiplier": 0}, "lm_head_multiplier is 0.*; supported: a number above 0"),
        ("FalconH1ForCausalLM", {"attention_bias": True}, "attention_bias is True; supported: false with attention_in"),
        ("FalconH1ForCausalLM", {"mamba_proj_bias": True}, "mamba_proj_bias is True; supported: false with ssm_in_mu"),
        ("FalconH1ForCausalLM", {"mamba_n_heads": 7}, "mamba_n_heads is 7; supported: a divisor of the 72 channels"),
        ("FalconH1ForCausalLM", {"mamba_d_head": 8}, "mamba_d_head is 8; supported: 'auto' or 6"),
        ("FalconH1ForCausalLM", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit is .*; supported: \[0, Infinity\]"),
        ("FalconH1ForCausalLM", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ("FalconH1ForCausalLM", {"attn_layer_indices": [1]}, "attn_layer_indices is .*; supported: null"),
        ("FalconH1ForCausalLM", {"layer_types": ["mamba"] * 3}, "layer_types is .*; supported: .'hybrid', 'hybrid', "),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*"}, "hybrid_override_pattern is 'M.'; supported: a pa"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*S"}, "hybrid_override_pattern is .*; supported: a pat"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "MM-"}, "hybrid_override_pattern is .*; supported: one l"),
        ("NemotronHForCausalLM", {"layers_block_type": ["mamba", "conv", "mlp"]}, "layers_block_type is .*: a list of"),
        ("NemotronHForCausalLM", {}, "hybrid_override_pattern is None; supported: a pattern of num_hidden_layers = 3"),
        (
            "NemotronHForCausalLM",
            {**MIXED, "moe_latent_size": 0},
            "moe_latent_size is 0; supported: a positive integer",
        ),
        ("NemotronHForCausalLM", {**MIXED, "mlp_bias": True}, "mlp_bias is True; supported: False"),
        ("NemotronHForCausalLM", {**MIXED, "n_shared_experts": 2}, "n_shared_experts is 2; supported: 1"),
        ("NemotronHForCausalLM", {**MIXED, "attention_bias": True}, "attention_bias is True; supported: False"),
        ("NemotronHForCausalLM", {**MIXED, "mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; supported: 'relu2'"),
        ("NemotronHForCausalLM", {**MIXED, "mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'; supported: 'silu"),
        ("NemotronHForCausalLM", {**MIXED, "sliding_window": 64}, "sliding_window is 64; supported: null"),
        ("NemotronHForCausalLM", {**MIXED, "residual_in_fp32": True}, "residual_in_fp32 is True; supported: False"),
        ("NemotronHForCausalLM", {**MIXED, "tie_word_embeddings": True}, "tie_word_embeddings is True; supported: Fal"),
        ("NemotronHForCausalLM", {**MIXED, "n_groups": 5}, "mamba_num_heads is 12; supported: a multiple of n_groups"),
        (
            "NemotronHForCausalLM",
            {**MIXED, "time_step_limit": [0.1, 0.1]},
            "time_step_limit is .*; supported: a number",
        ),
        ("NemotronHForCausalLM", {**MIXED, "mamba_d_conv": 3, "conv_kernel": 4}, "conv_kernel is 4; supported: 3"),
    ],
)
def test_a_hybrid_that_is_not_run_is_refused(architecture: str, changed: dict[str, Any], words: str) -> None:
    config = {
        **tiny.SIZES,
        **(tiny.BESIDE if architecture.startswith("Falcon") else tiny.ALONE),
        "architectures": [architecture],
        **changed,
    }
    with pytest.raises(CheckpointError, match=words):
        family_of(config).spec(config)
