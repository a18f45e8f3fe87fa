"""Every family's logits against `transformers` (eager, float32), however the prompt is cut up and batched."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.errors import CheckpointError
from engine.families import family_of
from engine.model.attention import reference
from engine.model.decoder import Decoder, load_decoder
from engine.model.loader import SafetensorsWeights, read_json
from engine.model.model_spec import ModelSpec, Rope
from tests.engine.model import tiny
from tests.engine.model.conftest import LENGTHS, SHARED, Case, make_case
from tests.engine.model.stepping import Stepper, apart

TOLERANCE = 1e-4
VISIBLE = 1e-2  # a feature that matters moves the logits by more than this


def assert_parity(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [apart(f, e) for f, e in zip(found, expected, strict=True)] == pytest.approx([0] * len(found), abs=TOLERANCE)


def test_whole_prompts_alone(case: Case) -> None:
    found = [Stepper(case.decoder, [prompt], seed=1).run(chunk=300)[0] for prompt in case.prompts]
    assert_parity(found, case.expected)


@pytest.mark.parametrize("chunk", [16, 50])
def test_chunks_of_all_prompts_together(case: Case, chunk: int) -> None:
    assert_parity(Stepper(case.decoder, case.prompts, seed=chunk).run(chunk), case.expected)


def test_token_by_token_together(case: Case) -> None:
    stepper = Stepper(case.decoder, case.prompts, block_size=8, seed=3)
    before = stepper.step([0, 0, 0, 0, 0, 230])  # the longest prompt joins with most of it cached
    found = stepper.run(chunk=1)
    assert_parity([*found[:-1], torch.cat([before[-1], found[-1]])], case.expected)


def test_prefill_and_decode_in_one_batch(case: Case) -> None:
    stepper = Stepper(case.decoder, case.prompts, seed=4)
    parts: list[list[torch.Tensor]] = [[] for _ in case.prompts]
    plan = [[1, 0, 60, 3, 64, 130], [0, 2, 1, 60, 0, 1], [0, 0, 1, 0, 1, 1], [0, 0, 1, 1, 0, 5], [0, 0, 0, 0, 0, 163]]
    for chunks in plan:
        for part, logits in zip(parts, stepper.step(chunks), strict=True):
            part.append(logits)
    assert tuple(stepper.done) == LENGTHS
    assert_parity([torch.cat(part) for part in parts], case.expected)


def _drawn(name: str, draw: random.Random) -> tuple[str, str, dict[str, Any]]:
    """Returns a random configuration of a family with experts: heads, ranks, groups, routing and rope."""
    config_class, model_class, _ = tiny.MODELS[name]
    heads, groups, size = draw.randint(1, 6), draw.choice((1, 2, 3)), draw.randint(2, 4)
    changed: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 12 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([each for each in (1, heads) if heads % each == 0]),
        "rms_norm_eps": draw.choice((1e-6, 1e-3)),
        "num_experts_per_tok": draw.randint(1, size),
        "moe_intermediate_size": 4 * draw.randint(1, 10),  # rows of 16 bytes, as torch asks of grouped products
    }
    ropes = [tiny.PLAIN, tiny.LINEAR, tiny.YARN, {**tiny.YARN, "mscale": 0.7, "mscale_all_dim": draw.random() + 0.1}]
    if name.startswith(("deepseek", "glm4")):
        changed |= {
            "n_routed_experts": groups * size,
            "n_shared_experts": draw.randint(1, 3),
            "first_k_dense_replace": draw.randint(0, 2),
            "n_group": groups,
            "topk_group": draw.randint(1, groups),
            "routed_scaling_factor": draw.uniform(0.5, 3.0),
            "attention_bias": draw.random() < 0.5,
        }
        ropes = [dict(rope) for rope in ropes]
    else:
        changed |= {"num_experts": groups * size, "moe_num_experts": groups * size}
        changed["moe_k"] = changed["num_experts_per_tok"]
    if name.startswith("deepseek_v2"):
        changed["topk_method"] = draw.choice(("greedy", "group_limited_greedy"))
    else:
        changed["norm_topk_prob"] = draw.random() < 0.5
    if name.startswith("deepseek") or name == "glm4_moe_lite":
        changed |= {
            "num_key_value_heads": heads,
            "kv_lora_rank": 2 * draw.randint(2, 20),
            "q_lora_rank": draw.choice((None, 2 * draw.randint(2, 20))),
            "qk_nope_head_dim": 2 * draw.randint(1, 10),
            "qk_rope_head_dim": 2 * draw.randint(1, 8),
            "v_head_dim": draw.randint(1, 24),
            "rope_interleave": draw.random() < 0.5,
        }
    changed["rope_parameters"] = draw.choice(ropes)
    return config_class, model_class, changed


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm4_moe", "qwen2_moe", "ernie4_5_moe"]
)
def test_thirty_random_configurations(name: str, tmp_path: Path) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        config_class, model_class, changed = _drawn(name, draw)
        model = tiny.build(config_class, model_class, changed, seed)
        decoder = load_decoder(tiny.save(model, tmp_path / str(seed)), dtype=torch.float32)
        prompts = [[draw.randrange(3, 384) for _ in range(draw.choice((1, 17, 40, 90)))] for _ in range(3)]
        with torch.no_grad():
            expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
        stepper = Stepper(decoder, prompts, block_size=draw.choice((4, 16)), seed=seed)
        assert_parity(stepper.run(draw.choice((1, 7, 30, 100))), expected)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_windows", "gpt_oss", "deepseek_v2"])
def test_reference_attention_gives_the_same_logits(own_cases: Any, name: str) -> None:
    case = own_cases(name)
    config = read_json(case.path / "config.json")
    family = family_of(config)
    slow = Decoder(
        family.spec(config),
        family.names(config),
        SafetensorsWeights(case.path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        attend=reference,
    )
    assert_parity([Stepper(slow, [case.prompts[4]], seed=1).run(50)[0]], [case.expected[4]])


def _everywhere(rope: Rope | None) -> Any:
    return lambda spec: {"ropes": (rope or spec.ropes[0],) * spec.layers}


def _plain_rope(spec: ModelSpec) -> dict[str, Any]:
    return {"ropes": tuple(Rope(rope.dim, rope.theta) for rope in spec.ropes if rope)}


def _paired(neighbours: bool) -> Any:
    return lambda spec: {"ropes": tuple(replace(rope, neighbours=neighbours) for rope in spec.ropes)}


def _experts(**changed: Any) -> Any:
    return lambda spec: {"experts": replace(spec.experts, **changed)}


def _multiplied(at: int) -> Any:
    return lambda spec: _recurrence(multipliers=tuple(np.where(np.arange(5) == at, 1.0, spec.recurrence.multipliers)))(
        spec
    )


def _recurrence(**changed: Any) -> Any:
    return lambda spec: {"recurrence": replace(spec.recurrence, **changed)}


def _no_windows(spec: ModelSpec) -> dict[str, Any]:
    return {"windows": (None,) * spec.layers}


DROPPED: list[tuple[str, str, Any]] = [
    ("qwen2", "bias", {"qkv_bias": False}),
    ("llama_biased", "output bias", {"o_bias": False}),
    ("llama_biased", "mlp bias", {"mlp_bias": False}),
    ("llama3", "rope scaling", _plain_rope),
    ("llama_linear", "rope scaling", _plain_rope),
    ("llama_yarn", "rope scaling", _plain_rope),
    ("llama_yarn", "attention factor", lambda s: {"ropes": tuple(replace(r, attention_factor=1.0) for r in s.ropes)}),
    ("llama_yarn_mscale", "mscale", lambda s: {"ropes": tuple(replace(r, attention_factor=1.0) for r in s.ropes)}),
    ("llama_yarn_mscale", "no truncation", lambda s: {"ropes": tuple(replace(r, truncate=True) for r in s.ropes)}),
    ("mistral", "window", _no_windows),
    ("qwen2_windows", "windows", _no_windows),
    ("phi3", "window", _no_windows),
    ("phi3_partial", "partial rotation", lambda s: {"ropes": (Rope(s.head_dim, s.ropes[0].theta),) * s.layers}),
    ("qwen3", "query and key norm", {"qk_norm": "none"}),
    ("smollm3", "layers without positions", _everywhere(None)),
    ("gemma2", "attention softcap", {"attention_softcap": None}),
    ("gemma2", "logit softcap", {"logit_softcap": None}),
    ("gemma2", "windows", _no_windows),
    ("gemma2", "norms after", {"post_norm": False}),
    ("gemma2", "norm offset", {"norm_offset": 0.0}),
    ("gemma2", "activation", {"activation": "silu"}),
    ("gemma2", "attention scale", lambda s: {"attention_scale": s.head_dim**-0.5}),
    ("gemma2", "embedding multiplier", {"embedding_multiplier": 1.0}),
    ("gemma3", "query and key norm", {"qk_norm": "none"}),
    ("gemma3", "windows", _no_windows),
    ("gemma3", "local rope", lambda s: _everywhere(s.ropes[-1])(s)),
    ("granite", "embedding multiplier", {"embedding_multiplier": 1.0}),
    ("granite", "attention multiplier", lambda s: {"attention_scale": s.head_dim**-0.5}),
    ("granite", "residual multiplier", {"residual_multiplier": 1.0}),
    ("granite", "logits scaling", {"logits_scaling": 1.0}),
    ("olmo2", "query and key norm", {"qk_norm": "none"}),
    ("olmo2", "norms after", {"post_norm": False}),
    ("olmo3", "windows", _no_windows),
    ("olmo3", "local rope", lambda s: _everywhere(s.ropes[0])(s)),
    ("gemma", "norm offset", {"norm_offset": 0.0}),
    ("gemma", "embedding multiplier", {"embedding_multiplier": 1.0}),
    ("glm4", "pairs of neighbours", lambda s: {"ropes": tuple(replace(r, neighbours=False) for r in s.ropes)}),
    ("glm4", "norms after", {"post_norm": False}),
    ("ministral3", "growing queries", lambda s: {"ropes": tuple(replace(r, query_beta=0.0) for r in s.ropes)}),
    ("cohere2", "norms less the mean", {"norm": "rms"}),
    ("cohere2", "one norm for both", {"parallel": False}),
    ("cohere2", "output bias", {"o_bias": False}),
    ("cohere2", "windows", _no_windows),
    ("cohere2", "layers without positions", _everywhere(None)),
    ("cohere2", "pairs of neighbours", lambda s: {"ropes": tuple(r and replace(r, neighbours=False) for r in s.ropes)}),
    ("cohere2", "logit scale", {"logits_scaling": 1.0}),
    ("cohere", "query and key norms", {"qk_norm": "none"}),
    ("qwen3_moe", "two experts a token", lambda s: {"experts": replace(s.experts, per_token=1)}),
    ("qwen3_moe", "weights as they are", lambda s: {"experts": replace(s.experts, normalised=True)}),
    ("mixtral", "weights that sum to one", lambda s: {"experts": replace(s.experts, normalised=False)}),
    ("olmoe", "query and key norm", {"qk_norm": "none"}),
    ("gpt_oss", "sinks", {"sinks": False}),
    ("gpt_oss", "windows", _no_windows),
    ("gpt_oss", "attention bias", {"qkv_bias": False}),
    ("gpt_oss", "biases of experts", {"mlp_bias": False}),
    ("gpt_oss", "bias of the router", lambda s: {"experts": replace(s.experts, router_bias=False)}),
    ("gpt_oss", "weights that sum to one", lambda s: {"experts": replace(s.experts, normalised=False)}),
    ("gpt_oss", "clamped gate", lambda s: {"experts": replace(s.experts, gate=None)}),
    (
        "gpt_oss",
        "limit of the gate",
        lambda s: {"experts": replace(s.experts, gate=replace(s.experts.gate, limit=7.0))},
    ),
    (
        "gpt_oss",
        "slope of the gate",
        lambda s: {"experts": replace(s.experts, gate=replace(s.experts.gate, alpha=1.0))},
    ),
    ("gpt_oss", "no truncation", lambda s: {"ropes": tuple(replace(r, truncate=True) for r in s.ropes)}),
    ("lfm2", "query and key norm", {"qk_norm": "none"}),
    ("lfm2_moe", "sigmoid scores", _experts(scores="softmax")),
    ("lfm2_moe", "bias of the selection", _experts(selection_bias=False)),
    ("lfm2_moe", "weights that sum to one", _experts(normalised=False)),
    ("lfm2_moe", "scaled weights", _experts(scaling=1.0)),
    ("deepseek_v2", "pairs of neighbours", _paired(False)),
    ("deepseek_v2", "groups of experts", _experts(groups=None)),
    ("deepseek_v2", "scaled weights", _experts(scaling=1.0)),
    ("deepseek_v2", "weights as they are", _experts(normalised=True)),
    ("deepseek_v2", "shared experts", _experts(shared_size=0)),
    ("deepseek_v2_greedy", "attention bias", {"qkv_bias": False}),
    ("deepseek_v2_greedy", "output bias", {"o_bias": False}),
    ("deepseek_v3", "sigmoid scores", _experts(scores="softmax")),
    ("deepseek_v3", "bias of the selection", _experts(selection_bias=False)),
    ("deepseek_v3", "two best experts of a group", lambda s: _experts(groups=replace(s.experts.groups, summed=1))(s)),
    ("deepseek_v3", "best groups", lambda s: _experts(groups=replace(s.experts.groups, per_token=4))(s)),
    ("deepseek_v3", "weights that sum to one", _experts(normalised=False)),
    ("deepseek_v3", "scaled weights", _experts(scaling=1.0)),
    ("deepseek_v3", "attention bias", {"qkv_bias": False}),
    ("deepseek_v3", "scores of a stretched rope", {"attention_scale": 20**-0.5}),
    ("deepseek_v3", "attention factor", lambda s: {"ropes": tuple(replace(r, attention_factor=1.0) for r in s.ropes)}),
    ("qwen2_moe", "shared expert", _experts(shared_size=0)),
    ("qwen2_moe", "gate of the shared expert", _experts(shared_gate=False)),
    ("qwen2_moe", "windows", _no_windows),
    ("qwen2_moe", "bias", {"qkv_bias": False}),
    ("ernie4_5_moe", "bias of the selection", _experts(selection_bias=False)),
    ("ernie4_5_moe", "shared experts", _experts(shared_size=0)),
    ("ernie4_5_moe", "pairs of neighbours", _paired(False)),
    ("glm4_moe", "sigmoid scores", _experts(scores="softmax")),
    ("glm4_moe", "groups of experts", _experts(groups=None)),
    ("glm4_moe", "bias of the selection", _experts(selection_bias=False)),
    ("glm4_moe", "query and key norm", {"qk_norm": "none"}),
    ("glm4_moe", "partial rotation", lambda s: {"ropes": (Rope(s.head_dim, s.ropes[0].theta),) * s.layers}),
    ("glm4_moe_lite", "halves of the rotated key", _paired(True)),
    ("glm4_moe_lite", "shared experts", _experts(shared_size=0)),
    ("qwen3_5", "norm offset", {"norm_offset": 0.0}),
    ("qwen3_5", "query and key norm", {"qk_norm": "none"}),
    (
        "qwen3_5",
        "partial rotation",
        lambda s: {"ropes": tuple(rope and Rope(s.head_dim, rope.theta) for rope in s.ropes)},
    ),
    ("qwen3_5_moe", "shared expert", lambda s: {"experts": replace(s.experts, shared_size=0)}),
    ("qwen3_5_moe", "gate of the shared expert", lambda s: {"experts": replace(s.experts, shared_gate=False)}),
    ("qwen3_next", "weights that sum to one", lambda s: {"experts": replace(s.experts, normalised=False)}),
    ("falcon_h1", "embedding multiplier", {"embedding_multiplier": 1.0}),
    ("falcon_h1", "attention scale", lambda s: {"attention_scale": s.head_dim**-0.5}),
    ("falcon_h1", "attention multiplier", {"attention_multiplier": 1.0}),
    ("falcon_h1", "recurrence multiplier", {"recurrence_multiplier": 1.0}),
    ("falcon_h1", "gate multiplier", {"gate_multiplier": 1.0}),
    ("falcon_h1", "mlp multiplier", {"mlp_multiplier": 1.0}),
    ("falcon_h1", "logits scaling", {"logits_scaling": 1.0}),
    *(("falcon_h1", f"multiplier {at} of the projection", _multiplied(at)) for at in range(5)),
    ("falcon_h1", "norm before the gate", _recurrence(norm="gated")),
    ("falcon_h1_plain", "bias of the outputs", _recurrence(out_bias=False)),
    ("falcon_h1_gated_norm", "norm after the gate", _recurrence(norm="before_gate")),
    ("falcon_h1_gated_norm", "bias of the projection", _recurrence(bias=False)),
    ("nemotron_h", "squared activation", {"activation": "gelu"}),
    ("nemotron_h", "least time step", _recurrence(min_step=0.0)),
    ("nemotron_h", "largest time step", _recurrence(max_step=float("inf"))),
    ("nemotron_h", "norm after the gate", _recurrence(norm="before_gate")),
    ("nemotron_h", "layers without positions", _everywhere(Rope(12, 10_000.0))),
    ("nemotron_h_moe", "sigmoid scores", _experts(scores="softmax")),
    ("nemotron_h_moe", "bias of the selection", _experts(selection_bias=False)),
    ("nemotron_h_moe", "groups of experts", _experts(groups=None)),
    ("nemotron_h_moe", "weights that sum to one", _experts(normalised=False)),
    ("nemotron_h_moe", "scaled weights", _experts(scaling=1.0)),
    ("nemotron_h_moe", "shared expert", _experts(shared_size=0)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "feature", "change"), DROPPED, ids=[f"{name}-{feature}".replace(" ", "_") for name, feature, _ in DROPPED]
)
def test_dropping_a_feature_breaks_parity(own_cases: Any, name: str, feature: str, change: Any) -> None:
    case = own_cases(name)
    config = read_json(case.path / "config.json")
    family = family_of(config)
    spec = family.spec(config)
    without = replace(spec, **(change(spec) if callable(change) else change))
    assert without != spec, f"{name} has no {feature} to drop"
    decoder = Decoder(
        without, family.names(config), SafetensorsWeights(case.path), dtype=torch.float32, device=torch.device("cpu")
    )
    assert apart(Stepper(decoder, [case.prompts[-1]]).run(300)[0], case.expected[-1]) > VISIBLE


def test_longrope_is_exact_within_the_original_context_and_beyond_it(tmp_path: Path) -> None:
    case = make_case(tiny.build(*tiny.LONGROPE_PHI3), tmp_path)
    assert case.decoder.spec.max_position_embeddings == 160
    assert_parity(Stepper(case.decoder, case.prompts[:-1]).run(64), case.expected[:-1])
    long = load_decoder(tmp_path, dtype=torch.float32, max_model_len=640)
    assert long.spec.max_position_embeddings == 640
    assert_parity(Stepper(long, case.prompts[-1:]).run(64), case.expected[-1:])
    assert apart(Stepper(long, case.prompts[2:3]).run(64)[0], case.expected[2]) > VISIBLE


def test_longrope_attention_factor_is_applied(tmp_path: Path) -> None:
    case = make_case(tiny.build(*tiny.LONGROPE_PHI3), tmp_path)
    config = read_json(tmp_path / "config.json")
    family = family_of(config)
    spec = family.spec(config)
    ropes = tuple(replace(rope, attention_factor=1.0) for rope in spec.ropes if rope)
    decoder = Decoder(
        replace(spec, ropes=ropes),
        family.names(config),
        SafetensorsWeights(tmp_path),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert apart(Stepper(decoder, [case.prompts[4]]).run(300)[0], case.expected[4]) > VISIBLE


def test_dynamic_rope_equals_transformers_up_to_the_declared_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    case = make_case(tiny.build("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": rope}), tmp_path)
    assert_parity(Stepper(case.decoder, case.prompts).run(300), case.expected)


VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 4,
}


def _with_vision(name: str) -> Any:
    """A small model with images, of which the engine runs the text part. Any: transformers is untyped."""
    import transformers

    if name == "gemma3":
        text = {**tiny.SIZES, **tiny.GEMMA, "num_hidden_layers": 6}
        tokens: dict[str, Any] = {"image_token_index": 383, "boi_token_index": 382, "eoi_token_index": 381}
        gemma = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4, **tokens)
        gemma._attn_implementation = "eager"
        return transformers.Gemma3ForConditionalGeneration(gemma)
    if name in ("qwen3_5", "qwen3_5_moe"):
        prefix = "Qwen3_5Moe" if name.endswith("moe") else "Qwen3_5"
        text = {**tiny.SIZES, **tiny.MODELS[name][2]}
        seen = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 48}
        qwen = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=seen)
        qwen._attn_implementation = "eager"
        return getattr(transformers, f"{prefix}ForConditionalGeneration")(qwen)
    kind = "ministral3" if name == "ministral3" else "mistral"
    text = {**tiny.SIZES, **tiny.MODELS[kind][2], "model_type": kind}
    vision = {**VISION, "model_type": "pixtral", "head_dim": 16}
    tied = name == "ministral3"
    config = transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=383, tie_word_embeddings=tied
    )
    config._attn_implementation = "eager"
    return transformers.Mistral3ForConditionalGeneration(config)


@pytest.mark.parametrize(
    "name", ["gemma3", "ministral3", "mistral3", "qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)]
)
def test_a_model_with_vision_runs_its_text_part(tmp_path: Path, name: str) -> None:
    model = tiny.redraw(_with_vision(name).eval().float(), seed=3)
    tiny.save(model, tmp_path)
    prompt = list(range(3, 103))
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    assert_parity(Stepper(load_decoder(tmp_path, dtype=torch.float32), [prompt]).run(33), [expected])


def test_ministral_without_its_rope_is_refused() -> None:
    with pytest.raises(CheckpointError, match="rope_parameters is None"):
        family_of({"model_type": "ministral3"}).spec({**tiny.SIZES, "model_type": "ministral3"})


@pytest.mark.parametrize(
    ("architecture", "changed", "words"),
    [
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; supported: greedy or group"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob is True; supported: False"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported: 'sigmoid'"),
        ("DeepseekV3ForCausalLM", {"n_group": 3}, "n_group is 3; supported: a divisor of the 8 experts"),
        ("DeepseekV3ForCausalLM", {"n_group": 8}, "n_group is 8; supported: .* that leaves 2 to each"),
        ("DeepseekV3ForCausalLM", {"n_group": 4, "topk_group": 1}, "topk_group is 1; supported: .* with 3 experts"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 7}, "kv_lora_rank is 7; supported: an even number"),
        ("DeepseekV3ForCausalLM", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1; supported: an integer"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is .*; supported: a list of 3"),
        ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, "use_bias is True; supported: False"),
        ("Lfm2MoeForCausalLM", {"block_auto_adjust_ff_dim": True}, "block_auto_adjust_ff_dim is True; supported: F"),
        ("Lfm2MoeForCausalLM", {"num_dense_layers": -1}, "num_dense_layers is -1; supported: an integer"),
        ("Lfm2MoeForCausalLM", {"conv_bias": True}, "conv_bias is True; supported: False"),
    ],
)
def test_a_routing_that_is_not_run_is_refused(architecture: str, changed: dict[str, Any], words: str) -> None:
    config = {**tiny.SIZES, **tiny.LATENT, "architectures": [architecture], **changed}
    with pytest.raises(CheckpointError, match=words):
        family_of(config).spec(config)


def test_sharded_checkpoint_equals_single(own_cases: Any, tmp_path: Path) -> None:
    case = own_cases("qwen3")
    tiny.save(tiny.build(*tiny.MODELS["qwen3"]), tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    sharded = load_decoder(tmp_path, dtype=torch.float32)
    assert_parity(Stepper(sharded, case.prompts[2:3]).run(64), case.expected[2:3])


def test_tied_embeddings_need_no_lm_head_and_untied_ones_do(own_cases: Any) -> None:
    tied = load_file(own_cases("qwen3").path / "model.safetensors")
    untied = load_file(own_cases("llama").path / "model.safetensors")
    assert "lm_head.weight" not in tied and "lm_head.weight" in untied


def test_hidden_states_equal_transformers(own_cases: Any) -> None:
    model = tiny.build(*tiny.MODELS["llama"])
    case = own_cases("llama")
    prompt = case.prompts[2]
    with torch.no_grad():
        expected = model.model(torch.tensor([prompt])).last_hidden_state[0]
    stepper = Stepper(case.decoder, [prompt])
    forward, case.decoder.forward = case.decoder.forward, case.decoder.hidden
    try:
        assert apart(stepper.run(20)[0], expected) < TOLERANCE
    finally:
        case.decoder.forward = forward


def test_bfloat16_stays_near_float32(own_cases: Any) -> None:
    for name in ("qwen3", "gemma2", "olmo2"):
        case = own_cases(name)
        half = load_decoder(case.path, dtype=torch.bfloat16)
        assert apart(Stepper(half, [case.prompts[2]]).run(20)[0], case.expected[2]) < 0.1


def test_longer_than_declared_is_refused(own_cases: Any) -> None:
    with pytest.raises(CheckpointError, match=r"max_model_len is 641.*at most 640"):
        load_decoder(own_cases("llama").path, dtype=torch.float32, max_model_len=641)


def test_stories260k_greedy_text_is_the_known_one() -> None:
    from engine.model.tokenizer import Tokenizer

    root = SHARED / "data/models/stories260K"
    if not root.is_dir():
        pytest.skip(f"no stories260K at {root}; set PONDER_SHARED")
    decoder, tokenizer = load_decoder(root / "hf", dtype=torch.float32), Tokenizer.load(root / "hf")
    assert tokenizer.bos_token_id is not None
    stepper = Stepper(decoder, [[tokenizer.bos_token_id] + [0] * 200])
    for i in range(200):
        (logits,) = stepper.step([1])
        stepper.prompts[0][i + 1] = int(logits[-1].argmax())
    assert tokenizer.decode(stepper.prompts[0]) == (root / "expected_greedy_200tok.txt").read_text()
