"""Gemma 4 against `transformers`, a feature at a time; what its layers keep in the cache; and what is refused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine import GREEDY, Engine, InvalidParameter, Span
from engine.errors import CheckpointError
from engine.families import family_of
from engine.kernels import cpu
from engine.model.attention import reference
from engine.model.batch import KVCache
from engine.model.decoder import load_decoder
from engine.model.memory import block_bytes, loaded_bytes, spec_of
from engine.model.model_spec import ModelSpec
from engine.model.quantization.quantize import Recipe, quantize
from tests.engine.kv_cache.test_kv_tiers import config, prompt
from tests.engine.model import tiny
from tests.engine.model.families.features import TOLERANCE, VISIBLE, hold_random_configurations, moved, without
from tests.engine.model.stepping import Stepper, apart

CLASSES = ("Gemma4TextConfig", "Gemma4ForCausalLM")
PUBLISHED: Mapping[str, Any] = {  # fields as published files have them, with head sizes by kind of layer
    **tiny.SIZES,
    **tiny.GEMMA4,
    "architectures": ["Gemma4ForCausalLM"],
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 384,
}


def _ropes(of: str, **changed: Any) -> Any:
    return lambda spec: {"ropes": tuple(replace(r, **changed) if r.kind == of else r for r in spec.ropes)}


def _experts(**changed: Any) -> Any:
    return lambda spec: {"experts": replace(spec.experts, **changed)}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma4", {"qk_norm": "none"}),
        ("gemma4", {"value_norm": False}),
        ("gemma4", {"attention_scale": 20**-0.5}),
        ("gemma4", {"windows": (None,) * 6}),
        ("gemma4", {"kv_sources": (None, None, None, None, 0, 3)}),
        ("gemma4", {"kv_sources": (None, None, None, None, 2, 1)}),
        ("gemma4", _ropes("proportional", kind="default")),
        ("gemma4", _ropes("proportional", rotating=10)),
        ("gemma4", _ropes("default", theta=1e6)),
        ("gemma4", {"per_layer_input": None}),
        ("gemma4", {"layer_scales": False}),
        ("gemma4", {"logit_softcap": None}),
        ("gemma4", {"post_norm": False}),
        ("gemma4", {"norm_offset": 1.0}),
        ("gemma4", {"embedding_multiplier": 1.0}),
        ("gemma4", {"activation": "silu"}),
        ("gemma4_moe", {"value_norm": False}),
        ("gemma4_moe", _experts(weight_scales=False)),
        ("gemma4_moe", _experts(beside_mlp=False)),
        ("gemma4_moe", _experts(per_token=1)),
    ],
)
def test_dropping_a_feature_moves_the_logits(own_cases: Any, name: str, change: Any) -> None:
    assert moved(own_cases(name), change) > VISIBLE


def _heads(**changed: Any) -> Any:
    return lambda spec: {"global_heads": replace(spec.global_heads, **changed)}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gemma4_moe", _heads(keys_are_values=False), "layers.1.self_attn.v_proj.weight' is missing"),
        ("gemma4", _heads(kv_heads=1), r"layers.1.self_attn.k_proj.weight' has shape \(40, 48\)"),
        ("gemma4", {"kv_sources": ()}, "layers.4.self_attn.k_norm.weight' is missing"),
        ("gemma4", {"mlp_widths": ()}, r"layers.4.mlp.gate_proj.weight' has shape \(224, 48\)"),
    ],
)
def test_without_a_feature_that_shapes_weights_it_is_not_loaded(
    own_cases: Any, name: str, change: Any, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        without(own_cases(name), change)


def test_reference_attention_gives_the_same_logits(own_cases: Any) -> None:
    case = own_cases("gemma4")
    slow = without(case, {}, attend=reference)
    assert apart(Stepper(slow, [case.prompts[4]], seed=1).run(50)[0], case.expected[4]) < TOLERANCE


def test_a_gated_input_is_the_tokens_own_and_the_embeddings(own_cases: Any) -> None:
    """Without its own embedding or without the projection of the model's, a token has another input."""
    case = own_cases("gemma4")
    decoder = without(case, {}, kernels="torch")
    inputs = decoder._inputs
    assert inputs is not None
    no_table = replace(inputs, table=torch.zeros_like(inputs.table))
    for other in (no_table, replace(inputs, projection=lambda x: inputs.projection(x) * 0)):
        decoder._inputs = other
        assert apart(Stepper(decoder, [case.prompts[-1]]).run(300)[0], case.expected[-1]) > VISIBLE


def _drawn(draw: random.Random) -> dict[str, Any]:
    """Returns a random configuration: kinds of layers, heads, what is shared, inputs of layers and experts."""
    heads, layers = draw.choice((1, 2, 4, 6)), draw.randint(2, 7)
    kinds = [draw.choice(("sliding_attention", "full_attention")) for _ in range(layers - 1)] + ["full_attention"]
    divisors = [each for each in (1, 2, heads) if heads % each == 0]
    first = next(at for at in range(1, layers + 1) if set(kinds[:at]) == set(kinds))
    k_eq_v = draw.random() < 0.5
    return {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "hidden_size": draw.choice((32, 48)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice(divisors),
        "num_global_key_value_heads": draw.choice([None, *divisors]) if k_eq_v else None,
        "attention_k_eq_v": k_eq_v,
        "head_dim": draw.choice((8, 14)),
        "global_head_dim": draw.choice((8, 24)),
        "attention_bias": draw.random() < 0.3,
        "sliding_window": draw.choice((1, 7, 24, 200)),
        "num_kv_shared_layers": draw.randint(0, layers - first),
        "use_double_wide_mlp": draw.random() < 0.5,
        "hidden_size_per_layer_input": draw.choice((0, 6)),
        "vocab_size_per_layer_input": 384,
        "final_logit_softcapping": draw.choice((None, 10.0)),
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice((1e-6, 1e-3)),
        "enable_moe_block": draw.random() < 0.5,
        "num_experts": 5,
        "top_k_experts": draw.randint(1, 5),
        "moe_intermediate_size": 4 * draw.randint(1, 8),
        "rope_parameters": {
            "sliding_attention": draw.choice((tiny.PLAIN, tiny.LINEAR)),
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e5,
                "partial_rotary_factor": draw.choice((0.25, 0.6, 1.0)),
                "factor": draw.choice((1.0, 4.0)),
            },
        },
    }


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 10, 20])
def test_random_configurations_equal_transformers(first: int, tmp_path: Path) -> None:
    hold_random_configurations(CLASSES, _drawn, range(first, first + 10), tmp_path)


def test_a_model_with_vision_runs_its_text_part(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    text = {**tiny.SIZES, **tiny.MODELS["gemma4"][2], "use_bidirectional_attention": "vision"}
    parts: dict[str, Any] = {"vision_config": {**vision, "num_key_value_heads": 1, "head_dim": 16}}
    made = transformers.Gemma4Config(text_config=text, **parts)
    made._attn_implementation = "eager"
    model = tiny.redraw(transformers.Gemma4ForConditionalGeneration(made).eval().float(), seed=3)
    tiny.save(model, tmp_path)
    tokens = list(range(3, 103))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    decoder = load_decoder(tmp_path, dtype=torch.float32)
    assert apart(Stepper(decoder, [tokens]).run(33)[0], expected) < TOLERANCE


def test_fields_as_published_are_read_like_those_that_transformers_saves() -> None:
    wide = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    saved: dict[str, Any] = transformers.Gemma4TextConfig(**{**PUBLISHED, **wide}).to_dict()
    assert "per_layer_config" in saved and "global_head_dim" not in saved
    published = {**PUBLISHED, **wide}
    assert _spec({**saved, "architectures": ["Gemma4ForCausalLM"]}) == _spec(published)


def _spec(given: Mapping[str, Any]) -> ModelSpec:
    return family_of(dict(given)).spec(dict(given))


def test_a_block_has_what_each_layer_needs_and_nothing_of_layers_that_share() -> None:
    spec = _spec(PUBLISHED)
    of_layers = 2 * 2 * 12 + 2 * 2 * 20  # numbers of a token's keys: two sliding layers, two others, two that share
    assert block_bytes(spec, 16, torch.float32) == 16 * 2 * of_layers * 4
    cache = KVCache.of(spec, 3, 16, torch.float32, "cpu")
    assert cache.block_nbytes == block_bytes(spec, 16, torch.float32)
    sliding, wide, *_, reads_sliding, reads_wide = cache.layers()
    assert sliding.shape[3:] == (2, 12) and wide.shape[3:] == (2, 20)
    assert [each.data_ptr() for each in cache.layers()[2:4]] == [reads_sliding.data_ptr(), reads_wide.data_ptr()]


def test_embeddings_for_each_layer_are_estimated_in_16_bits_whatever_the_others_have(tmp_path: Path) -> None:
    found = []
    for rows in (400, 500):
        changed = {**tiny.MODELS["gemma4"][2], "vocab_size_per_layer_input": rows}
        path = tiny.save(tiny.build(*CLASSES, changed), tmp_path / str(rows))
        found.append([loaded_bytes(path, spec_of(path), torch.bfloat16, kind) for kind in ("none", "int8", "int4")])
    more = [large - small for small, large in zip(*found, strict=True)]
    assert more == pytest.approx([100 * 6 * 8 * 2] * 3, abs=40)  # and the length of the file's header


async def test_forks_and_truncated_sequences_go_on_alike(random_gemma4: Path) -> None:
    span = Span(GREEDY, max_tokens=6, ignore_eos=True)
    tokens, more = prompt(0, 37), prompt(1, 9)
    async with await Engine.start(config(random_gemma4, kv_blocks=64, prefix_cache=False)) as fresh:
        expected = []
        for text in (tokens, [*tokens[:21], *more]):
            async with await fresh.open(text) as seq:
                expected.append((await seq.generate_all(span)).token_ids)
    async with await Engine.start(config(random_gemma4, kv_blocks=64)) as engine:
        first = await engine.open(tokens)
        assert (await first.generate_all(span)).token_ids == expected[0]
        first.truncate(len(tokens))
        (kid,) = first.fork(1)
        assert [(await seq.generate_all(span)).token_ids for seq in (first, kid)] == [expected[0]] * 2
        kid.truncate(21)
        kid.append(more)
        assert (await kid.generate_all(span)).token_ids == expected[1]
        engine._core.check()


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4"])
async def test_fewer_bits_of_keys_and_values_are_refused_by_name(random_gemma4: Path, kv_dtype: str) -> None:
    with pytest.raises(InvalidParameter, match=f"kv_dtype is {kv_dtype}, but the layers of random-gemma4 differ in"):
        await Engine.start(config(random_gemma4, kv_dtype=kv_dtype))


def test_it_is_not_quantised_to_a_directory(own_cases: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="differ in their keys and values, which are not quantised yet"):
        quantize(own_cases("gemma4").path, tmp_path / "out", Recipe("int8", "rtn"), [])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; supported: False or 'vision'"),
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "layer_types is .* a last layer of full"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types is 'chunked_attention'; supported: full_attention"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5; supported: so many that each kind"),
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers is 9; supported: so many that each kind"),
        ({"global_head_dim": 21}, "global_head_dim is 21; supported: an even number"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 4},
            "num_global_key_value_heads is 4; supported: a divisor of num_attention_heads = 6",
        ),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config is .* head_dim and num_key_value_heads of"),
        (
            {"per_layer_config": {str(at): {"head_dim": 8, "rms_norm_eps": 1} for at in (1, 3, 5)}},
            "per_layer_config is",
        ),
        (
            {"vocab_size_per_layer_input": 383},
            "vocab_size_per_layer_input is 383; supported: at least vocab_size = 384",
        ),
        ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 8}, "top_k_experts"),
        ({"enable_moe_block": True}, "num_experts is None; supported: a positive integer"),
        ({"rope_parameters": tiny.PLAIN}, "rope_parameters is .* one for sliding_attention and one for full_attention"),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {**tiny.PLAIN, "partial_rotary_factor": 0.5},
                    "full_attention": {},
                }
            },
            "partial_rotary_factor is 0.5; supported: 1",
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": tiny.PLAIN,
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5},
                }
            },
            "partial_rotary_factor is 1.5; supported: above 0, up to 1",
        ),
    ],
)
def test_an_option_that_is_not_run_is_refused_by_name(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        _spec({**PUBLISHED, **changed})


def test_weights_of_layers_that_share_are_left_alone(own_cases: Any, tmp_path: Path) -> None:
    """Published files have projections of keys and values in layers that read those of others."""
    from safetensors.torch import load_file, save_file

    case = own_cases("gemma4")
    weights = load_file(case.path / "model.safetensors")
    for part in ("k_proj", "v_proj", "k_norm"):
        weights[f"model.layers.4.self_attn.{part}.weight"] = torch.ones(3)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((case.path / "config.json").read_bytes())
    decoder = load_decoder(tmp_path, dtype=torch.float32)
    assert apart(Stepper(decoder, case.prompts[2:3]).run(64)[0], case.expected[2]) < TOLERANCE


@pytest.mark.parametrize("name", ["gemma4", "gemma4_moe"])
@pytest.mark.skipif(cpu.library() is None, reason=f"no kernels in C++ here: {cpu.unavailable()}")
def test_products_of_the_kernels_are_as_exact_as_torch_in_16_bits(name: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 96, "head_dim": 32, "global_head_dim": 64, "intermediate_size": 160}
    inputs = 32 if name == "gemma4" else 0
    model = tiny.build(*CLASSES, {**tiny.MODELS[name][2], **wide, "hidden_size_per_layer_input": inputs})
    path = tiny.save(model.to(torch.bfloat16), tmp_path)
    tokens = [[(at * 7 + text) % 380 + 3 for at in range(30)] for text in range(4)]
    exact = torch.cat(Stepper(load_decoder(path, dtype=torch.float32), tokens, seed=1).run(300))
    decoder = load_decoder(path, dtype=torch.bfloat16)
    assert not decoder.native and "Tiled" in type(decoder._layers[0].qkv).__name__
    found, plain = (
        torch.cat(Stepper(each, tokens, seed=1).run(300))
        for each in (decoder, load_decoder(path, dtype=torch.bfloat16, kernels="torch"))
    )
    typical, of_torch = ((each - exact).abs().amax(1).median() / exact.abs().max() for each in (found, plain))
    assert typical < 1.5 * of_torch < 0.05
