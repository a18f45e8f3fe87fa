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
from PIL import Image

from engine import GREEDY, Engine, EngineConfig, Span
from engine.errors import CheckpointError
from engine.families import family_of
from engine.model.loader import SafetensorsWeights, read_json
from engine.model.model_spec import VisionSpec
from engine.multimodal.image_input import FIRST_IMAGE_ID, ImageInput
from engine.multimodal.image_processor import ImageProcessor
from engine.multimodal.vision_encoder import VisionEncoder
from tests.engine.multimodal import seeing
from tests.engine.multimodal.seeing import picture, png
from tests.tiny import byte_tokenizer

SIZES = [(96, 40), (31, 77), (64, 64), (200, 150), (1, 1), (3000, 1), (1, 900), (30, 30), (65, 33)]
TOLERANCE = 1e-3


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
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=seeing.FEATURES)


def expected_logits(model: Any, processor: Any, text: str, images: Sequence[Image.Image]) -> tuple[list[int], Any]:
    inputs = processor(text=text, images=[list(images)], return_tensors="pt")
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
    assert [token if id >= FIRST_IMAGE_ID else id for id in ours.token_ids] == theirs["input_ids"][0].tolist()
    tiles = np.frombuffer(ours.pixels, dtype=np.uint8).reshape(ours.tiles, ours.size, ours.size, 3)
    mean, std = np.array(seeing.PROCESSOR["image_mean"]), np.array(seeing.PROCESSOR["image_std"])
    normalised = ((tiles / 255 - mean) / std).transpose(0, 3, 1, 2)
    assert np.abs(normalised - theirs["pixel_values"][0]).max() < 1e-5


@pytest.fixture(params=["SmolVLM", "Idefics3"])
async def case(
    request: pytest.FixtureRequest, models: dict[str, tuple[Any, Path]]
) -> AsyncIterator[tuple[Any, Engine]]:
    model, path = models[request.param]
    async with await Engine.start(EngineConfig(str(path), dtype="float32", kv_blocks=256)) as engine:
        yield model, engine


async def prompt_of(engine: Engine, text: str, images: Sequence[bytes]) -> tuple[list[int], list[ImageInput]]:
    """The tokens of a text whose images are marked, and the images, which have to be kept."""
    known = [await engine.image(each) for each in images]
    parts = text.split("<image>")
    tokens = engine.tokenizer.encode(parts[0], special=True)
    for part, image in zip(parts[1:], known, strict=True):
        tokens += [*image.token_ids, *engine.tokenizer.encode(part, special=True)]
    return tokens, known


async def logprobs(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary after each token but the last."""
    async with await engine.open(tokens) as seq:
        out = await seq.generate_all(Span(GREEDY, max_tokens=1, prompt_logprobs=8, ignore_eos=True))
    found = torch.full((len(tokens) - 1, engine.vocab_size), torch.nan)
    assert out.prompt_logprobs is not None
    for at, each in enumerate(out.prompt_logprobs[1:]):
        for token, value in () if each is None else each.top:
            found[at, token] = value
    return found


@pytest.mark.parametrize(
    "sizes", [[(96, 40)], [(31, 77), (200, 150)], pytest.param([(65, 33), (1, 1), (640, 480)], marks=pytest.mark.slow)]
)
async def test_logits_with_images_and_text_between(case: tuple[Any, Engine], sizes: list[tuple[int, int]]) -> None:
    model, engine = case
    text = "Look:" + "<image> and then text,".join([""] * (len(sizes) + 1)) + " what is it?"
    ids, expected = expected_logits(
        model, reference_processor(), text, [picture(*s, seed=i) for i, s in enumerate(sizes)]
    )
    tokens, kept = await prompt_of(engine, text, [png(*s, seed=i) for i, s in enumerate(sizes)])
    assert len(kept) == len(sizes)
    token = model.config.image_token_id
    assert [token if id >= FIRST_IMAGE_ID else id for id in tokens] == ids
    found = await logprobs(engine, tokens)
    known = ~found.isnan()
    assert known.sum() >= 8 * sum(token < FIRST_IMAGE_ID for token in tokens[1:])
    assert (found - expected[:-1])[known].abs().max() < TOLERANCE


async def test_another_image_moves_the_logits(case: tuple[Any, Engine]) -> None:
    _, engine = case
    texts = []
    for seed in range(2):
        tokens, _kept = await prompt_of(engine, "See <image> here", [png(50, 40, seed)])
        async with await engine.open(tokens) as seq:
            out = await seq.generate_all(Span(GREEDY, max_tokens=1, logprobs=5, ignore_eos=True))
        texts.append(dict(out.logprobs[0].top))
    shared = texts[0].keys() & texts[1].keys()
    assert not shared or max(abs(texts[0][each] - texts[1][each]) for each in shared) > 1e-2


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
