"""Images of Idefics3 and SmolVLM against transformers: processor to the bit, logits to 1e-3, however they are run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine import Engine
from engine.errors import CheckpointError
from engine.families import family_of
from engine.model.loader import SafetensorsWeights, read_json
from engine.model.model_spec import VisionSpec
from engine.multimodal.image_processor import ImageProcessor
from engine.multimodal.vision_encoder import VisionEncoder
from tests.engine.multimodal import seeing
from tests.engine.multimodal.seeing import (
    TOLERANCE,
    apart,
    chat,
    config,
    next_logprobs,
    picture,
    pictures,
    prompt,
    shown,
)
from tests.tiny import byte_tokenizer

SIZES = [(96, 40), (31, 77), (64, 64), (200, 150), (1, 1), (3000, 1), (1, 900), (30, 30), (65, 33)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    made = {}
    changed: dict[str, dict[str, Any]] = {"SmolVLM": {}, "Idefics3": {"image_size": 40, "hidden_act": "gelu"}}
    for family, vision in changed.items():
        model = seeing.build(family, **vision)
        made[family] = model, seeing.write(tmp_path_factory.mktemp("models") / family, model)
    return made


def reference_processor(split: bool = True) -> Any:
    """transformers' own, which needs no torchvision. Any: untyped."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(seeing.SPECIAL))
    settings = {**seeing.PROCESSOR, "do_image_splitting": split}
    del settings["image_processor_type"]
    images = transformers.Idefics3ImageProcessorPil(**settings)
    return transformers.Idefics3Processor(
        images, tokenizer, chat_template=seeing.TEMPLATE, image_seq_len=seeing.FEATURES
    )


def expected(model: Any, texts: Sequence[str], sizes: Sequence[tuple[int, int]]) -> tuple[list[int], torch.Tensor]:
    processor, seen = reference_processor(), pictures(sizes)
    text = processor.apply_chat_template(chat(texts, seen), add_generation_prompt=True, tokenize=False)
    inputs = processor(text=text, images=[seen], return_tensors="pt")
    with torch.no_grad():
        logits = model(**{name: inputs[name] for name in ("input_ids", "pixel_values", "pixel_attention_mask")}).logits
    return inputs["input_ids"][0].tolist(), logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_tiles_and_prompt_tokens_are_the_references(
    models: dict[str, tuple[Any, Path]], size: tuple[int, int], split: bool
) -> None:
    path = models["SmolVLM"][1]
    config = read_json(path / "config.json")
    image = picture(*size)
    theirs = reference_processor(split)(text="<image>", images=[[image]], return_tensors="np")
    encode = lambda text: byte_tokenizer(seeing.SPECIAL).encode(text).ids  # noqa: E731
    ours = ImageProcessor.load(path, config).process(image, encode, split=split)
    token = config["image_token_id"]
    assert shown(ours.token_ids, token) == theirs["input_ids"][0].tolist()
    tiles = np.frombuffer(ours.pixels, dtype=np.uint8).reshape(ours.tiles, ours.size, ours.size, 3)
    mean, std = np.array(seeing.PROCESSOR["image_mean"]), np.array(seeing.PROCESSOR["image_std"])
    normalised = ((tiles / 255 - mean) / std).transpose(0, 3, 1, 2)
    assert np.abs(normalised - theirs["pixel_values"][0]).max() < 1e-5


@pytest.fixture(params=["SmolVLM", "Idefics3"])
async def case(
    request: pytest.FixtureRequest, models: dict[str, tuple[Any, Path]]
) -> AsyncIterator[tuple[Any, Engine]]:
    model, path = models[request.param]
    async with await Engine.start(config(path)) as engine:
        yield model, engine


@pytest.mark.parametrize(
    "sizes", [[(96, 40)], [(31, 77), (200, 150)], pytest.param([(65, 33), (1, 1), (640, 480)], marks=pytest.mark.slow)]
)
async def test_logits_with_images_and_text_between(case: tuple[Any, Engine], sizes: list[tuple[int, int]]) -> None:
    model, engine = case
    texts = ["Look:", *[" and then text,"] * (len(sizes) - 1), " and then text, what is it?"]
    ids, reference = expected(model, texts, sizes)
    tokens = await prompt(engine, texts, sizes)
    assert shown(tokens, model.config.image_token_id) == ids
    assert await apart(engine, tokens, reference) < TOLERANCE


async def test_another_image_moves_the_logits(case: tuple[Any, Engine]) -> None:
    _, engine = case
    prompts = [await prompt(engine, ["See ", " here"], [(50, 40)], seed) for seed in range(2)]
    one, other = [dict((await next_logprobs(engine, tokens))[0]) for tokens in prompts]
    shared = one.keys() & other.keys()
    assert not shared or max(abs(one[each] - other[each]) for each in shared) > 1e-2


def test_units_leave_no_trace_in_the_bits(models: dict[str, tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = models["SmolVLM"]
    config = read_json(path / "config.json")
    family, processor = family_of(config), ImageProcessor.load(path, config)
    spec, names = family.spec(config), family.names(config)
    assert isinstance(spec.vision, VisionSpec)
    encoder = VisionEncoder(
        spec.vision, names, SafetensorsWeights(path), processor, spec.hidden_size, torch.float32, torch.device("cpu")
    )
    pixels = torch.randint(0, 256, (3, seeing.TILE, seeing.TILE, 3), dtype=torch.uint8)

    @torch.inference_mode()
    def encoded(some: torch.Tensor) -> tuple[torch.Tensor, int]:
        run, units = encoder.encode(some), 0
        while True:
            try:
                next(run)
                units += 1
            except StopIteration as done:
                return done.value, units

    whole, few = encoded(pixels)
    assert torch.equal(torch.cat([encoded(tile[None])[0] for tile in pixels]), whole)
    monkeypatch.setattr("engine.multimodal.vision_encoder.ROWS", 5)
    parts, many = encoded(pixels)
    assert many > few
    assert (parts - whole).abs().max() < 1e-5
    features = model.model.get_image_features(_normalised(pixels)[None]).pooler_output[0]
    assert (features - whole).abs().max() < 1e-4


def _normalised(pixels: torch.Tensor) -> torch.Tensor:
    mean, std = torch.tensor(seeing.PROCESSOR["image_mean"]), torch.tensor(seeing.PROCESSOR["image_std"])
    return ((pixels / 255 - mean) / std).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"image_processor_type": "Qwen2VLImageProcessor"}, "image_processor_type"),
        ({"do_normalize": False}, "do_normalize"),
        ({"max_image_size": {"longest_edge": 36}}, "max_image_size"),
        ({"size": {"height": 32, "width": 32}}, "size"),
        ({"image_mean": [0.5]}, "image_mean"),
    ],
)
def test_processors_that_are_not_understood_are_refused(
    models: dict[str, tuple[Any, Path]], tmp_path: Path, changed: dict[str, Any], complaint: str
) -> None:
    path = seeing.write(tmp_path, models["SmolVLM"][0], processor={**seeing.PROCESSOR, **changed})
    with pytest.raises(CheckpointError, match=complaint):
        ImageProcessor.load(path, read_json(path / "config.json"))


@pytest.mark.parametrize("changed", [{"activation": "silu"}, {"norm_eps": 3.0}, {"heads": 2}], ids=str)
def test_dropping_a_feature_of_the_encoder_breaks_parity(
    models: dict[str, tuple[Any, Path]], changed: dict[str, Any]
) -> None:
    model, path = models["Idefics3"]
    config = read_json(path / "config.json")
    family, processor = family_of(config), ImageProcessor.load(path, config)
    vision = family.spec(config).vision
    assert isinstance(vision, VisionSpec)
    size = (1, seeing.TILE, seeing.TILE, 3)
    pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    features = model.model.get_image_features(_normalised(pixels)[None]).pooler_output[0]

    def error(of: VisionSpec) -> float:
        encoder = VisionEncoder(
            of, family.names(config), SafetensorsWeights(path), processor, family.spec(config).hidden_size,
            torch.float32, torch.device("cpu"),
        )  # fmt: skip
        run = encoder.encode(pixels)
        with torch.inference_mode(), pytest.raises(StopIteration) as done:
            while True:
                next(run)
        return float((done.value.value - features).abs().max() / features.abs().max())

    assert error(vision) < 1e-4 and error(replace(vision, **changed)) > 1e-2
