"""Llama 4 against `transformers`, a feature at a time, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.errors import CheckpointError
from engine.families import family_of
from engine.kernels import cpu
from engine.model.attention import reference
from engine.model.decoder import load_decoder
from engine.model.model_spec import ModelSpec
from tests.engine.model import tiny
from tests.engine.model.families.features import TOLERANCE, VISIBLE, hold_random_configurations, moved, without
from tests.engine.model.stepping import Stepper, apart

CLASSES = ("Llama4TextConfig", "Llama4ForCausalLM")
PUBLISHED: Mapping[str, Any] = {
    **tiny.SIZES,
    **tiny.MODELS["llama4"][2],
    "architectures": ["Llama4ForCausalLM"],
}


def _ropes(rotating: bool, **changed: Any) -> Any:
    return lambda spec: {"ropes": tuple(replace(r, **changed) if (r.dim > 0) == rotating else r for r in spec.ropes)}


def _experts(**changed: Any) -> Any:
    return lambda spec: {"experts": replace(spec.experts, **changed)}


@pytest.mark.parametrize(
    "change",
    [
        {"chunked": False},
        {"windows": (None,) * 4},
        {"windows": (24,) * 4},
        {"qk_norm": "none"},
        lambda spec: {"ropes": (spec.ropes[0],) * 4},
        lambda spec: {"ropes": (spec.ropes[3],) * 4},
        _ropes(True, neighbours=False),
        _ropes(True, kind="default"),
        _ropes(False, query_beta=0.0),
        _ropes(False, query_offset=0),
        _experts(scaled_inputs=False),
        _experts(scores="softmax"),
        _experts(normalised=True),
        _experts(per_token=1),
        _experts(shared_size=0),
        {"activation": "gelu"},
    ],
)
def test_dropping_a_feature_moves_the_logits(own_cases: Any, change: Any) -> None:
    assert moved(own_cases("llama4"), change) > VISIBLE


def test_reference_attention_gives_the_same_logits(own_cases: Any) -> None:
    case = own_cases("llama4")
    slow = without(case, {}, attend=reference)
    assert apart(Stepper(slow, [case.prompts[4]], seed=1).run(50)[0], case.expected[4]) < TOLERANCE


def test_experts_are_chosen_by_logits_where_sigmoids_are_all_one(tmp_path: Path) -> None:
    model = tiny.build(*CLASSES, tiny.MODELS["llama4"][2])
    with torch.no_grad():
        for layer in model.model.layers[1::2]:
            layer.feed_forward.router.weight.mul_(1000)
    tokens = [at % 380 + 3 for at in range(60)]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    decoder = load_decoder(tiny.save(model, tmp_path), dtype=torch.float32)
    assert apart(Stepper(decoder, [tokens]).run(60)[0], expected) < TOLERANCE


def _drawn(draw: random.Random) -> dict[str, Any]:
    """Returns a random configuration: kinds of layers, chunks, growth of queries and experts."""
    heads, layers = draw.choice((1, 2, 4, 6)), draw.randint(1, 6)
    rotates = [draw.randint(0, 1) for _ in range(layers)]
    kinds = [draw.choice(("chunked_attention", "full_attention")) for _ in range(layers)]
    experts = draw.randint(1, 6)
    return {
        "num_hidden_layers": layers,
        "hidden_size": draw.choice((32, 48)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([each for each in (1, 2, heads) if heads % each == 0]),
        "head_dim": draw.choice((8, 14)),
        "no_rope_layers": rotates if any(rotates) and draw.random() < 0.6 else None,
        "no_rope_layer_interval": draw.randint(1, 4),
        "layer_types": draw.choice((None, kinds)),
        "attention_chunk_size": draw.choice((1, 7, 16, 33, 200)),
        "use_qk_norm": draw.random() < 0.5,
        "attn_temperature_tuning": draw.random() < 0.7,
        "floor_scale": draw.choice((1, 9, 50)),
        "attn_scale": draw.choice((0.1, 0.5)),
        "attention_bias": draw.random() < 0.3,
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice((1e-6, 1e-3)),
        "intermediate_size": 4 * draw.randint(1, 10),
        "intermediate_size_mlp": 4 * draw.randint(1, 10),
        "num_local_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts),
        "interleave_moe_layer_step": draw.randint(1, 3),
        "moe_layers": draw.choice((None, [], [0])),
        "rope_parameters": draw.choice((tiny.PLAIN, tiny.LINEAR, tiny.LLAMA3)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 10, 20])
def test_random_configurations_equal_transformers(first: int, tmp_path: Path) -> None:
    hold_random_configurations(CLASSES, _drawn, range(first, first + 10), tmp_path)


def test_a_model_with_vision_runs_its_text_part(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes = {"image_size": 8, "patch_size": 4, "vision_output_dim": 16}
    projector = {"projector_input_dim": 16, "projector_output_dim": 16}
    text = {**tiny.SIZES, **tiny.MODELS["llama4"][2]}
    parts: dict[str, Any] = {"text_config": text, "vision_config": {**vision, **sizes, **projector}}
    made = transformers.Llama4Config(**parts)
    made._attn_implementation = "eager"
    model = tiny.redraw(transformers.Llama4ForConditionalGeneration(made).eval().float(), seed=3)
    tiny.save(model, tmp_path)
    tokens = list(range(3, 103))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    decoder = load_decoder(tmp_path, dtype=torch.float32)
    assert apart(Stepper(decoder, [tokens]).run(33)[0], expected) < TOLERANCE


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rope_parameters": tiny.YARN}, "rope_type is 'yarn'; supported: default, linear, llama3, proportional"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is .* each chunked_attention or full_attention"),
        ({"attention_chunk_size": None}, "attention_chunk_size is None; supported: a positive integer, as some"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is .* a list of 4, each 0 or 1"),
        ({"no_rope_layers": [1, 2, 0, 1]}, "no_rope_layers is .* a list of 4, each 0 or 1"),
        ({"moe_layers": 2}, "moe_layers is 2; supported: a list of layers' numbers"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning is 'yes'; supported: true or false"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7; supported: at most the 6 experts"),
    ],
)
def test_an_option_that_is_not_run_is_refused_by_name(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        _spec({**PUBLISHED, **changed})


def _spec(given: Mapping[str, Any]) -> ModelSpec:
    return family_of(dict(given)).spec(dict(given))


def test_a_number_for_the_growth_of_queries_is_read_as_true() -> None:
    assert _spec({**PUBLISHED, "attn_temperature_tuning": 4}) == _spec(PUBLISHED)
    assert _spec({**PUBLISHED, "attn_temperature_tuning": False}).ropes[3] is None


@pytest.mark.parametrize(("coding", "limit"), [("int8", 0.02), ("fp8", 0.08)])
def test_keys_and_values_of_8_bits_are_read_by_chunks(own_cases: Any, coding: Any, limit: float) -> None:
    """Some tokens are near enough to a tie for another expert, so the median token is judged."""
    case = own_cases("llama4")
    found = Stepper(case.decoder, case.prompts, seed=2, coding=coding).run(50)
    for logits, expected in zip(found, case.expected, strict=True):
        assert (logits - expected).abs().amax(1).median() / expected.abs().max() < limit


@pytest.mark.skipif(cpu.library() is None, reason=f"no kernels in C++ here: {cpu.unavailable()}")
def test_products_of_the_kernels_are_as_exact_as_torch_in_16_bits(tmp_path: Path) -> None:
    wide = {"hidden_size": 96, "head_dim": 32, "intermediate_size": 64, "intermediate_size_mlp": 160}
    model = tiny.build(*CLASSES, {**tiny.MODELS["llama4"][2], **wide})
    path = tiny.save(model.to(torch.bfloat16), tmp_path)
    tokens = [[(at * 7 + text) % 380 + 3 for at in range(30)] for text in range(4)]
    exact = torch.cat(Stepper(load_decoder(path, dtype=torch.float32), tokens, seed=1).run(300))
    decoder = load_decoder(path, dtype=torch.bfloat16)
    mixture = decoder._layers[1].mixture
    assert not decoder.native and mixture is not None and mixture.run is not None
    found, plain = (
        torch.cat(Stepper(each, tokens, seed=1).run(300))
        for each in (decoder, load_decoder(path, dtype=torch.bfloat16, kernels="torch"))
    )
    typical, of_torch = ((each - exact).abs().amax(1).median() / exact.abs().max() for each in (found, plain))
    assert typical < 1.5 * of_torch < 0.05
