"""Quantised directories: loaded by the engine, resumed to the same bytes, near the original; and refusals."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import CheckpointError, EngineError, InvalidParameter
from engine.model.decoder import load_decoder
from engine.model.quantization.checkpoint import open_weights
from engine.model.quantization.divergence import measure
from engine.model.quantization.layerwise import LayerwiseModel, projections
from engine.model.quantization.quantize import LayerDone, Recipe, quantize
from tests.engine.model import tiny
from tests.engine.model.quantization.test_equalization import WIDTHS
from tests.engine.model.stepping import Stepper, apart

pytestmark = pytest.mark.slow

FAMILIES = (
    "cohere2",
    "llama_biased",
    "qwen2",
    "qwen3",
    "smollm3",
    "phi3",
    "gemma2",
    "gemma3",
    "granite",
    "olmo2",
    "lfm2",
)
RECIPES = (
    *(Recipe("int8", method) for method in ("rtn", "gptq", "awq", "smoothquant")),
    *(Recipe("int4", method, 32) for method in ("rtn", "gptq", "awq")),
    Recipe("int4", "gptq", 64, act_order=True),
)


def texts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(3, 380) for _ in range(length)] for _ in range(count)]


CALIBRATION, HELD_OUT = texts(36, 60), texts(10, 60, seed=1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name -> directory in bfloat16, made at most once. Any: an lru_cache wrapper."""

    def make(name: str) -> Path:
        config, model, overrides = tiny.MODELS[name]
        made = tiny.build(config, model, {**overrides, **WIDTHS})
        return tiny.save(made.to(torch.bfloat16), tmp_path_factory.mktemp(name))

    return lru_cache(maxsize=None)(make)


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_of_every_family_is_rounded_and_the_rest_is_as_it_was(
    family: str, checkpoints: Any, tmp_path: Path
) -> None:
    source = checkpoints(family)
    quantize(source, tmp_path, Recipe("int8", "gptq"), CALIBRATION)
    model = LayerwiseModel(source)
    parts = [projections(model.spec, model.names, at) for at in range(model.spec.layers)]
    names = {part.name for each in parts for linear in each.values() for part in linear}
    before = load_file(source / "model.safetensors")
    after = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    matrices = {
        name.removesuffix(".weight") for name, tensor in before.items() if tensor.dim() == 2 and ".layers." in name
    }
    assert names == matrices  # conv.conv has three dimensions
    assert {f"{name}.weight_packed" for name in names} <= after.keys()
    rest = {name for name in before if name.removesuffix(".weight") not in names}
    assert all(torch.equal(before[name], after[name]) for name in rest)
    assert after.keys() == rest | {f"{name}.weight_{end}" for name in names for end in ("packed", "scale", "shape")}
    found = measure(source, tmp_path, HELD_OUT, torch.float32)
    assert len(found.layers) == model.spec.layers and max(found.layers) < 0.05 and found.kl_mean < 0.02


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_engine_reads_what_was_written(recipe: Recipe, checkpoints: Any, tmp_path: Path) -> None:
    quantize(checkpoints("qwen3"), tmp_path, recipe, CALIBRATION)
    weights, model = open_weights(tmp_path), LayerwiseModel(tmp_path)
    for linear in projections(model.spec, model.names, 1).values():
        for part in linear:
            found = weights.take_quantized(f"{part.name}.weight", (part.rows, part.columns))
            assert found is not None and found.minimums is None
            assert (found.bits, found.group) == (recipe.bits, recipe.group or part.columns)
    prompts = texts(3, 20, seed=2)
    exact, packed = (Stepper(load_decoder(tmp_path, dtype=dtype), prompts) for dtype in (torch.float32, torch.bfloat16))
    assert apart(torch.cat(packed.run(16)), torch.cat(exact.run(16))) < 0.1


def test_four_bits_are_further_than_eight_and_gptq_nearer_than_rounding(checkpoints: Any, tmp_path: Path) -> None:
    kl = {}
    for recipe in (Recipe("int8", "rtn"), Recipe("int4", "gptq", 32, act_order=True), Recipe("int4", "rtn", 32)):
        target = tmp_path / f"{recipe.to}-{recipe.method}"
        quantize(checkpoints("qwen3"), target, recipe, texts(100, 60, seed=3))
        kl[target.name] = measure(checkpoints("qwen3"), target, HELD_OUT, torch.float32).kl_mean
    assert kl["int8-rtn"] < kl["int4-gptq"] / 10 < kl["int4-rtn"] / 10


class Killed(Exception):
    pass


@pytest.mark.parametrize("recipe", [Recipe("int4", "gptq", 32), Recipe("int8", "smoothquant")], ids=str)
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(recipe: Recipe, checkpoints: Any, tmp_path: Path) -> None:
    source, whole, stopped = checkpoints("lfm2"), tmp_path / "whole", tmp_path / "stopped"
    quantize(source, whole, recipe, CALIBRATION)

    def stop(layer: LayerDone) -> None:
        if layer.index == 1:
            raise Killed

    with pytest.raises(Killed):
        quantize(source, stopped, recipe, CALIBRATION, done=stop)
    (stopped / "model-00003-of-00006.safetensors.part").write_bytes(b"half of a shard")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_decoder(stopped, dtype=torch.float32)
    with pytest.raises(CheckpointError, match="begun with text"):
        quantize(source, stopped, recipe, HELD_OUT * 5, resume=True)
    done: list[LayerDone] = []
    quantize(source, stopped, recipe, CALIBRATION, resume=True, done=done.append)
    assert [layer.resumed for layer in done] == [True, True, False, False, False]
    assert contents(stopped) == contents(whole)


def test_a_directory_with_anything_in_it_is_not_written_to(checkpoints: Any, tmp_path: Path) -> None:
    source, recipe = checkpoints("qwen3"), Recipe("int8", "rtn")
    quantize(source, tmp_path, recipe, [])
    first = contents(tmp_path)
    with pytest.raises(CheckpointError, match="not empty.*--resume.*--overwrite"):
        quantize(source, tmp_path, recipe, [])
    with pytest.raises(CheckpointError, match=r"begun with to int8 \(now int4\)"):
        quantize(source, tmp_path, Recipe("int4", "rtn", 32), [], resume=True)
    quantize(source, tmp_path, Recipe("int4", "rtn", 32), [], overwrite=True)
    assert contents(tmp_path) != first
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"thesis\.txt"):
        quantize(source, tmp_path, recipe, [], overwrite=True)
    (tmp_path / "thesis.txt").unlink()
    (tmp_path / "quantization.json").unlink()
    for resume in (True, False):
        with pytest.raises(CheckpointError, match="ponder quantize"):
            quantize(source, tmp_path, recipe, [], resume=resume, overwrite=not resume)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("int8", "rtn", 32), "leave it out"),
        (("int4", "gptq", 48), "32, 64, 128"),
        (("int4", "gptq"), "32, 64, 128"),
        (("int4", "smoothquant", 32), "rtn, gptq, awq"),
        (("int4", "awq", 32, True), "act_order is for gptq"),
    ],
)
def test_recipes_that_there_are_not_are_refused(options: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        Recipe(*options)


def test_models_and_texts_that_do_not_fit_are_refused(checkpoints: Any, tmp_path: Path) -> None:
    source, out = checkpoints("qwen3"), tmp_path / "out"
    quantize(source, tmp_path / "int8", Recipe("int8", "rtn"), [])
    (tmp_path / "whole.gguf").write_bytes(b"GGUF")
    refused: list[tuple[Path, Path, Recipe, list[list[int]], str]] = [
        (tmp_path / "int8", out, Recipe("int8", "rtn"), [], r"already \(compressed-tensors\)"),
        (tmp_path / "whole.gguf", out, Recipe("int8", "rtn"), [], "GGUF"),
        (source, source, Recipe("int8", "rtn"), [], "the model itself"),
        (source, out, Recipe("int4", "gptq", 128), CALIBRATION, "64 inputs; accepted: 32, 64"),
        (checkpoints("olmo2"), out, Recipe("int8", "smoothquant"), CALIBRATION, "norms before linears"),
        (checkpoints("cohere2"), out, Recipe("int8", "smoothquant"), CALIBRATION, "one for attention and MLP together"),
        (source, out, Recipe("int4", "gptq", 32), CALIBRATION[:2], "120 tokens .* needs 2,048"),
        (source, out, Recipe("int4", "rtn", 32), [[5] * 700], "700 tokens; the model takes at most 640"),
    ]
    for model, target, recipe, calibration, words in refused:
        with pytest.raises(EngineError, match=words):
            quantize(model, target, recipe, calibration)
    assert not out.exists()
    mixture = tiny.save(tiny.build(*tiny.MODELS["mixtral"]), tmp_path / "mixture")
    with pytest.raises(CheckpointError, match="has experts, which are not quantised yet"):
        quantize(mixture, out, Recipe("int8", "rtn"), [])
    with pytest.raises(InvalidParameter, match="60 tokens to measure on, and 512"):
        measure(source, source, HELD_OUT[:1])


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_compressed_tensors_reads_the_same_weights(recipe: Recipe, checkpoints: Any, tmp_path: Path) -> None:
    package = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed; it is optional")
    from compressed_tensors.compressors import BaseCompressor

    quantize(checkpoints("qwen3"), tmp_path, recipe, CALIBRATION)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    scheme = package.QuantizationConfig.model_validate(settings).config_groups["group_0"]
    stored = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    weights, model = open_weights(tmp_path), LayerwiseModel(tmp_path)
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    for linear in projections(model.spec, model.names, 0).values():
        for part in linear:
            parts = {name.rpartition(".")[2]: each for name, each in stored.items() if name.startswith(f"{part.name}.")}
            parts["weight_scale"] = parts["weight_scale"].float()
            expected = compressor.decompress(parts, scheme)["weight"]
            assert torch.equal(weights.take(f"{part.name}.weight", (part.rows, part.columns)), expected)
