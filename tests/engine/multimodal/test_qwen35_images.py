"""Images of Qwen3.5 against transformers: pixels to the bit, logits to 1e-3 at positions of rows and columns, however
they are run."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import GREEDY, Engine, Span
from engine.core.step import Row
from engine.errors import CheckpointError, InvalidImage
from engine.families import family_of
from engine.model.batch import Batch
from engine.model.loader import read_json
from engine.multimodal.image_input import ImageSpans, placeholder
from engine.multimodal.qwen3_5_processor import Qwen35ImageProcessor
from engine.speculation.mtp import MTP
from tests.engine.multimodal import seeing_qwen35 as qwen
from tests.engine.multimodal.seeing import TOLERANCE, apart, config, picture, pictures, png, prompt, shown


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = qwen.build()
    return model, qwen.write(tmp_path_factory.mktemp("models") / "qwen3_5", model)


@pytest.fixture
async def engine(checkpoint: tuple[Any, Path]) -> AsyncIterator[Engine]:
    async with await Engine.start(config(checkpoint[1])) as engine:
        yield engine


def expected(model: Any, tokens: Sequence[int], sizes: Sequence[tuple[int, int]], seed: int = 0) -> torch.Tensor:
    """transformers' log-probabilities after each token; it checks their number against the pictures'."""
    seen = qwen.reference_processor()(images=pictures(sizes, seed), return_tensors="pt")
    pad = model.config.image_token_id
    ids = torch.tensor([shown(tokens, pad)])
    model.model.rope_deltas = None
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=(ids == pad).int(), **seen).logits
    return logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("size", [(96, 40), (31, 77), (64, 64), (9, 1), (100, 3), (8, 8), (300, 200)])
def test_pixels_and_their_number_are_the_references(checkpoint: tuple[Any, Path], size: tuple[int, int]) -> None:
    image = picture(*size)
    processor = Qwen35ImageProcessor.load(checkpoint[1], read_json(checkpoint[1] / "config.json"))
    ours = processor.process(image, lambda _: [])
    theirs = qwen.reference_processor()(images=[image], return_tensors="np")
    grid = theirs["image_grid_thw"][0].tolist()
    strips = np.frombuffer(ours.pixels, dtype=np.uint8).reshape(ours.tiles, ours.size, -1, 3)
    assert grid == [1, 2 * ours.tiles, strips.shape[2] // 4] and ours.features == grid[1] * grid[2] // 4
    assert len(ours.token_ids) == ours.features
    mean, std = np.array(qwen.PROCESSOR["image_mean"]), np.array(qwen.PROCESSOR["image_std"])
    normalised = (strips / 255 - mean) / std
    patches = normalised.reshape(ours.tiles, 2, 4, -1, 2, 4, 3).transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, 16)
    assert np.abs(patches.repeat(2, 2).reshape(len(patches), -1) - theirs["pixel_values"]).max() < 1e-5


@pytest.mark.parametrize(
    "changed",
    [{}, {"max_batch_tokens": 7}, {"max_batch_tokens": 50, "block_size": 32}, {"deterministic": True}],
    ids=str,
)
async def test_logits_are_the_references_in_chunks_of_any_size(
    checkpoint: tuple[Any, Path], changed: dict[str, object]
) -> None:
    model, path = checkpoint
    cases = [[(60, 41)], [(31, 77), (20, 15)], [(65, 33), (9, 1), (64, 48)]]
    async with await Engine.start(config(path, **changed)) as engine:
        for nth, sizes in enumerate(cases):
            texts = ["Look: ", *[" and then, " * (at % 2) for at in range(len(sizes) - 1)], "what is it?"]
            tokens = await prompt(engine, texts, sizes, 10 * nth)
            assert await apart(engine, tokens, expected(model, tokens, sizes, 10 * nth)) < TOLERANCE


async def test_generated_tokens_are_at_the_references_positions(checkpoint: tuple[Any, Path], engine: Engine) -> None:
    sizes = [(60, 41), (15, 30)]
    tokens = await prompt(engine, ["See ", "and ", "so:"], sizes)
    async with await engine.open(tokens) as seq:
        out = await seq.generate_all(Span(GREEDY, max_tokens=20, logprobs=8, ignore_eos=True))
    reference = expected(checkpoint[0], [*tokens, *out.token_ids], sizes)
    for at, each in enumerate(out.logprobs):
        for token, value in each.top:
            assert abs(reference[len(tokens) - 1 + at, token] - value) < TOLERANCE


@pytest.mark.slow
async def test_a_mixture_reads_images(tmp_path: Path) -> None:
    model = qwen.build(mixture=True)
    async with await Engine.start(config(qwen.write(tmp_path, model))) as engine:
        tokens = await prompt(engine, ["See ", "so?"], [(50, 31)])
        assert await apart(engine, tokens, expected(model, tokens, [(50, 31)])) < TOLERANCE


async def test_a_picture_of_another_shape_with_the_same_bytes_is_another(engine: Engine) -> None:
    processor = engine.image_processor
    assert processor is not None
    wide, high = [
        processor.process(picture(1, 1).resize(size), engine.tokenizer.encode) for size in ((64, 32), (32, 64))
    ]
    assert wide.pixels == high.pixels and wide.digest != high.digest and wide.token_ids != high.token_ids


async def test_low_detail_has_fewer_tokens(checkpoint: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.multimodal.qwen3_5_processor.LOW_DETAIL_PIXELS", 640)
    processor = Qwen35ImageProcessor.load(checkpoint[1], read_json(checkpoint[1] / "config.json"))
    low, high = [processor.process(picture(90, 50), lambda _: [], split=split) for split in (False, True)]
    assert low.features <= 640 // qwen.SQUARE**2 < high.features <= 2560 // qwen.SQUARE**2


async def test_a_picture_that_is_too_long_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidImage, match="201 x 1 pixels; accepted: of one edge at most 200 times the other"):
        await engine.image(png(201, 1))


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"image_processor_type": "SiglipImageProcessor"}, "image_processor_type"),
        ({"patch_size": 14}, "patch_size is 14; supported: 4, by config.json"),
        ({"do_resize": False}, "do_resize"),
        ({"size": {"shortest_edge": 256, "longest_edge": 20}}, "at least 256 pixels in the largest"),
        ({"size": [3, 4]}, "size"),
        ({"image_std": [0.5]}, "image_std"),
    ],
)
def test_processors_that_are_not_understood_are_refused(
    checkpoint: tuple[Any, Path], tmp_path: Path, changed: dict[str, Any], complaint: str
) -> None:
    path = qwen.write(tmp_path, checkpoint[0], processor={**qwen.PROCESSOR, **changed})
    with pytest.raises(CheckpointError, match=complaint):
        Qwen35ImageProcessor.load(path, read_json(path / "config.json"))


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"vision_config": {**qwen.VISION, "out_hidden_size": 7}}, "out_hidden_size is 7; supported: 48"),
        ({"vision_config": {**qwen.VISION, "deepstack_visual_indexes": [1]}}, "deepstack_visual_indexes"),
        ({"vision_config": {**qwen.VISION, "num_position_embeddings": 7}}, "num_position_embeddings is 7"),
        ({"vision_config": {**qwen.VISION, "num_heads": 4}}, "num_heads is 4; supported: heads of a multiple of 4"),
    ],
)
def test_encoders_that_are_not_run_are_refused(
    checkpoint: tuple[Any, Path], changed: dict[str, Any], complaint: str
) -> None:
    settings = {**read_json(checkpoint[1] / "config.json"), **changed}
    with pytest.raises(CheckpointError, match=complaint):
        family_of(settings).spec(settings)


async def test_positions_count_rows_and_columns(engine: Engine) -> None:
    image = await engine.image(png(32, 16))  # 2 rows of 4
    other = await engine.image(png(16, 16, 1))
    ids = image.token_ids
    assert (image.tiles, len(ids), other.tiles, len(other.token_ids)) == (2, 8, 2, 4)

    async def positions(tokens: list[int]) -> list[list[int]]:
        async with await engine.open(tokens):
            await engine.stats()
            core = engine._core
            seq = next(each for each in core._sequences.values() if each.tokens == tokens)
            found = core._images.rotary([Row(seq, 0, len(tokens), 0)], np.arange(len(tokens)), [0, len(tokens)])
            assert found is not None
            return found.tolist()

    assert await positions([1, 1, *ids, 1, *other.token_ids, 1]) == [
        [0, 1, *[2] * 8, 6, *[7] * 4, 9],
        [0, 1, *[2] * 4, *[3] * 4, 6, 7, 7, 8, 8, 9],
        [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7, 8, 7, 8, 9],
    ]
    part, twice = await positions([1, *ids[3:6], 1]), await positions([*ids, *ids])
    assert part == [[0, 1, 1, 1, 5], [0, 1, 2, 2, 5], [0, 4, 1, 2, 5]]
    assert twice[1] == [*[0] * 4, *[1] * 4, *[4] * 4, *[5] * 4] and twice[2] == [*[0, 1, 2, 3] * 2, *[4, 5, 6, 7] * 2]


def test_spans_are_the_same_however_a_sequence_grew() -> None:
    one, other = ([placeholder(bytes([seed] * 18), at) for at in range(6)] for seed in (1, 2))
    tokens = [5, *one, *other, 6, *one, 7]
    grown = ImageSpans()
    for end in (0, 3, 4, 9, len(tokens)):
        grown.among(tokens[:end])
    assert grown.among(tokens) == [(1, 7), (7, 13), (14, 20)]
    for cut in range(len(tokens)):
        grown.among(tokens)
        grown.cut(cut)
        assert grown.among([*tokens[:cut], *other]) == ImageSpans().among([*tokens[:cut], *other])
        grown.cut(cut)


async def test_drafts_of_multi_token_prediction_rotate_as_the_text_behind_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = qwen.write(tmp_path, qwen.build())
    add_mtp(path)
    batches: list[tuple[list[int], list[int]]] = []
    made = MTP._batch

    def batched(self: MTP, drafting: Any) -> Batch:  # of `_Drafting`
        batch = made(self, drafting)
        batches.append((batch.positions.tolist(), [] if batch.rotary is None else batch.rotary[0].tolist()))
        return batch

    monkeypatch.setattr(MTP, "_batch", batched)
    answers = []
    for proposer in ("off", "mtp"):
        async with await Engine.start(config(path, speculation=proposer)) as engine:
            tokens = await prompt(engine, ["See ", "so?"], [(64, 32)])  # 4 rows of 8: a token is 24 behind its place
            async with await engine.open(tokens) as seq:
                answers.append((await seq.generate_all(Span(GREEDY, max_tokens=30, ignore_eos=True))).token_ids)
    assert answers[0] == answers[1] and batches
    assert all(turned == [at - 24 for at in places] for places, turned in batches)


def add_mtp(path: Path) -> None:
    """Adds a layer of multi-token prediction to a written model: its own attending layer, and projections of noise."""
    stored = load_file(path / "model.safetensors")
    own = "model.language_model.layers.1."
    hidden = stored["model.language_model.norm.weight"].shape[0]
    draw = torch.Generator().manual_seed(5)
    parts = {
        "mtp.fc.weight": torch.randn(hidden, 2 * hidden, generator=draw) / hidden**0.5,
        "mtp.pre_fc_norm_embedding.weight": torch.randn(hidden, generator=draw) * 0.35,
        "mtp.pre_fc_norm_hidden.weight": torch.randn(hidden, generator=draw) * 0.35,
        "mtp.norm.weight": stored["model.language_model.norm.weight"],
        **{name.replace(own, "mtp.layers.0."): each for name, each in stored.items() if name.startswith(own)},
    }
    whole = {**stored, **{name: each.clone() for name, each in parts.items()}}
    save_file(whole, path / "model.safetensors", {"format": "pt"})
    settings = json.loads((path / "config.json").read_text())
    settings["text_config"] |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    (path / "config.json").write_text(json.dumps(settings))
