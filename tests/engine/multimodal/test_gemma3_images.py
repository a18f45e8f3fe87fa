"""Images of Gemma 3 against transformers: prompt tokens and pixels to the bit, logits to 1e-3, however they are run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import Engine
from engine.errors import CheckpointError, ContextLengthExceeded
from engine.kernels import cpu
from engine.model.loader import read_json
from engine.model.memory import loaded_bytes, spec_of
from engine.multimodal.gemma3_processor import Gemma3ImageProcessor
from engine.multimodal.image_input import FIRST_IMAGE_ID
from tests.engine.multimodal import seeing_gemma3 as gemma
from tests.engine.multimodal.seeing import (
    TOLERANCE,
    answer,
    apart,
    chat,
    config,
    logprobs,
    picture,
    pictures,
    png,
    prompt,
    shown,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = gemma.build()
    return model, gemma.write(tmp_path_factory.mktemp("models") / "gemma3", model)


@pytest.fixture
async def engine(checkpoint: tuple[Any, Path]) -> AsyncIterator[Engine]:
    async with await Engine.start(config(checkpoint[1])) as engine:
        yield engine


def expected(
    model: Any, texts: Sequence[str], sizes: Sequence[tuple[int, int]], seed: int = 0
) -> tuple[list[int], torch.Tensor]:
    processor = gemma.reference_processor()
    seen = pictures(sizes, seed)
    text = processor.apply_chat_template(chat(texts, seen), add_generation_prompt=True, tokenize=False)
    inputs = processor(text=text, images=[seen], return_tensors="pt")
    with torch.no_grad():
        logits = model(**{name: value for name, value in inputs.items() if name != "num_crops"}).logits
    return inputs["input_ids"][0].tolist(), logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("size", [(96, 40), (31, 77), (64, 64), (1, 1), (900, 1)])
def test_the_square_and_its_tokens_are_the_references(checkpoint: tuple[Any, Path], size: tuple[int, int]) -> None:
    image = picture(*size)
    processor = Gemma3ImageProcessor.load(checkpoint[1], read_json(checkpoint[1] / "config.json"))
    ours = processor.process(image, lambda _: [])
    theirs = gemma.reference_processor()(text=gemma.BEGIN, images=[[image]], return_tensors="np")
    soft = checkpoint[0].config.image_token_id
    within = theirs["input_ids"][0].tolist()[1:-1]  # but for the new lines around them, which are text
    assert shown(ours.token_ids, soft) == within
    pixels = np.frombuffer(ours.pixels, dtype=np.uint8).reshape(ours.size, ours.size, 3)
    mean, std = np.array(gemma.PROCESSOR["image_mean"]), np.array(gemma.PROCESSOR["image_std"])
    normalised = ((pixels / 255 - mean) / std).transpose(2, 0, 1)
    assert np.abs(normalised - theirs["pixel_values"][0]).max() < 1e-5


@pytest.mark.parametrize(
    "changed",
    [{}, {"max_batch_tokens": 7}, {"max_batch_tokens": 24, "block_size": 32}, {"deterministic": True}],
    ids=str,
)
async def test_logits_are_the_references_in_chunks_of_any_size(
    checkpoint: tuple[Any, Path], changed: dict[str, object]
) -> None:
    model, path = checkpoint
    cases = [[(60, 41)], [(31, 77), (200, 150)], [(65, 33), (1, 1), (640, 480)]]
    async with await Engine.start(config(path, **changed)) as engine:
        for nth, sizes in enumerate(cases):
            texts = ["Look: ", *[f"and then number {at}, " for at in range(len(sizes) - 1)], "what is it?"]
            ids, reference = expected(model, texts, sizes, 10 * nth)
            tokens = await prompt(engine, texts, sizes, 10 * nth)
            assert shown(tokens, model.config.image_token_id) == ids
            assert await apart(engine, tokens, reference) < TOLERANCE


async def test_a_message_that_begins_with_an_image_has_the_references_tokens(
    checkpoint: tuple[Any, Path], engine: Engine
) -> None:
    ids, _ = expected(checkpoint[0], ["", "what?"], [(20, 30)])  # the new lines of both sides are one token
    tokens = await prompt(engine, ["", "what?"], [(20, 30)])
    assert shown(tokens, checkpoint[0].config.image_token_id) == ids


async def test_marks_that_a_user_writes_stand_for_no_image(engine: Engine) -> None:
    tokens = await prompt(engine, ["It says <start_of_image> and ", "<end_of_image>"], [(20, 30)])
    assert sum(token >= FIRST_IMAGE_ID for token in tokens) == gemma.FEATURES
    marks = [engine.tokenizer.token_id(mark) for mark in (gemma.BEGIN, gemma.END)]
    assert [tokens.count(mark) for mark in marks if mark is not None] == [1, 1]


@pytest.mark.parametrize("changed", [{}, {"max_batch_tokens": 9}], ids=str)
async def test_the_cpus_own_layers_attend_in_both_directions(tmp_path: Path, changed: dict[str, object]) -> None:
    if cpu.library() is None:
        pytest.skip(f"no kernels in C++ here: {cpu.unavailable()}")
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 160}
    path = gemma.write(tmp_path, gemma.build(text={**sizes, "head_dim": 32}))
    found = []
    for settings in ({"kernels": "torch"}, {"dtype": "bfloat16", **changed}):
        async with await Engine.start(config(path, **settings)) as engine:
            texts = ["See this, and that: 26 ...", "and", "What?"]  # the second lies on both sides of token 64
            tokens = await prompt(engine, texts, [(40, 30), (90, 20)], 11)
            found.append(await logprobs(engine, tokens))
    assert engine.numerics.kernels != "torch"
    error = (found[0] - found[1])[~(found[0] + found[1]).isnan()].abs()
    assert len(error) > 200 and error.mean() < 0.08  # 0.3 where they attend to earlier ones alone


async def test_more_images_than_the_context_holds_are_refused(checkpoint: tuple[Any, Path]) -> None:
    async with await Engine.start(config(checkpoint[1], max_model_len=100)) as engine:
        images = [await engine.image(png(20, 20, seed)) for seed in range(6)]
        with pytest.raises(ContextLengthExceeded, match="108 of them of 6 images; accepted: at most 99"):
            engine.tokenizer.encode_chat(chat(["a"] * 7, images), None, {}, max_tokens=100)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"image_processor_type": "SiglipImageProcessor"}, "image_processor_type"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan is True; supported: false"),
        ({"do_normalize": False}, "do_normalize"),
        ({"size": {"height": 32, "width": 32}}, "size is .* the size of the encoder's images"),
        ({"image_std": [0.5]}, "image_std"),
    ],
)
def test_processors_that_are_not_understood_are_refused(
    checkpoint: tuple[Any, Path], tmp_path: Path, changed: dict[str, Any], complaint: str
) -> None:
    path = gemma.write(tmp_path, checkpoint[0], processor={**gemma.PROCESSOR, **changed})
    with pytest.raises(CheckpointError, match=complaint):
        Gemma3ImageProcessor.load(path, read_json(path / "config.json"))


async def test_a_tokenizer_without_the_marks_is_refused(tmp_path: Path, checkpoint: tuple[Any, Path]) -> None:
    path = gemma.write(tmp_path, checkpoint[0])
    settings = (path / "config.json").read_text().replace('"boi_token_index": 256', '"boi_token_index": 9')
    (path / "config.json").write_text(settings)
    with pytest.raises(CheckpointError, match="of <start_of_image> is 9 in config.json, and 256 in the tokenizer"):
        await Engine.start(config(path))


@pytest.mark.slow
async def test_on_several_ranks_the_text_is_read(checkpoint: tuple[Any, Path]) -> None:
    found = []
    for ranks in (1, 2):
        async with await Engine.start(config(checkpoint[1], tensor_parallel_size=ranks)) as engine:
            assert (engine.image_processor is None) == (ranks > 1)
            found.append(await answer(engine, engine.tokenizer.encode("Only text")))
    assert found[0] == found[1]


async def test_the_start_says_what_an_encoder_takes(
    checkpoint: tuple[Any, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "engine.builder"):
        async with await Engine.start(config(checkpoint[1], encoder_cache_bytes=3_000_000)):
            pass
    assert "gemma3 reads images: the encoder takes 0 MB, and its results up to 3 MB" in caplog.text


def test_an_encoder_is_never_quantised(checkpoint: tuple[Any, Path]) -> None:
    spec = spec_of(checkpoint[1])
    vision = spec.vision
    assert vision is not None
    parts = checkpoint[0].model.vision_tower.encoder.modules()
    assert vision.parameters == sum(part.weight.numel() for part in parts if isinstance(part, torch.nn.Linear))
    whole, int8 = (loaded_bytes(checkpoint[1], spec, torch.bfloat16, kind) for kind in ("none", "int8"))
    text = whole - 2 * vision.parameters - 2 * spec.vocab_size * spec.hidden_size
    assert int8 == text // 2 + spec.vocab_size * spec.hidden_size * 3 + 2 * vision.parameters
