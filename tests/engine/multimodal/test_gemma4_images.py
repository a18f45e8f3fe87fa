"""Images of Gemma 4 against transformers: pixels to the bit, logits to 1e-3, however they are run."""

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
from transformers.models.gemma4.processing_gemma4 import get_aspect_ratio_preserving_size

from engine import GREEDY, Engine, Span
from engine.errors import CheckpointError
from engine.families import family_of
from engine.kernels import cpu
from engine.model.loader import SafetensorsWeights, read_json
from engine.model.memory import loaded_bytes, spec_of
from engine.model.model_spec import ModelSpec, PooledVisionSpec
from engine.multimodal.gemma4_encoder import Gemma4Encoder
from engine.multimodal.gemma4_processor import SOFT_TOKENS, Gemma4ImageProcessor
from tests.engine.multimodal import seeing_gemma4 as gemma
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

PUBLISHED = Gemma4ImageProcessor(48, 280, 258_880, 255_999, 258_882, 3, 1 / 255, (0.5,) * 3, (0.5,) * 3, True)
Checkpoint = tuple[Any, Path]  # Any: a model of transformers


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    made = {}
    for kind in ("small", "large"):
        model = gemma.build(large=kind == "large")
        made[kind] = model, gemma.write(tmp_path_factory.mktemp("models") / kind, model)
    return made


@pytest.fixture(params=["small", "large"])
def checkpoint(request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint]) -> Checkpoint:
    return checkpoints[request.param]


@pytest.fixture
async def engine(checkpoint: Checkpoint) -> AsyncIterator[Engine]:
    async with await Engine.start(config(checkpoint[1])) as engine:
        yield engine


def expected(
    model: Any, tokens: Sequence[int], sizes: Sequence[tuple[int, int]], seed: int = 0, **changed: Any
) -> torch.Tensor:
    """transformers' log-probabilities after each token; it checks their number against the pictures'. `changed` are
    settings of its processor."""
    seen = gemma.reference_processor(**changed)(images=pictures(sizes, seed), return_tensors="pt")
    ids = torch.tensor([shown(tokens, model.config.image_token_id)])
    kinds = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(
            input_ids=ids, mm_token_type_ids=kinds, pixel_values=seen["pixel_values"],
            image_position_ids=seen["image_position_ids"],
        ).logits  # fmt: skip
    return logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("size", [(96, 40), (31, 77), (64, 64), (1, 1), (900, 1), (1, 60), (300, 200), (80, 56)])
def test_pixels_and_their_number_are_the_references(checkpoints: dict[str, Checkpoint], size: tuple[int, int]) -> None:
    path, image = checkpoints["small"][1], picture(*size)
    ours = Gemma4ImageProcessor.load(path, read_json(path / "config.json")).process(image, lambda _: [])
    theirs = gemma.reference_processor()(images=[image], return_tensors="np")
    strips = np.frombuffer(ours.pixels, dtype=np.uint8).reshape(ours.tiles, gemma.SQUARE, -1, 3)
    assert ours.features == theirs["num_soft_tokens_per_image"][0] <= gemma.TOKENS
    begin, end = (read_json(path / "config.json")[mark] for mark in ("boi_token_id", "eoi_token_id"))
    assert shown(ours.token_ids, 0) == [begin, *[0] * ours.features, end]
    patches = (strips / 255).reshape(2 * ours.tiles, 4, -1, 4, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 48)
    assert np.abs(patches - theirs["pixel_values"][0][: len(patches)]).max() < 1e-6
    last = theirs["image_position_ids"][0][len(patches) - 1]
    assert last.tolist() == [strips.shape[2] // 4 - 1, 2 * ours.tiles - 1]


@pytest.mark.parametrize(
    "changed",
    [{}, {"max_batch_tokens": 7}, {"max_batch_tokens": 90, "block_size": 32}, {"deterministic": True}],
    ids=str,
)
async def test_logits_are_the_references_in_chunks_of_any_size(
    checkpoint: Checkpoint, changed: dict[str, object]
) -> None:
    model, path = checkpoint
    cases = [[(60, 41)], [(31, 77), (200, 150)], [(65, 33), (1, 1), (640, 480)]]
    async with await Engine.start(config(path, **changed)) as engine:
        for nth, sizes in enumerate(cases):
            texts = ["Look: ", *[f"and then number {at}, " for at in range(len(sizes) - 1)], "what is it?"]
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


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("small", {"pad_token_id": 9}),  # whose inputs of each layer an image's tokens have
        ("large", {"use_bidirectional_attention": None}),
    ],
)
async def test_another_setting_of_the_text_moves_the_logits(
    checkpoints: dict[str, Checkpoint], tmp_path: Path, kind: str, changed: dict[str, Any]
) -> None:
    model = checkpoints[kind][0]
    path = gemma.write(tmp_path, model)
    settings = dict(read_json(path / "config.json"))
    settings["text_config"] = {**settings["text_config"], **changed}
    (path / "config.json").write_text(json.dumps(settings))
    async with await Engine.start(config(path)) as engine:
        tokens = await prompt(engine, ["See ", "so?"], [(50, 31)])
        assert await apart(engine, tokens, expected(model, tokens, [(50, 31)])) > 1e-2


async def test_tokens_of_an_image_attend_to_each_other_in_windows_alone(
    checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = checkpoints["large"]
    monkeypatch.setattr(ModelSpec, "windowed_images", False)
    async with await Engine.start(config(path)) as engine:
        tokens = await prompt(engine, ["See ", "so?"], [(50, 31)])
        assert await apart(engine, tokens, expected(model, tokens, [(50, 31)])) > 1e-2


@pytest.mark.parametrize("sliding_window", [90, 600], ids=["an image is shorter", "all is shorter"])
async def test_a_window_that_hides_nothing_lets_an_image_attend(tmp_path: Path, sliding_window: int) -> None:
    model = gemma.build(large=True, text={"sliding_window": sliding_window, "global_head_dim": 12})
    async with await Engine.start(config(gemma.write(tmp_path, model))) as engine:
        tokens = await prompt(engine, ["See ", "so?"], [(50, 31)])
        assert await apart(engine, tokens, expected(model, tokens, [(50, 31)])) < TOLERANCE


async def test_marks_that_a_user_writes_stand_for_no_image(engine: Engine) -> None:
    tokens = await prompt(engine, ["It says <|image|> and <|image>", "<image|> then"], [(20, 30)])
    marks = [engine.tokenizer.token_id(mark) for mark in (gemma.BEGIN, gemma.END, gemma.IMAGE)]
    assert [tokens.count(mark) for mark in marks if mark is not None] == [1, 1, 0]


def encoded(path: Path, image: Any, vision: PooledVisionSpec) -> torch.Tensor:
    """The rows of a picture by an encoder of another description. Any: Pillow's picture."""
    settings = read_json(path / "config.json")
    family, processor = family_of(settings), Gemma4ImageProcessor.load(path, settings)
    made = processor.process(image, lambda _: [])
    pixels = torch.frombuffer(bytearray(made.pixels), dtype=torch.uint8).view(made.tiles, made.size, -1, 3)
    hidden = family.spec(settings).hidden_size
    weights = SafetensorsWeights(path)
    run = Gemma4Encoder(
        vision, family.names(settings), weights, processor, hidden, torch.float32, torch.device("cpu")
    ).encode(pixels)
    with torch.inference_mode(), pytest.raises(StopIteration) as done:
        while True:
            next(run)
    rows: torch.Tensor = done.value.value
    return rows


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("small", {"clipped": False}),
        ("large", {"standardized": False}),
        *(("large", {"activation": "silu"}), ("small", {"norm_eps": 0.3}), ("large", {"theta": 1e4})),
    ],
    ids=str,
)
def test_dropping_a_feature_of_the_encoder_breaks_parity(
    checkpoints: dict[str, Checkpoint], kind: str, changed: dict[str, Any]
) -> None:
    model, path = checkpoints[kind]
    vision, image = spec_of(path).vision, picture(61, 40)
    assert isinstance(vision, PooledVisionSpec)
    seen = gemma.reference_processor()(images=[image], return_tensors="pt")
    with torch.no_grad():
        (rows,) = model.model.get_image_features(seen["pixel_values"], seen["image_position_ids"]).pooler_output

    def error(of: PooledVisionSpec) -> float:
        return float((encoded(path, image, of) - rows).abs().max() / rows.abs().max())

    assert error(vision) < 1e-5 and error(replace(vision, **changed)) > 1e-2


def test_units_leave_no_trace_in_the_rows(
    checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    path = checkpoints["large"][1]
    vision, image = spec_of(path).vision, picture(61, 40)
    assert isinstance(vision, PooledVisionSpec)
    whole = encoded(path, image, vision)
    monkeypatch.setattr("engine.multimodal.grid_encoder.ROWS", 5)
    assert (encoded(path, image, vision) - whole).abs().max() < 1e-5


@tried(max_examples=300)
@given(st.integers(1, 65_500), st.integers(1, 65_500), st.sampled_from(SOFT_TOKENS))
def test_published_processors_have_the_references_squares(width: int, height: int, tokens: int) -> None:
    processor = replace(PUBLISHED, max_tokens=tokens)
    high, wide = get_aspect_ratio_preserving_size(height, width, 16, 9 * tokens, 3)
    assert processor.tile == 48 and processor._squares(width, height, tokens) == (high // 48, wide // 48)


def test_low_detail_has_at_most_70_tokens(tmp_path: Path) -> None:
    larger = {**gemma.PROCESSOR, "max_soft_tokens": 280}
    path = gemma.write(tmp_path, gemma.build(position_embedding_size=1000), processor=larger)
    processor = Gemma4ImageProcessor.load(path, read_json(path / "config.json"))
    low, high = [processor.process(picture(90, 50), lambda _: [], split=split) for split in (False, True)]
    assert 50 < low.features <= 70 and 200 < high.features <= 280


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"image_processor_type": "Gemma3ImageProcessor"}, "image_processor_type"),
        ({"patch_size": 16}, "patch_size is 16; supported: 4, by config.json"),
        ({"pooling_kernel_size": 3}, "pooling_kernel_size is 3; supported: 2, by config.json"),
        ({"max_soft_tokens": 71}, "max_soft_tokens is 71; supported: 70"),
        ({"max_soft_tokens": 140}, "max_soft_tokens is 140; supported: 70"),  # the encoder has 140 positions
        ({"do_resize": False}, "do_resize"),
        ({"do_normalize": True, "image_std": [0.5]}, "image_std"),
    ],
)
def test_processors_that_are_not_understood_are_refused(
    checkpoints: dict[str, Checkpoint], tmp_path: Path, changed: dict[str, Any], complaint: str
) -> None:
    path = gemma.write(tmp_path, checkpoints["small"][0], processor={**gemma.PROCESSOR, **changed})
    with pytest.raises(CheckpointError, match=complaint):
        Gemma4ImageProcessor.load(path, read_json(path / "config.json"))


async def test_a_processor_that_normalises_is_followed(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    model = checkpoints["small"][0]
    changed: dict[str, Any] = {"do_normalize": True, "image_mean": [0.5, 0.45, 0.4], "image_std": [0.5, 0.3, 0.25]}
    path = gemma.write(tmp_path, model, processor={**gemma.PROCESSOR, **changed})
    async with await Engine.start(config(path)) as engine:
        tokens = await prompt(engine, ["See ", "so?"], [(50, 31)])
        assert await apart(engine, tokens, expected(model, tokens, [(50, 31)], **changed)) < TOLERANCE


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"vision_config": {**gemma.VISION, "num_key_value_heads": 2}}, "num_key_value_heads is 2; supported: a div"),
        ({"vision_config": {**gemma.VISION, "head_dim": 10}}, "head_dim is 10; supported: a multiple of 4"),
        ({"vision_config": {**gemma.VISION, "attention_bias": True}}, "attention_bias is True; supported: False"),
        ({"vision_config": {**gemma.VISION, "model_type": "siglip"}}, "model_type is 'siglip'"),
        ({"vision_config": {**gemma.VISION, "rope_parameters": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
    ],
)
def test_encoders_that_are_not_run_are_refused(
    checkpoints: dict[str, Checkpoint], changed: dict[str, Any], complaint: str
) -> None:
    settings = {**read_json(checkpoints["small"][1] / "config.json"), **changed}
    with pytest.raises(CheckpointError, match=complaint):
        family_of(settings).spec(settings)


def test_a_padding_token_outside_the_vocabulary_is_refused(checkpoints: dict[str, Checkpoint]) -> None:
    settings = read_json(checkpoints["small"][1] / "config.json")
    settings["text_config"]["pad_token_id"] = 9999
    with pytest.raises(CheckpointError, match="pad_token_id is 9999; supported: a token of the vocabulary"):
        family_of(settings).spec(settings)


async def test_a_tokenizer_without_the_marks_is_refused(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    path = gemma.write(tmp_path, checkpoints["small"][0])
    settings = {**read_json(path / "config.json"), "eoi_token_id": 9}
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"of <image\|> is 9 in config.json, and 257 in the tokenizer"):
        await Engine.start(config(path))


def test_an_encoder_is_never_quantised(checkpoints: dict[str, Checkpoint]) -> None:
    model, path = checkpoints["large"]
    spec = spec_of(path)
    vision = spec.vision
    assert vision is not None
    parts = model.model.vision_tower.encoder.modules()
    assert vision.parameters == sum(part.weight.numel() for part in parts if isinstance(part, torch.nn.Linear))
    whole, int8 = (loaded_bytes(path, spec, torch.bfloat16, kind) for kind in ("none", "int8"))
    text = whole - 2 * vision.parameters - 2 * spec.vocab_size * spec.hidden_size
    assert int8 == text // 2 + spec.vocab_size * spec.hidden_size * 3 + 2 * vision.parameters


async def test_the_kernels_products_read_images_too(tmp_path: Path) -> None:
    if cpu.library() is None:
        pytest.skip(f"no kernels in C++ here: {cpu.unavailable()}")
    sizes = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "global_head_dim": 32}
    path = gemma.write(tmp_path, gemma.build(large=True, text=sizes))
    found = []
    for changed in ({"kernels": "torch"}, {"dtype": "bfloat16", "max_batch_tokens": 9}):
        async with await Engine.start(config(path, **changed)) as engine:
            tokens = await prompt(engine, ["See this, and that: ", "and", "What?"], [(40, 30), (90, 20)], 11)
            found.append(await logprobs(engine, tokens))
    error = (found[0] - found[1])[~(found[0] + found[1]).isnan()].abs()
    assert len(error) > 200 and error.mean() < 0.15
