"""Images of Mistral 3 against transformers: pixels to the bit, logits to 1e-3, however they are run."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

from engine import GREEDY, Engine, Span
from engine.errors import CheckpointError
from engine.families import family_of
from engine.kernels import cpu
from engine.model.loader import SafetensorsWeights, read_json
from engine.model.memory import loaded_bytes, spec_of
from engine.model.model_spec import PixtralVisionSpec
from engine.multimodal.encoders import load_encoder
from engine.multimodal.pixtral_processor import PixtralImageProcessor
from tests.engine.multimodal import seeing_pixtral as pixtral
from tests.engine.multimodal.seeing import (
    TOLERANCE,
    apart,
    config,
    logprobs,
    picture,
    pictures,
    prompt,
    shown,
)

Checkpoint = tuple[Any, Path]  # Any: a model of transformers
PUBLISHED = PixtralImageProcessor(28, 1540, 10, 3, 1 / 255, (0.5,) * 3, (0.5,) * 3)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    made = {}
    changed: dict[str, dict[str, Any]] = {
        "ministral3": {},
        "mistral": {"vision": {"hidden_act": "gelu"}, "multimodal_projector_bias": True, "text": {"rms_norm_eps": 0.5}},
    }
    for kind, each in changed.items():
        model = pixtral.build(kind=kind, **each)
        made[kind] = model, pixtral.write(tmp_path_factory.mktemp("models") / kind, model)
    return made


@pytest.fixture(params=["ministral3", "mistral"])
def checkpoint(request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint]) -> Checkpoint:
    return checkpoints[request.param]


@pytest.fixture
async def engine(checkpoint: Checkpoint) -> AsyncIterator[Engine]:
    async with await Engine.start(config(checkpoint[1])) as engine:
        yield engine


def expected(model: Any, tokens: Sequence[int], sizes: Sequence[tuple[int, int]], seed: int = 0) -> torch.Tensor:
    """transformers' log-probabilities after each token; it checks their number against the pictures'."""
    seen = pixtral.reference_processor()(images=pictures(sizes, seed), return_tensors="pt")
    ids = torch.tensor([shown(tokens, model.config.image_token_index)])
    with torch.no_grad():
        logits = model(input_ids=ids, pixel_values=seen["pixel_values"], image_sizes=seen["image_sizes"]).logits
    return logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("size", [(96, 40), (31, 77), (64, 64), (1, 1), (72, 1), (300, 200), (80, 56)])
def test_pixels_and_prompt_tokens_are_the_references(checkpoints: dict[str, Checkpoint], size: tuple[int, int]) -> None:
    path, image = checkpoints["mistral"][1], picture(*size)
    marks = {pixtral.IMAGE: 256, pixtral.BREAK: 257, pixtral.END: 258}

    def encode(text: str) -> list[int]:
        return [marks[f"[{each}"] for each in text.split("[")[1:]]

    ours = PixtralImageProcessor.load(path, read_json(path / "config.json")).process(image, encode)
    theirs = pixtral.reference_processor()(images=[image], return_tensors="np")
    high, wide = (int(edge) // pixtral.SQUARE for edge in theirs["image_sizes"][0])
    rows = [[256] * wide + [257]] * (high - 1) + [[256] * wide + [258]]
    assert shown(ours.token_ids, 256) == [id for row in rows for id in row]
    assert (ours.features, ours.tiles) == (high * wide, high)
    pixels = np.frombuffer(ours.pixels, dtype=np.uint8).reshape(high * pixtral.SQUARE, wide * pixtral.SQUARE, 3)
    mean, std = np.array(pixtral.PROCESSOR["image_mean"]), np.array(pixtral.PROCESSOR["image_std"])
    assert np.abs(((pixels / 255 - mean) / std).transpose(2, 0, 1) - theirs["pixel_values"][0]).max() < 1e-5


@tried(max_examples=300)
@given(st.integers(1, 1540), st.integers(1, 1540), st.integers(1, 42))
def test_published_processors_have_the_references_squares(width: int, height: int, times: int) -> None:
    size = (width * times, height * times)
    shape = (height * times, width * times, 3)
    high, wide = get_resize_output_image_size(np.broadcast_to(np.uint8(0), shape), 1540, 28, "channels_last")
    assert PUBLISHED._squares(*size, 1540) == (max(1, high // 28), max(1, wide // 28))


@pytest.mark.parametrize(
    "changed",
    [{}, {"max_batch_tokens": 7}, {"max_batch_tokens": 50, "block_size": 32}, {"deterministic": True}],
    ids=str,
)
async def test_logits_are_the_references_in_chunks_of_any_size(
    checkpoint: Checkpoint, changed: dict[str, object]
) -> None:
    model, path = checkpoint
    cases = [[(60, 41)], [(31, 77), (200, 150)], [(65, 33), (9, 1), (640, 480)]]
    async with await Engine.start(config(path, **changed)) as engine:
        for nth, sizes in enumerate(cases):
            texts = ["Look: ", *["", " and then number 2, "][: len(sizes) - 1], "what is it?"]
            tokens = await prompt(engine, texts, sizes, 10 * nth)
            assert await apart(engine, tokens, expected(model, tokens, sizes, 10 * nth)) < TOLERANCE


async def test_generated_tokens_are_the_references(checkpoint: Checkpoint, engine: Engine) -> None:
    sizes = [(60, 41), (15, 30)]
    tokens = await prompt(engine, ["See ", "and ", "so:"], sizes)
    async with await engine.open(tokens) as seq:
        out = await seq.generate_all(Span(GREEDY, max_tokens=20, logprobs=8, ignore_eos=True))
    reference = expected(checkpoint[0], [*tokens, *out.token_ids], sizes)
    for at, each in enumerate(out.logprobs):
        for token, value in each.top:
            assert abs(reference[len(tokens) - 1 + at, token] - value) < TOLERANCE


async def test_marks_that_a_user_writes_stand_for_no_image(engine: Engine) -> None:
    tokens = await prompt(engine, ["It says [IMG] and [IMG_BREAK]", "[IMG_END] then"], [(8, 24)])
    marks = [engine.tokenizer.token_id(mark) for mark in (pixtral.IMAGE, pixtral.BREAK, pixtral.END)]
    assert [tokens.count(mark) for mark in marks if mark is not None] == [0, 2, 1]


@pytest.mark.parametrize(
    "changed",
    [{"activation": "silu"}, {"theta": 50.0}, {"merge_eps": 1e-5}, {"projector_activation": "silu"}],
    ids=str,
)
def test_dropping_a_feature_of_the_encoder_breaks_parity(
    checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    model, path = checkpoints["mistral"]
    given = read_json(path / "config.json")
    family, processor = family_of(given), PixtralImageProcessor.load(path, given)
    spec, image = family.spec(given), picture(61, 40)
    assert isinstance(spec.vision, PixtralVisionSpec)
    seen = pixtral.reference_processor()(images=[image], return_tensors="pt")
    with torch.no_grad():
        (rows,) = model.model.get_image_features(seen["pixel_values"], seen["image_sizes"]).pooler_output
    made = processor.process(image, lambda _: [])
    pixels = torch.frombuffer(bytearray(made.pixels), dtype=torch.uint8).view(made.tiles, made.size, -1, 3)

    def error(vision: PixtralVisionSpec) -> float:
        run = load_encoder(
            replace(spec, vision=vision), family.names(given), SafetensorsWeights(path), processor, torch.float32,
            torch.device("cpu"),
        ).encode(pixels)  # fmt: skip
        with torch.inference_mode(), pytest.raises(StopIteration) as done:
            while True:
                next(run)
        return float((done.value.value - rows).abs().max() / rows.abs().max())

    assert error(spec.vision) < 1e-5 and error(replace(spec.vision, **changed)) > 1e-2
    monkeypatch.setattr("engine.multimodal.grid_encoder.ROWS", 5)
    assert error(spec.vision) < 1e-5  # units leave no trace


def test_low_detail_has_fewer_tokens(
    checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("engine.multimodal.pixtral_processor.LOW_DETAIL_EDGE", 24)
    path = checkpoints["mistral"][1]
    processor = PixtralImageProcessor.load(path, read_json(path / "config.json"))
    low, high = [processor.process(picture(90, 50), lambda _: [], split=split) for split in (False, True)]
    assert (low.features, high.features) == (3 * 2, 9 * 5)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"image_processor_type": "Gemma3ImageProcessor"}, "image_processor_type"),
        ({"size": {"height": 72, "width": 72}}, "size is None; supported: {.longest_edge"),
        ({"do_center_crop": True}, "do_center_crop is True; supported: false"),
        ({"do_normalize": False}, "do_normalize"),
        ({"image_std": [0.5]}, "image_std"),
    ],
)
def test_processors_that_are_not_understood_are_refused(
    checkpoints: dict[str, Checkpoint], tmp_path: Path, changed: dict[str, Any], complaint: str
) -> None:
    path = pixtral.write(tmp_path, checkpoints["mistral"][0], processor={**pixtral.PROCESSOR, **changed})
    with pytest.raises(CheckpointError, match=complaint):
        PixtralImageProcessor.load(path, read_json(path / "config.json"))


def test_a_processor_of_other_squares_is_refused(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    path = pixtral.write(tmp_path, checkpoints["mistral"][0])
    (path / "processor_config.json").write_text(json.dumps({"patch_size": 4, "spatial_merge_size": 1}))
    with pytest.raises(CheckpointError, match="spatial_merge_size is 1; supported: 2, by config.json"):
        PixtralImageProcessor.load(path, read_json(path / "config.json"))


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2; supported: -1"),
        ({"image_token_index": 9999}, "image_token_index is 9999; supported: a token of the vocabulary"),
        ({"vision_config": {**pixtral.VISION, "num_attention_heads": 4}}, "num_attention_heads is 4; supported: heads"),
        ({"vision_config": {**pixtral.VISION, "head_dim": 16}}, "head_dim is 16; supported: 12"),
        ({"vision_config": {**pixtral.VISION, "model_type": "siglip"}}, "model_type is 'siglip'"),
        ({"vision_config": {**pixtral.VISION, "rope_parameters": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
    ],
)
def test_encoders_that_are_not_run_are_refused(
    checkpoints: dict[str, Checkpoint], changed: dict[str, Any], complaint: str
) -> None:
    given = {**read_json(checkpoints["mistral"][1] / "config.json"), **changed}
    with pytest.raises(CheckpointError, match=complaint):
        family_of(given).spec(given)


def test_an_encoder_is_never_quantised(checkpoints: dict[str, Checkpoint]) -> None:
    model, path = checkpoints["mistral"]
    spec = spec_of(path)
    vision = spec.vision
    assert vision is not None
    parts = model.model.vision_tower.transformer.modules()
    assert vision.parameters == sum(part.weight.numel() for part in parts if isinstance(part, torch.nn.Linear))
    whole, int8 = (loaded_bytes(path, spec, torch.bfloat16, kind) for kind in ("none", "int8"))
    text = whole - 2 * vision.parameters - 2 * 2 * spec.vocab_size * spec.hidden_size
    assert int8 == text // 2 + spec.vocab_size * spec.hidden_size * 3 + 2 * vision.parameters


async def test_the_cpus_own_layers_read_the_rows_of_images(tmp_path: Path) -> None:
    if cpu.library() is None:
        pytest.skip(f"no kernels in C++ here: {cpu.unavailable()}")
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 160}
    path = pixtral.write(tmp_path, pixtral.build(kind="mistral", text={**sizes, "head_dim": 32}))
    found = []
    for changed in ({"kernels": "torch"}, {"dtype": "bfloat16", "max_batch_tokens": 9}):
        async with await Engine.start(config(path, **changed)) as engine:
            tokens = await prompt(engine, ["See this, and that: ", "and", "What?"], [(40, 30), (90, 20)], 11)
            found.append(await logprobs(engine, tokens))
    assert engine.numerics.kernels != "torch"
    error = (found[0] - found[1])[~(found[0] + found[1]).isnan()].abs()
    assert len(error) > 200 and error.mean() < 0.08
